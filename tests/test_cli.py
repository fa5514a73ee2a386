"""The command line: every flag, every refusal, the help, and what a run prints.

Each docstring ends with what was broken to see the test fail.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import math
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

import common.cli
from common.cli import NOT_TRAINING, command, parse_args, read_checkpoint, saved_args
from common.envs import make_env
from common.run_folder import Run
from tests.conftest import ROOT, SCRIPTS, all_scripts, load
from tests.run_envs import ACTIONS, actions_of, fields, small, training_changes, walk

# Counts and scales that 0 is no value for; of the others that are numbers, only log_std_init may be negative.
ABOVE_ZERO = {"total_timesteps", "num_envs", "num_steps", "num_minibatches", "update_epochs", "hidden_dim",
              "eval_max_steps", "checkpoint_every", "clip_coef", "target_kl"}  # fmt: skip


def flag(name):
    return "--" + name.rstrip("_").replace("_", "-")


def flags(changes):
    """Settings as words of a command line."""
    words = []
    for name, value in changes.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(name).replace("--", "--no-", 1))
        else:
            words += [flag(name), str(value)]
    return words


def words(args):
    """The command line of `args`, every field that is not None."""
    return flags({name: value for name, value in dataclasses.asdict(args).items() if value is not None})


def main(script, *argv):
    """The script run as a program, with these words after its name; returns the exit status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script.__name__}.py", *argv])
        try:
            runpy.run_path(script.__file__, run_name="__main__")
        except SystemExit as stop:
            return stop.code
        except KeyboardInterrupt:
            return "KeyboardInterrupt"  # which pytest would take for its own
    return 0


