"""Every command of the README, run in its order. Long training is cut to two rollouts and one evaluation."""

import difflib
import importlib
import itertools
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from common.metrics import read_metrics
from tests.benchmarks import results

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
NEEDS_EXTRAS = ("LunarLander-v3", "Hopper-v5", "HalfCheetah-v5")
SETTING_UP = ("python3 -m venv .venv", "source .venv/bin/activate")  # .ci/run does it with its own folder


def commands(text):
    """The command lines of code blocks, joined where a backslash goes on, and those within a sentence."""
    blocks = "".join(re.findall(r"^```\n(.*?)^```", text, re.S | re.M)).replace("\\\n", " ")
    lines = [part.split("  #")[0].strip() for line in blocks.splitlines() for part in line.split("&&")]
    inline = [part.strip() for code in re.findall(r"`([^`\n]+)`", text) for part in code.split("&&")]
    starts = ("python ", "python3 ", "pip ", "pytest", "source ")
    return list(dict.fromkeys(line for line in [*lines, *inline] if line.startswith(starts)))


def marked(command):
    extras = any(env in command for env in NEEDS_EXTRAS)
    slow = "ppo_gpu_batched.py" in command
    return pytest.param(command, marks=[pytest.mark.extras] * extras + [pytest.mark.slow] * slow)


def of(kind):
    """Those of the README's commands that are of this kind; a command of no kind fails the test below."""
    return [marked(command) for command in commands(TEXT) if kind_of(command) == kind]


def kind_of(command):
    if command in SETTING_UP:
        return "setting up"
    for kind, pattern in {
        "script": r"python \w+\.py",
        "compare": r"python -m common\.compare ",
        "watch": r"python -m rerun ",
        "results": r"python -m tests\.benchmarks\.results ",
        "speed": r"python -m tests\.benchmarks\.speed$",
        "pip": r"pip install ",
        "pytest": r"pytest\b",
    }.items():
        if re.match(pattern, command):
            return kind
    return None


def run_module(monkeypatch, words, **how):
    monkeypatch.setattr("sys.argv", words)
    (runpy.run_path if words[0].endswith(".py") else runpy.run_module)(**how, run_name="__main__")


def run_script(monkeypatch, command):
    """Run a script's command, cut short; returns the folder of its run."""
    script, *flags = shlex.split(command)[1:]
    before = set(Path("runs").glob("*"))
    args = importlib.import_module(Path(script).stem).Args()
    values = dict(itertools.pairwise(flags))
    rollout = int(values.get("--num-envs", args.num_envs)) * int(values.get("--num-steps", args.num_steps))
    cut = ["--eval-episodes", "1"]
    if "--eval-only" not in flags:
        cut += ["--total-timesteps", str(2 * rollout)]
    run_module(monkeypatch, [script, *flags, *cut], path_name=str(ROOT / script))
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
    """Fails with a new kind of command in the README, and with a code block left out."""
    assert [command for command in commands(TEXT) if kind_of(command) is None] == []
    assert {kind_of(command) for command in commands(TEXT)} >= {"script", "compare", "watch", "pip", "pytest"}
    assert len(of("script")) >= 15


@pytest.mark.parametrize("command", of("script"))
def test_scripts_run(a_run, monkeypatch, capsys, command):
    """Fails with a flag in the README that a script does not take, or a value it refuses."""
    folder = run_script(monkeypatch, command.replace("runs/NAME", str(a_run)))
    assert "evaluation" in capsys.readouterr().out
    if "--eval-only" not in command:
        assert len(read_metrics(folder)) == 2 and (folder / "recording.rrd").exists()


@pytest.mark.parametrize("command", of("compare"))
def test_compare_runs(a_run, monkeypatch, capsys, command):
    """Fails with an argument in the README that compare does not take."""
    monkeypatch.delitem(sys.modules, "common.compare", raising=False)
    with pytest.raises(SystemExit) as stop:
        run_module(monkeypatch, shlex.split(command)[2:], mod_name="common.compare")
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


@pytest.mark.parametrize("command", of("pip"))
def test_extras_are_there_and_ci_installs_as_the_readme_says(command):
    """Fails with an extra that pyproject.toml does not have."""
    project = (ROOT / "pyproject.toml").read_text()
    for extra in re.findall(r"\.\[(.*)\]", command):
        assert re.search(rf"^{extra} = \[", project, re.M), extra
    assert 'pip install -q -e ".[test]"\npytest\n' in (ROOT / ".ci/run").read_text()


def test_the_diff_of_two_scripts_is_as_long_as_the_readme_says():
    """Fails with a line added to one script."""
    scripts = [(ROOT / name).read_text().splitlines() for name in ("ppo_continuous.py", "ppo_discrete.py")]
    changed = sum(line[0] in "-+" for line in list(difflib.unified_diff(*scripts, n=0))[2:])
    assert f"`diff ppo_continuous.py ppo_discrete.py` changes {changed} lines" in TEXT


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
