"""Every command of the README and docs/, run in its order, and every link followed. Long training is cut to
two rollouts and one evaluation."""

import difflib
import importlib
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest

from common.metrics import read_metrics
from tests.benchmarks import results
from tests.conftest import ROOT
from variants import ppo_robot

README = ROOT / "README.md"
PAGES = results.pages()
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
NEEDS_EXTRAS = ("LunarLander-v3", "Hopper-v5", "HalfCheetah-v5", "MinAtar/", "ALE/")
SETTING_UP = ("python3 -m venv .venv", "source .venv/bin/activate")  # .ci/run does it with its own folder
FORMS = ("python -m variants.NAME",)  # what a command looks like
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def commands(text):
    """The command lines of code blocks that name no other language, joined where a backslash goes on, and
    those within a sentence."""
    blocks = "".join(block for language, block in FENCE.findall(text) if language in ("", "bash"))
    lines = [line.split("  #")[0] for line in blocks.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`([^`]+)`", FENCE.sub("", text))
    parts = [" ".join(part.split()) for line in [*lines, *inline] for part in line.split("&&")]
    starts = ("python ", "python3 ", "pip ", "pytest", "source ", "torchrun ")
    return list(dict.fromkeys(part for part in parts if part.startswith(starts)))


def marked(command):
    extras = any(env in command for env in NEEDS_EXTRAS) or kind_of(command) == "speed"
    # Rows of one table, with one flag changed, and what takes long even cut short.
    rows = ("--memory ", "CartPolePixels", "--pretrain-epochs", "--discriminator-updates",
            "--action-rate-cost", "--actor ", "--no-privileged-critic")  # fmt: skip
    slow = "ppo_gpu_batched.py" in command or "ppo_seeds" in command or kind_of(command) == "torchrun"
    slow = slow or ("variants" in command and any(row in command for row in rows))
    absent = "Taxi-v4" in command and "Taxi-v4" not in gymnasium.registry
    newer = pytest.mark.skipif(absent, reason="Gymnasium has Taxi-v4 from 1.3 on")
    marks = [newer] * absent + [pytest.mark.extras] * extras + [pytest.mark.slow] * slow
    return pytest.param(command, marks=marks)


def of(*kinds):
    """Those of the commands that are of these kinds; a command of no kind fails the test below."""
    return [marked(command) for command in commands(TEXT) if kind_of(command) in kinds]


def kind_of(command):
    if command in (*SETTING_UP, *FORMS):
        return "not run"
    for kind, pattern in {
        "record": r"python -m variants\.ppo_imitation --record ",
        "script": r"python (\w+\.py|-m variants\.\w+)(?!\S)",
        "torchrun": r"torchrun (.* )?-m variants\.\w+(?!\S)",
        "compare": r"python -m common\.compare ",
        "export": r"python -m common\.export ",
        "watch": r"python -m rerun ",
        "results": r"python -m tests\.benchmarks\.results ",
        "motion": r"python -m tests\.benchmarks\.motion ",
        "speed": r"python -m tests\.benchmarks\.speed(?!\S)",
        "pip": r"pip install ",
        "pytest": r"pytest\b",
    }.items():
        if re.match(pattern, command):
            return kind
    return None


def script_of(command):
    """A script's command in three: what starts it, its module, its flags."""
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if re.fullmatch(r"\w+\.py|variants\.\w+", word))
    return words[:at], words[at].removesuffix(".py"), words[at + 1 :]


def run_module(monkeypatch, name, argv):
    """`python -m NAME ARGV`; a script at the top is a module too."""
    monkeypatch.delitem(sys.modules, name, raising=False)  # runpy warns of a module that is already there
    monkeypatch.setattr("sys.argv", [f"{name}.py", *argv])
    runpy.run_module(name, run_name="__main__")


def run_script(monkeypatch, command):
    """Run a script's command, cut short; returns the folder of its run."""
    start, name, flags = script_of(command)
    before = set(Path("runs").glob("*"))
    args = importlib.import_module(name).Args()
    values = dict(itertools.pairwise(flags))
    rollout = int(values.get("--num-envs", args.num_envs)) * int(values.get("--num-steps", args.num_steps))
    cut = ["--eval-episodes", "1"]
    if "--eval-only" not in flags:
        cut += ["--total-timesteps", str(2 * rollout)]
    if start[0] == "torchrun":
        words = [sys.executable, "-m", "torch.distributed.run", *start[1:], name, *flags, *cut]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)
        print(done.stdout)
        assert done.returncode == 0, done.stderr
    else:
        run_module(monkeypatch, name, [*flags, *cut])
    return next(iter(set(Path("runs").glob("*")) - before), None)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    return tmp_path_factory.mktemp("clone")


@pytest.fixture
def a_run(clone, monkeypatch):
    """The working directory is a fresh one with a run in it; its folder."""
    monkeypatch.chdir(clone)
    found = sorted(Path("runs").glob("ppo_continuous*"))
    return found[0] if found else run_script(monkeypatch, "python ppo_continuous.py")


def test_every_command_is_of_a_kind_that_is_run():
    """Fails with a new kind of command on a page, and with a code block left out."""
    assert [command for command in commands(TEXT) if kind_of(command) is None] == []
    assert {kind_of(command) for command in commands(TEXT)} >= {"script", "compare", "watch", "pip", "pytest"}
    assert len(of("script")) >= 15


def test_how_commands_are_found_and_told_apart():
    """Fails with code of another language taken for commands, with a code block's end taken for the start of
    one, with a command that a sentence breaks over two lines not found, and with a variant's of no kind."""
    code = "```python\npython x.py\n```\n`pip a`\n```\npython y.py \\\n    -q  # b\n```\n"
    page = f"`pytest\n-q`, `x.py`\n{code}"
    assert commands(page) == ["python y.py -q", "pytest -q", "pip a"]
    variant = "-m variants.ppo_memory --memory gru"
    torchrun = "torchrun --nproc-per-node 2 -m variants.ppo_many"
    kinds = {f"python {variant}": "script", "python a2c.py --seed 1": "script", torchrun: "torchrun"}
    kinds |= {"python -m variants.NAME": "not run", "python a2c.pyc": None, "python -m nowhere": None}
    assert {command: kind_of(command) for command in kinds} == kinds
    assert script_of(f"python {variant}") == (["python", "-m"], "variants.ppo_memory", ["--memory", "gru"])
    assert script_of(torchrun)[1:] == ("variants.ppo_many", [])
    assert [mark.name for mark in marked(torchrun).marks] == ["slow"]