def program(*argv, cwd, **environ):
    """A Python process of its own, in the folder `cwd`."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run([sys.executable, *argv], cwd=cwd, env=environ, capture_output=True, timeout=120)
    return done.returncode, done.stdout.decode("ascii"), done.stderr.decode("ascii")


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    """{script's name: (folder, stdout)}: a small run of each, of all in one other process, without rerun and
    with three threads offered."""
    code = """
import contextlib, json, runpy, sys
sys.modules["rerun"] = None
for sys.argv, stdout in json.loads(sys.argv[1]):
    with open(stdout, "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(sys.argv[0], run_name="__main__")
"""
    folders = {name: tmp_path_factory.mktemp(name) for name in SCRIPTS}
    modules = {name: importlib.import_module(name) for name in SCRIPTS}
    jobs = [
        ([modules[name].__file__, *words(small(modules[name], folder / "run", rerun=True))], f"{folder}.txt")
        for name, folder in folders.items()
    ]
    threads = {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "PYTHONHASHSEED": "7"}
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert program("-c", code, json.dumps(jobs), cwd=elsewhere, **threads) == (0, "", "")
    assert list(elsewhere.iterdir()) == []
    return {name: (folder, Path(f"{folder}.txt").read_text("ascii")) for name, folder in folders.items()}


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Writing through to the disk is most of the time of a small run."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


# From the shell


def test_a_process_with_other_threads_writes_the_same_bytes(script, shell, tmp_path):
    """The number of cores, the hash seed and the command line itself leave no trace. Fails with the thread
    count in the checkpoint, and with a set of strings iterated over in it."""
    folder, _ = shell[script.__name__]
    script.train(small(script, tmp_path))
    assert (folder / "run" / "checkpoint.pt").read_bytes() == (tmp_path / "checkpoint.pt").read_bytes()


def test_without_rerun_a_run_says_so_in_one_line_and_goes_on(script, shell):
    """Fails with ImportError not caught, and with rerun imported at the top."""
    folder, stdout = shell[script.__name__]
    assert len(re.findall(r"^no recording: rerun is not installed.*pip install", stdout, re.MULTILINE)) == 1
    assert len(re.findall("recording", stdout)) == 1
    assert "watch" not in stdout
    assert sorted(path.name for path in folder.iterdir()) == ["run"]
    assert not (folder / "run" / "recording.rrd").exists() and (folder / "run" / "summary.json").exists()


def test_what_a_run_prints(script, shell):
    """Header, table, evaluation, and what to do next. Fails with any of these left out."""
    folder, stdout = shell[script.__name__]
    lines = stdout.splitlines()
    assert lines[0].startswith(f"{script.__name__}  ") and re.search(r"seed 0  cpu.* parameters$", lines[0])
    assert lines[1] == "2 envs x 16 steps = 32 a rollout, 6 iterations (192 steps)"
    table = next(i for i, line in enumerate(lines) if line.split()[:3] == ["step", "return", "V@limit"])
    assert [int(line.split()[0]) for line in lines[table + 1 : table + 7]] == [32, 64, 96, 128, 160, 192]
    assert re.match(r"evaluation \d\.\d \+- 0\.0 over 1 episode", lines[table + 7])
    compare = [line for line in lines if line.startswith("compare")]
    assert compare == [f"compare  python -m common.compare {folder}"]
    ablate = [line for line in lines if line.startswith("ablate")]
    assert len(ablate) == ("clip_ratio" in fields(script))


def narrow(output, *paths):
    """ASCII, and at most 80 columns but where a line holds a path or a command."""
    assert output.isascii()
    for line in output.splitlines():
        if not any(str(path) in line for path in paths) and not re.search("python |pip install", line):
            assert len(line) <= 80, line


def test_console_output_is_narrow_and_ascii(script, shell, tmp_path, capsys):
    """Of a whole run, one that is stopped, resumed and finished, and one whose evaluation does not end. Fails
    with a column more in the table, and with +- as one sign."""
    folder, stdout = shell[script.__name__]
    narrow(stdout, folder)
    endless = walk(script, steps=0, edge=1e9)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(Run, "log", send_signal_in(Run.log, 2))
        script.train(small(script, tmp_path, **endless))
    saved = saved_args(script.Args, load(tmp_path), resume=str(tmp_path), rerun=False)
    for _ in range(2):
        script.train(dataclasses.replace(saved, eval_episodes=11, eval_max_steps=123))
    for name in ("", "CartPole-v1" if actions_of(script) == "discrete" else "CartPoleContinuous-v0"):
        settings = {"env_id": name, "env_kwargs": "{}"} if name else endless
        size = {"total_timesteps": 32, "eval_episodes": 11, "eval_max_steps": 2}
        script.train(small(script, tmp_path / f"other {name}", **settings, **size))
    output = capsys.readouterr().out
    assert "Ctrl-C" in output and "is finished" in output and "--eval-max-steps 123" in output
    narrow(output, tmp_path)


def send_signal_in(method, at, number=signal.SIGINT):
    def log(run, *lines):
        if lines[-1]["iteration"] == at:
            os.kill(os.getpid(), number)
        method(run, *lines)

    return log


def test_importing_a_script_does_nothing_and_a_refusal_is_its_sentence(tmp_path):
    """All scripts in one process: nothing printed, no file, no rerun, no random number drawn, no handler or
    thread count changed. Then a refused run: the sentence alone on stderr, exit status 2, no file. Fails with
    a print at module level, with rerun imported at the top, and with the refusal not caught."""
    code = f"""
import random, runpy, signal, sys
import numpy, torch
torch.set_num_threads(2)

def state():
    yield from (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()))
    yield from (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), torch.get_num_threads())

before = list(state())
import {", ".join(SCRIPTS)}
assert before == list(state())
assert not {{"rerun", "matplotlib", "stable_baselines3"}} & set(sys.modules)
sys.argv = ["{SCRIPTS[0]}.py", "--total-timesteps", "1", "--rerun"]
runpy.run_path({SCRIPTS[0]}.__file__, run_name="__main__")
"""
    status, stdout, stderr = program("-B", "-c", code, cwd=tmp_path)
    assert (status, stdout) == (2, ""), stderr
    assert re.fullmatch(r"--total-timesteps 1 is less than one rollout: give \d+ or more\n", stderr)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_the_exit_status_of_a_stopped_run(script, number, status, tmp_path, monkeypatch, capsys):
    """And its resume line, which works as it is printed. Fails with SystemExit caught in
    `command_line`, and with 128 as the status."""
    monkeypatch.setattr(Run, "log", send_signal_in(Run.log, 3, number))
    monkeypatch.chdir(tmp_path)
    assert main(script, *words(small(script, "a"))) == status
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    captured = capsys.readouterr()
    assert captured.err == ""
    python, name, *argv = re.search(r"^resume +(.*)$", captured.out, re.MULTILINE)[1].split()
    assert (python, name) == ("python", f"{script.__name__}.py")
    assert main(script, *argv, "--no-rerun", "--eval-episodes", "1") == 0
    script.train(small(script, "b"))
    assert Path("a", "checkpoint.pt").read_bytes() == Path("b", "checkpoint.pt").read_bytes()


def test_ctrl_c_before_training_begins(script, tmp_path, monkeypatch, capsys):
    """Fails without `except KeyboardInterrupt` in `command_line`: a traceback."""

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "__init__", interrupted)
    assert main(script, *words(small(script, tmp_path))) == 130
    assert capsys.readouterr().err == ""


def test_a_run_that_is_no_number_any_more_exits_with_1(script, tmp_path, capsys):
    """One sentence with the iteration and the quantity; the last checkpoint stays. Fails with NonFinite not
    caught, and with no check of the observations."""
    args = small(script, tmp_path, **walk(script, steps=100, edge=1e9, nan_at=20), checkpoint_every=1)
    assert main(script, *words(args)) == 1
    stderr = capsys.readouterr().err
    assert re.match(r"iteration 2: the observation is not finite", stderr)
    assert stderr.count("\n") == 1 and stderr.isascii()
    assert load(tmp_path)["iteration"] == 1
    with pytest.raises(FloatingPointError, match="iteration 2: the observation"):
        script.train(dataclasses.replace(args, out=str(tmp_path / "again")))


# Refusals

VALUE = object()  # stands for what the sentence proposes


def refusals(script):
    """(name, changes to a small run that cannot work, a pattern of the sentence, changes that mend it)."""
    takes = actions_of(script)
    other = {"box": "discrete", "discrete": "box"}.get(takes)
    yield from [
        ("timesteps", {"total_timesteps": 31}, r"--total-timesteps 31 .*: give (\d+) or more$",
         {"total_timesteps": VALUE}),
        ("negative timesteps", {"total_timesteps": -1}, r"--total-timesteps -1 .*: give (\d+) or more$",
         {"total_timesteps": VALUE}),
        ("breaks", {"break_": True, "break_reset": True}, "--break and --break-reset", {"break_": False}),
    ]  # fmt: skip
    for device in ("gpu", "cuda:99", "mps:7", "meta", "hpu"):  # each fails in another way where it is missing
        yield device, {"device": device}, f"--device {device} .*: try --device (cpu)$", {"device": VALUE}
    if "num_minibatches" in fields(script):
        yield from [
            (f"{m} minibatches", {"num_minibatches": m}, rf"--num-minibatches {m} .*: (\d+) does$",
             {"num_minibatches": VALUE})
            for m in (5, 24, 64, 1000)
        ]  # fmt: skip
        one_row = {"num_minibatches": 32}
    else:
        one_row = {"num_envs": 1, "num_steps": 1, "norm_adv": True}
    pattern = r"--norm-adv .*: give --num-steps (\d+) or --no-norm-adv$"
    yield "one row, more steps", one_row, pattern, {"num_steps": VALUE}
    yield "one row, no norm_adv", one_row, pattern, {"norm_adv": False}
    if takes is None:
        return
    example = """write it like '({"g": 9.81})'$"""
    yield from [
        ("unknown", {"env_id": "Nope-v0"}, "--env-id Nope-v0 .*doesn't exist", None),
        ("unknown package", {"env_id": "nope/Walk-v0"}, "--env-id nope/Walk-v0 .*not found", None),
        ("malformed", {"env_id": "a walk"}, "--env-id a walk .*Malformed environment ID", None),
        ("old", {"env_id": "Pendulum-v0", "env_kwargs": "{}"}, "--env-id Pendulum-v0 .*Pendulum-v1", None),
        ("unknown module", {"env_id": "nope:Walk-v0"}, "--env-id nope:Walk-v0 .*No module named", None),
        ("no JSON", {"env_kwargs": "{g: 1}"}, "--env-kwargs {g: 1} is not JSON .*" + example, None),
        ("no object", {"env_kwargs": "[1]"}, r"--env-kwargs \[1\] is no JSON object: " + example, None),
        ("kwarg", walk(script, g=9.81), "--env-id .*Walk-v0 with --env-kwargs .*'g'", walk(script)),
        ("failing", walk(script, fails="no luck\n\u00e0 la carte"), "--env-id .*Walk-v0 .*no luck", None),
    ]  # fmt: skip
    for kind, actions in ACTIONS.items():
        several = isinstance(actions, (MultiBinary, MultiDiscrete)) and script.__name__ == "ppo_discrete"
        if not isinstance(actions, (Box, Discrete)) and not several:
            yield f"{kind} actions", walk(script, actions=kind), f"--env-id .*{type(actions).__name__}", None
    yield "text", walk(script, observes="text"), "--env-id .*Walk-v0 observes Text", None
    yield "image", walk(script, observes="image"), "--env-id .*Walk-v0 observes images", None
    if script.__name__ in ("ppo_continuous", "ppo_discrete"):
        pattern = (
            rf"--env-id .*Walk-v0 has \w+ actions, {script.__name__}\.py takes [\w, ]+: (ppo_\w+)\.py takes "
        )
        yield "the other kind of actions", walk(script, actions=other), pattern, {"script": VALUE}
    if "squash" in fields(script):
        for kind in ("unbounded", "half bounded"):
            unbounded = {**walk(script, actions=kind), "squash": True}
            yield f"squash, {kind}", unbounded, "--squash: .* leave --squash out$", {"squash": False}


CASES = [
    pytest.param(name, *case, id=f"{name}-{case[0]}")
    for name in SCRIPTS
    for case in refusals(importlib.import_module(name))
]


@pytest.mark.parametrize("name, what, changes, pattern, mended", CASES)
def test_a_refusal_is_one_sentence_before_anything_starts(
    name, what, changes, pattern, mended, tmp_path, monkeypatch, capsys, recwarn
):
    """A ValueError from train; at the command line the sentence alone on stderr and exit status 2. No folder
    is made, and what the sentence proposes works. Fails with the check in question left out, with the folder
    made before the checks, and with a reason of several lines passed on as it is."""
    script = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    args = small(script, "run", **changes)
    with pytest.raises(ValueError) as refusal:
        script.train(args)
    sentence = str(refusal.value)
    match = re.match(pattern, sentence)
    assert match, sentence
    assert sentence.isascii() and sentence.isprintable() and len(sentence) < 400, sentence
    assert main(script, *words(args)) == 2
    assert capsys.readouterr() == ("", sentence + "\n")
    assert [str(warning.message) for warning in recwarn.list] == [] and list(tmp_path.iterdir()) == []
    if mended is not None:
        mended = {k: match[1] if v is VALUE else v for k, v in mended.items()}
        if "script" in mended:
            script = importlib.import_module(mended.pop("script"))
        mended = {k: int(v) if isinstance(v, str) and v.isdigit() else v for k, v in mended.items()}
        script.train(small(script, "run", **{**changes, **mended}))


def numeric(script):
    """(field, type) of every flag that takes a number."""
    for field in dataclasses.fields(script.Args):
        if field.type in (int, float):
            yield field.name, field.type
        elif field.type == (float | None):
            yield field.name, float


def test_a_number_out_of_range_is_refused_by_name(script, tmp_path, monkeypatch, capsys):
    """Negative, NaN, infinite, and 0 where 0 makes no sense, of every flag; the limits themselves are taken.
    Fails with any name taken out of `check_ranges`, and with `not x < 0` for `x >= 0`, which NaN passes."""
    monkeypatch.chdir(tmp_path)
    env = None if actions_of(script) is None else make_env(**walk(script))
    loose = {"total_timesteps": 10**6, "norm_adv": False, "num_minibatches": 1}
    for name, kind in numeric(script):
        wrong = [math.nan, math.inf, -math.inf] if kind is float else []
        wrong += [] if name == "log_std_init" else [-1, kind(-1)]
        wrong += [kind(0)] if name in ABOVE_ZERO else []
        wrong += [1.5] if name in ("gamma", "gae_lambda") else []
        for value in wrong:
            args = small(script, "run", **{name: value})
            with pytest.raises(ValueError) as refusal:
                script.train(args)
            assert str(refusal.value).startswith(f"{flag(name)} {value} "), str(refusal.value)
        assert main(script, *words(args)) == 2
        assert capsys.readouterr() == ("", f"{refusal.value}\n")
        right = {"gamma": [0.0, 1.0], "gae_lambda": [0.0, 1.0], "log_std_init": [-2.0], "total_timesteps": []}
        smallest = (1 if kind is int else 1e-9) if name in ABOVE_ZERO else kind(0)
        for value in right.get(name, [smallest]):
            script.check_args(small(script, "run", **{**loose, name: value}), env)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("unusable", ["file", "file/below"])
def test_an_out_that_cannot_be_a_folder_is_refused(script, unusable, tmp_path, monkeypatch, capsys):
    """Fails with mkdir's own error passed on."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    assert main(script, *words(small(script, unusable))) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(rf"--out {unusable} .*\n", err)
    assert Path("file").read_text() == "mine"