@pytest.mark.parametrize("command", of("script", "torchrun"))
def test_scripts_run(a_run, monkeypatch, capsys, command):
    """Fails with a flag on a page that a script does not take, or a value it refuses."""
    folder = run_script(monkeypatch, command.replace("runs/NAME", str(a_run)))
    assert "evaluation" in capsys.readouterr().out
    if "--eval-only" not in command:
        assert len(read_metrics(folder)) == 2 and (folder / "recording.rrd").exists()


@pytest.mark.parametrize("command", of("record"))
def test_demonstrations_are_recorded(a_run, monkeypatch, capsys, command):
    """Fails with a flag on a page that --record does not go with."""
    run_module(monkeypatch, "variants.ppo_imitation", shlex.split(command.replace("NAME", a_run.name))[3:])
    assert "5 episodes" in capsys.readouterr().out and (a_run / "demos.npz").exists()


@pytest.mark.extras
@pytest.mark.parametrize("command", of("export"))
def test_policies_are_exported(a_run, monkeypatch, capsys, command):
    """Fails with an argument on a page that export does not take."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.argv", ["export", *shlex.split(command.replace("NAME", a_run.name))[3:]])
        patch.delitem(sys.modules, "common.export", raising=False)
        runpy.run_module("common.export", run_name="__main__")
    assert "policy.onnx: obs -> action" in capsys.readouterr().out


@pytest.mark.parametrize("command", of("motion"))
def test_how_a_robot_moves_is_measured(a_run, tmp_path, monkeypatch, capsys, command):
    """Of a run of ppo_robot, and of no other. Fails with any of the means left out."""
    flags = {
        "env_id": "SetPoint-v0",
        "total_timesteps": 256,
        "num_envs": 2,
        "eval_episodes": 0,
        "rerun": False,
    }
    ppo_robot.train(ppo_robot.Args(**flags, out=str(tmp_path / "robot")))
    words = shlex.split(command.replace("runs/NAME", str(tmp_path / "robot")))[3:]
    run_module(monkeypatch, "tests.benchmarks.motion", words)
    assert re.search(
        r"robot action_rate \S*\d  action_smoothness \S*\d  asymmetry \S*\d  steady_error \S*\d$",
        capsys.readouterr().out,
    )
    with pytest.raises(SystemExit) as stop:
        run_module(monkeypatch, "tests.benchmarks.motion", [str(a_run)])
    said = f"RUN {a_run} is of ppo_continuous.py: give one of variants/ppo_robot.py\n"
    assert stop.value.code == 2 and capsys.readouterr().err == said


@pytest.mark.parametrize("command", of("compare"))
def test_compare_runs(a_run, monkeypatch, capsys, command):
    """Fails with an argument on a page that compare does not take."""
    with pytest.raises(SystemExit) as stop:
        run_module(monkeypatch, "common.compare", shlex.split(command)[3:])
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "ppo_continuous CartPoleContinuous-v0" in out and "overlay" in out


@pytest.mark.parametrize("command", of("watch"))
def test_what_is_watched_is_there(a_run, command):
    """The viewer itself is not opened. Fails with another name for the recording."""
    file = Path(shlex.split(command)[3].replace("runs/NAME", str(a_run)))
    assert file.read_bytes()[:4] == b"RRF2"


@pytest.mark.parametrize("command", of("results"))
def test_the_benchmarks_take_their_arguments(monkeypatch, command):
    """Nothing is trained. Fails with a recipe or a flag that is not there."""
    asked = []
    monkeypatch.setattr(results, "run", lambda jobs, side_by_side: asked.extend(jobs))
    monkeypatch.setattr(results, "report", lambda: asked.append("report"))
    monkeypatch.setattr("sys.argv", shlex.split(command)[2:])
    results.main()
    assert asked


@pytest.mark.parametrize("command", of("speed"))
def test_the_speed_benchmark_takes_its_arguments(monkeypatch, capsys, command):
    """Nothing is measured. Fails with a flag on a page that it does not have, and with a part that is not
    measured when it is asked for."""
    from tests.benchmarks import growth, peers, speed

    asked, stored = [], json.loads(speed.SPEED.read_text())
    monkeypatch.setattr(peers, "refuse_what_is_missing", lambda folders: None)
    monkeypatch.setattr(speed.importlib.metadata, "version", lambda name: "0")
    monkeypatch.setattr(peers, "measure", lambda *how: asked.append("peers") or [])
    monkeypatch.setattr(growth, "measure", lambda *how: asked.append("growth") or [])
    monkeypatch.setattr(speed, "compare", lambda *how: asked.append("compare") or stored)
    monkeypatch.setattr(speed, "store", lambda measured: None)
    monkeypatch.setattr("sys.argv", shlex.split(command)[2:])
    speed.main()
    parts = [part for part in ("peers", "growth") if f"--{part}" in command] or ["compare"]
    assert asked == parts and "commit" in capsys.readouterr().out


@pytest.mark.parametrize("command", of("pip"))
def test_extras_are_there_and_ci_installs_as_the_readme_says(command):
    """Fails with an extra that pyproject.toml does not have."""
    project = (ROOT / "pyproject.toml").read_text()
    for extras in re.findall(r"\.\[(.*)\]", command):
        for extra in extras.split(","):
            assert re.search(rf"^{extra} = \[", project, re.M), extra
    assert 'pip install -q -e ".[test]"\npytest\n' in (ROOT / ".ci/run").read_text()


def test_the_diff_of_two_scripts_is_as_long_as_docs_scripts_says():
    """Fails with a line added to one script."""
    scripts = [(ROOT / name).read_text().splitlines() for name in ("ppo_continuous.py", "ppo_discrete.py")]
    changed = sum(line[0] in "-+" for line in list(difflib.unified_diff(*scripts, n=0))[2:])
    assert f"`diff ppo_continuous.py ppo_discrete.py` changes {changed} lines" in TEXT


def test_the_recipes_are_commands_of_the_pages():
    """Fails with a recipe that has a flag which no page shows."""
    shown = commands(TEXT)
    for names in results.tables().values():
        for name in names:
            assert f"python {results.RECIPES[name].command}" in shown, name


def test_the_readme_is_a_front_door():
    """Two lines of commands set up and run. Fails with a README of 201 lines, and with a third line."""
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    first, second = FENCE.search(text)[2].splitlines()
    assert first.startswith(" && ".join(SETTING_UP))
    assert second == "pip install -e . && python ppo_continuous.py --seed 0"


def links(page):
    """(file, anchor) of the relative links and images of a page; the anchor may be empty."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", text):
        path, _, anchor = "".join(target).partition("#")
        if "://" not in path:
            yield (page.parent / path).resolve() if path else page, anchor