# Flags


def parsed(script, *argv):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", *argv])
        return parse_args(script.Args, script.__name__, script.__doc__)


def test_every_flag_is_taken(script):
    """And sets its own field and no other. Fails with any field given a name of its own in tyro.conf, as
    `--break-` without one."""
    assert parsed(script) == script.Args()
    free = {"out": "a b", "eval_episodes": 3, "eval_max_steps": 7, "checkpoint_every": 2, "rerun": False,
            "watch": True}  # fmt: skip
    changes = {**training_changes(script), **free}
    assert {*changes, "resume", "eval_only"} == set(fields(script))
    for name, value in changes.items():
        for given in [True, False] if isinstance(value, bool) else [value]:
            expected = dataclasses.replace(script.Args(), **{name: given})
            assert parsed(script, *flags({name: given})) == expected, name
    assert parsed(script, "--break").break_ and parsed(script, "--break-reset").break_reset
    if "clip_ratio" in fields(script):
        assert not parsed(script, "--no-clip-ratio").clip_ratio


def test_the_ablate_line_is_the_run_with_one_change(script):
    """Fails with a flag off its default left out of `command`, and with switches spelled --break False."""
    args = dataclasses.replace(script.Args(), **training_changes(script))
    python, name, *argv = shlex.split(command(script.__name__, args, gamma=0.25))
    assert (python, name) == ("python", f"{script.__name__}.py")
    assert parsed(script, *argv) == dataclasses.replace(args, gamma=0.25)
    assert command(script.__name__, script.Args()) == f"python {script.__name__}.py --seed 0"


def test_a_variant_is_started_as_a_module(tmp_path, monkeypatch):
    """In the lines a run prints and in the sentence about another script's run. Fails with every script
    started by its file, which finds no common/ from variants/."""
    (tmp_path / "variants").mkdir()
    (tmp_path / "variants" / "ppo_memory.py").touch()
    monkeypatch.setattr(common.cli, "ROOT", tmp_path)
    args = importlib.import_module(SCRIPTS[0]).Args()
    assert command("ppo_memory", args) == "python -m variants.ppo_memory --seed 0"
    assert command("ppo_discrete", args) == "python ppo_discrete.py --seed 0"
    torch.save({"script": "ppo_memory"}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"is a run of variants/ppo_memory\.py: use that script for it$"):
        read_checkpoint(tmp_path, "ppo_discrete", "--resume")


@contextlib.contextmanager
def utf8_stdout():
    """Inside, stdout could show everything, as a terminal does; yields the buffer it writes to."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        yield stdout.buffer


@pytest.mark.parametrize("script", all_scripts(), indirect=True)
def test_the_help_explains_every_flag(script, monkeypatch, capsys):
    """In ASCII and 80 columns. Fails with a field without its comment, with UTF-8 boxes, and with the whole
    docstring as the description, which tyro does not wrap."""
    monkeypatch.setenv("COLUMNS", "80")
    with utf8_stdout() as stdout:
        assert main(script, "--help") == 0
        out = stdout.getvalue().decode()
    assert out.isascii() and capsys.readouterr().err == ""
    assert max(map(len, out.splitlines())) <= 80
    assert out.split("\n\n")[1].endswith(".")
    text = " ".join(out.split())
    for name in fields(script):
        found = re.search(rf" {flag(name)},? (\S+) (.*?) ?\(default: ", text)
        assert found, name
        assert re.search("[a-z]{3}", re.sub(r"--no-[\w-]+", "", found[2])), (name, found[2])


def test_output_that_nobody_reads_on_ends_quietly():
    """As after `| head`. Fails with BrokenPipeError's traceback, from the help or from Python's own end."""
    words = [sys.executable, "ppo_continuous.py", "--help"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("argv, suggestion", [
    (["--gama", "0.9"], "--gamma"), (["--learning-rte=1"], "--learning-rate"),
    (["--no-nrom-adv"], "--norm-adv"),
])  # fmt: skip
def test_a_mistyped_flag_is_refused_with_a_suggestion(
    script, argv, suggestion, tmp_path, monkeypatch, capsys
):
    """Fails with tyro.cli(return_unknown_args=True), which runs without it, and with UTF-8 boxes."""
    monkeypatch.chdir(tmp_path)
    with utf8_stdout() as stdout:
        assert main(script, *argv) == 2
        assert stdout.getvalue() == b""
    err = capsys.readouterr().err
    assert err.isascii() and suggestion in err
    assert list(tmp_path.iterdir()) == []


# What flipping one of them leaves as it was, and why.
SAME_WEIGHTS = {
    "env_id": "the other name is the same environment",
    "device": "the other name is the same device",
}


def test_every_flag_that_shapes_training_does(script, tmp_path):
    """Each one, changed alone in a small run, changes the weights. Fails with any one of them no longer read:
    seen with ent_coef, max_grad_norm, gae_lambda, target_kl and break_reset."""

    def weights(**changes):
        short = {"total_timesteps": 3 * 2 * 16, "eval_episodes": 0, "checkpoint_every": 100, **changes}
        return script.train(small(script, tmp_path / next(iter(changes), "base"), **short)).state_dict()

    base = weights()
    assert set(training_changes(script)) == set(fields(script)) - set(NOT_TRAINING)
    for name, value in training_changes(script).items():
        changed = weights(**{name: value})
        no_gaussian = name == "log_std_init" and actions_of(script) == "discrete"  # it is the Gaussian's
        same = changed.keys() == base.keys() and all(torch.equal(changed[key], base[key]) for key in base)
        assert same == (name in SAME_WEIGHTS or no_gaussian), name


# --resume and --eval-only at the command line


def test_resume_takes_the_settings_of_the_run(script, tmp_path, monkeypatch, capsys):
    """Flags beside it count only where they are given: even a default is a change where the run had another
    value. Fails with the second parse's `default=saved` left out."""
    settings = {"hidden_dim": 12, "norm_obs": True, "learning_rate": 0.01, "anneal_lr": False}
    script.train(small(script, tmp_path / "run", **settings))
    resume = ["--resume", str(tmp_path / "run"), "--no-rerun", "--eval-episodes", "1"]
    assert main(script, *resume) == 0
    assert main(script, *resume, "--hidden-dim", "12", "--learning-rate", "1e-2", "--no-anneal-lr") == 0
    capsys.readouterr()
    default = str(script.Args().learning_rate)
    for argv in (["--learning-rate", default], ["--no-norm-obs"], ["--break"], ["--seed", "5"]):
        assert main(script, *resume, *argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and argv[0].replace("--no-", "--") in err
    assert main(script, *resume, "--total-timesteps", "256") == 0
    assert load(tmp_path / "run")["args"]["total_timesteps"] == 256
    assert load(tmp_path / "run")["iteration"] == 8


def test_eval_only_takes_the_settings_of_the_run(script, tmp_path, capsys):
    """Fails with `evaluate_only` called inside train, after it made a folder, and without `default=saved`."""
    script.train(small(script, tmp_path / "run", hidden_dim=12, norm_obs=True, eval_episodes=2))
    capsys.readouterr()
    assert main(script, "--eval-only", str(tmp_path / "run"), "--eval-episodes", "2") == 0
    out, err = capsys.readouterr()
    assert err == "" and re.fullmatch(r"evaluation \d\.\d \+- \d\.\d over 2 episodes\n", out)
    result = json.loads((tmp_path / "run" / "eval.json").read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert result["eval_returns"] == summary["eval_returns"]
    for argv in (["--gamma", "0.5"], ["--eval-episodes", "0"], ["--resume", str(tmp_path / "run")]):
        assert main(script, "--eval-only", str(tmp_path / "run"), *argv) == 2, argv
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and argv[0] in err
    for name in ("resume", "eval-only"):
        assert main(script, f"--{name}", str(tmp_path / "nothing")) == 2
        out, err = capsys.readouterr()
        assert out == "" and re.fullmatch(rf"--{name} \S+nothing has no checkpoint\.pt: .*\n", err)