def anchors(page):
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "exercises/README.md", results.REPORT], ids=str)
def test_every_link_leads_somewhere(page):
    """Fails with a link to a file that is not there, and with one to a heading that has another name."""
    for path, anchor in links(page):
        assert path.exists(), path
        assert not anchor or anchor in anchors(path), (path.name, anchor)


def test_readme_and_docs_lead_to_each_other():
    """Fails with a page of docs/ that the README does not link, and with one that has no way back."""
    assert {path for path, _ in links(README)} >= set(PAGES) - {README}
    for page in PAGES:
        assert page == README or README in [path for path, _ in links(page)], page.name


@pytest.mark.slow
@pytest.mark.parametrize("command", of("pytest"))
def test_pytest_finds_tests(command):
    """Fails with a path or a marker that is not there."""
    words = [sys.executable, "-m", *shlex.split(command), "--collect-only", "-q"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_the_speed_comparison_runs(monkeypatch, capsys):
    """Four rollouts each. Fails with a setting that Stable-Baselines3 or a script does not take."""
    pytest.importorskip("stable_baselines3")
    from tests.benchmarks import speed

    before = speed.SPEED.read_bytes()
    monkeypatch.setattr("sys.argv", ["speed", "--quick", "--repeats", "1"])
    speed.main()
    assert len(re.findall(r"^\| `", capsys.readouterr().out, re.M)) == len(speed.SETTINGS)
    assert speed.SPEED.read_bytes() == before
