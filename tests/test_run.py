"""A run: the same bytes every time, a folder that is whole at every moment, stopping, going on, evaluation.

Each docstring ends with what was broken to see the test fail.
"""

import contextlib
import dataclasses
import errno
import importlib
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import tokenize
import types
from pathlib import Path

import numpy as np
import pytest
import torch

import common.console
import common.run_folder
from common.cli import NOT_TRAINING, EnvironmentFailed, Refusal, command_line, saved_args
from common.envs import make_env
from common.files import canonical
from common.run_folder import Run
from tests.conftest import ROOT, SCRIPTS, interrupt, load, metrics
from tests.run_envs import actions_of, fields, small, training_changes, walk

BASE = {"iteration", "global_step", "episodes", "episodic_return", "episodic_length", "value_at_time_limit",
        "policy_loss", "value_loss", "entropy", "explained_variance", "learning_rate", "sps"}  # fmt: skip
SUMMARY = {"script", "env_id", "seed", "args", "global_step", "iterations", "eval_return_mean",
           "eval_return_std", "eval_returns", "eval_episodes", "train_return_mean",
           "value_at_time_limit", "train_seconds", "sps"}  # fmt: skip
SIGNALS = {signal.SIGINT: 130, signal.SIGTERM: 143}


def checkpoint_bytes(folder):
    return (folder / "checkpoint.pt").read_bytes()


def read_json(path):
    """The content of a JSON file; NaN and Infinity, which are no JSON, are an error."""

    def refuse(name):
        raise AssertionError(f"{path.name} holds {name}")

    return json.loads(path.read_text(), parse_constant=refuse)


def timeless(line):
    return {k: v for k, v in line.items() if k not in ("sps", "seconds", "train_seconds")}


def everything(folder):
    """Bytes and modification time of every file in `folder`, by name."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def resumed(script, folder, **changes):
    """The Args of --resume on the command line: the saved run's, but for the flags that shape no training."""
    free = {"resume": str(folder), "rerun": False, "eval_episodes": 1}
    return saved_args(script.Args, load(folder), **{**free, **changes})


def cut(script, args, at, number=signal.SIGINT):
    """Train until a signal in the `at`-th rollout stops it; returns the exit status."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, script, "collect_rollout", at, number)
        with pytest.raises(SystemExit) as stop:
            script.train(args)
    return stop.value.code


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Writing through to the disk is most of the time of a small run, and no test pulls the plug."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


WHOLE = {}


@pytest.fixture
def whole(script, tmp_path_factory):
    """The folder of one uninterrupted small run, made once a script."""
    if script.__name__ not in WHOLE:
        WHOLE[script.__name__] = folder = tmp_path_factory.mktemp(script.__name__) / "whole"
        script.train(small(script, folder))
    return WHOLE[script.__name__]


# Same seed, same bytes


@pytest.mark.parametrize(
    "change",
    [{}, {"eval_episodes": 0}, {"eval_max_steps": 1}, {"checkpoint_every": 1}, {"checkpoint_every": 100},
     {"rerun": True}],
    ids=str,
)  # fmt: skip
def test_same_seed_same_bytes(script, whole, change, tmp_path):
    """Whatever shapes no training leaves no trace. Fails with a checkpoint that holds the folder, with
    NOT_TRAINING without one of these flags, with an evaluation before the last checkpoint that draws from a
    training stream, and with --checkpoint-every as the only reason to write one."""
    script.train(small(script, tmp_path / "again", **change))
    assert checkpoint_bytes(tmp_path / "again") == checkpoint_bytes(whole)


def test_progress_and_randomness_elsewhere_leave_no_trace(script, whole, tmp_path, monkeypatch):
    """Fails with a progress row that draws a random number from a training stream, and with action noise
    from torch's own generator."""
    monkeypatch.setattr(common.console, "CONSOLE_ROWS", 1)
    monkeypatch.setattr(common.console, "ROW_SECONDS", math.inf)
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    script.train(small(script, tmp_path / "again"))
    assert checkpoint_bytes(tmp_path / "again") == checkpoint_bytes(whole)


def test_a_thread_that_is_not_the_main_one_can_train(script, whole, tmp_path):
    """It gets no signals, and needs none. Fails with handlers set in any thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(script.train(small(script, tmp_path / "again"))))
    thread.start()
    thread.join()
    assert len(results) == 1
    assert checkpoint_bytes(tmp_path / "again") == checkpoint_bytes(whole)


def test_another_seed_other_bytes_everywhere(script, tmp_path):
    """In the weights, the optimizer and every stream. Fails with Args.seed left out of any one stream."""
    for seed in (0, 1):
        script.train(small(script, tmp_path / str(seed), seed=seed, norm_reward=True))
    one, other = (load(tmp_path / str(seed))["state"] for seed in (0, 1))
    for name in one:
        assert repr(one[name]) != repr(other[name]), name
        if "seed" in one[name]:  # an environment's: its other actions alone would make a difference
            assert one[name]["seed"] != other[name]["seed"], name
    values = torch.cat([value.flatten() for value in one["agent"].values()])
    assert not torch.equal(values, torch.cat([value.flatten() for value in other["agent"].values()]))


def test_without_its_run_lines_a_script_trains_the_same_weights(script, tmp_path, monkeypatch):
    """DESIGN.md's promise: folder, progress, checkpoint and recording can be deleted line by line. Fails with
    `if not run: return` style logic around the update, as with first_iteration known to run.restore alone."""
    source = (ROOT / f"{script.__name__}.py").read_text()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    named = {token.start[0] for token in tokens if (token.type, token.string) == (tokenize.NAME, "run")}
    assert len(named) >= 6
    kept = [line for number, line in enumerate(source.splitlines(), 1) if number not in named]
    bare = types.ModuleType("bare")
    bare.__file__ = script.__file__
    monkeypatch.setitem(sys.modules, "bare", bare)
    exec("\n".join(kept), bare.__dict__)
    monkeypatch.chdir(tmp_path)
    settings = small(script, "out", norm_obs=True, norm_reward=True)
    weights = bare.train(bare.Args(**dataclasses.asdict(settings))).state_dict()
    assert list(tmp_path.iterdir()) == []
    for name, value in script.train(settings).state_dict().items():
        assert torch.equal(weights[name], value), name


# Cut and resumed, same bytes


@pytest.mark.parametrize(
    "settings",
    [{}, {"anneal_lr": False, "norm_obs": True},
     {"norm_obs": True, "norm_reward": True, "shared_trunk": True},
     {"squash": True, "norm_reward": True, "clip_vloss": True, "target_kl": 0.01, "checkpoint_every": 1},
     {"optimizer": "rmsprop", "norm_adv": False, "orthogonal_init": False, "break_reset": True,
      "checkpoint_every": 4}],
    ids=str,
)  # fmt: skip
def test_cut_and_resumed_is_uninterrupted(script, settings, tmp_path):
    """The weights, the metrics and the summary, whatever the settings. Fails with any one part left out of
    `state`, and with a replay that does not count episodes on."""
    script.train(small(script, tmp_path / "whole", **settings))
    assert cut(script, small(script, tmp_path / "cut", **settings), at=3) == 130
    assert load(tmp_path / "cut")["iteration"] == 3
    script.train(resumed(script, tmp_path / "cut"))
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(tmp_path / "whole")
    for one, other in zip(metrics(tmp_path / "cut"), metrics(tmp_path / "whole"), strict=True):
        assert timeless(one) == timeless(other)
    summaries = [timeless(read_json(tmp_path / name / "summary.json")) for name in ("cut", "whole")]
    assert summaries[0] == summaries[1]


def test_cut_in_every_iteration(script, whole, tmp_path):
    """The last cut falls into the last iteration: only the evaluation is left to do. The sessions' seconds
    add up. Fails with canonical() removed (after a load, equal strings are other objects than before), and
    with seconds counted from the session's start."""
    args = small(script, tmp_path / "cut")
    for iteration in range(1, 7):
        assert cut(script, args, at=1) == 130
        assert load(tmp_path / "cut")["iteration"] == iteration
        assert not (tmp_path / "cut" / "summary.json").exists()
        args = resumed(script, tmp_path / "cut")
    script.train(args)
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(whole)
    lines = metrics(tmp_path / "cut")
    assert [timeless(line) for line in lines] == [timeless(line) for line in metrics(whole)]
    seconds = [line["seconds"] for line in lines]
    assert seconds == sorted(seconds) and seconds[0] > 0
    summary = read_json(tmp_path / "cut" / "summary.json")
    assert timeless(summary) == timeless(read_json(whole / "summary.json"))
    assert summary["train_seconds"] == seconds[-1]


def test_a_crash_loses_what_came_after_the_checkpoint_and_no_more(script, whole, tmp_path, monkeypatch):
    """Metrics of iterations that the checkpoint does not hold, and the half line a kill can leave, are cut
    off. Fails with metrics.jsonl opened to append without being cut back, and cut to whole lines only."""
    monkeypatch.setattr(script, "collect_rollout", crash_at(script.collect_rollout, 6))
    with pytest.raises(OSError, match="crash"):
        script.train(small(script, tmp_path / "cut", checkpoint_every=2))
    monkeypatch.undo()
    assert len(metrics(tmp_path / "cut")) == 5
    assert load(tmp_path / "cut")["iteration"] == 4
    with (tmp_path / "cut" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "global_st')
    script.train(resumed(script, tmp_path / "cut"))
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(whole)
    assert [timeless(line) for line in metrics(tmp_path / "cut")] == [
        timeless(line) for line in metrics(whole)
    ]


def crash_at(function, at):
    """`function`, but its `at`-th call raises."""
    calls = itertools.count(1)

    def wrapper(*args, **kwargs):
        if next(calls) == at:
            raise OSError("crash")
        return function(*args, **kwargs)

    return wrapper


def test_there_is_a_checkpoint_before_the_first_iteration(script, whole, tmp_path, monkeypatch):
    """Fails with `restore` writing none. It holds no line of metrics."""
    monkeypatch.setattr(script, "collect_rollout", crash_at(script.collect_rollout, 1))
    with pytest.raises(OSError, match="crash"):
        script.train(small(script, tmp_path / "cut"))
    monkeypatch.undo()
    assert load(tmp_path / "cut")["iteration"] == 0 and metrics(tmp_path / "cut") == []
    script.train(resumed(script, tmp_path / "cut"))
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(whole)


# A process that has imported everything, what torch imports late too, forks a run for each line of Args.
FORKS = """
import os, sys, torch._dynamo, tests.run_envs, {name} as script
for line in sys.stdin:
    run = os.fork()
    if run == 0:
        sys.stdout = open(os.devnull, "w")
        script.train(eval(line, dict(Args=script.Args)))
        os._exit(0)
    print(run, flush=True)
    os.waitpid(run, 0)
    print("gone", flush=True)
"""


@pytest.mark.slow
def test_killed_at_any_moment_the_checkpoint_loads_and_resumes(script, tmp_path):
    """Twenty SIGKILLs in one run, which still ends in the uninterrupted run's bytes. Fails with checkpoints
    written in place, and with metrics.jsonl appended to without being cut back."""
    size = {"total_timesteps": 700 * 32, "checkpoint_every": 1, "eval_episodes": 0}
    script.train(small(script, tmp_path / "whole", **size))
    args, rng, done = small(script, tmp_path / "cut", **size), random.Random(0), []
    forks = [sys.executable, "-c", FORKS.format(name=script.__name__)]
    with subprocess.Popen(
        forks, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        for _ in range(25):
            process.stdin.write(f"{args!r}\n")
            run = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.5))
            with contextlib.suppress(ProcessLookupError):  # it has finished
                os.kill(run, signal.SIGKILL)
            assert process.stdout.readline() == "gone\n"
            if (tmp_path / "cut" / "checkpoint.pt").exists():  # or it had not yet begun
                done.append(load(tmp_path / "cut")["iteration"])
                args = resumed(script, tmp_path / "cut", checkpoint_every=1, eval_episodes=0)
        process.stdin.close()
    assert len(done) >= 20 and done == sorted(done) and len(set(done)) > 10
    script.train(args)
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(tmp_path / "whole")
    lines = [[timeless(line) for line in metrics(tmp_path / name)] for name in ("cut", "whole")]
    assert lines[0] == lines[1]
    assert not list((tmp_path / "cut").glob("*.tmp"))


# Signals


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_one_signal_finishes_the_iteration_saves_and_says_how_to_go_on(script, number, tmp_path, capsys):
    """Fails with handlers that raise at once, with a save that only looks at --checkpoint-every, with 128 as
    the exit status, and with `restores_process` taken off `train`."""
    before = {s: signal.getsignal(s) for s in SIGNALS}
    folder = tmp_path / "a run"
    assert cut(script, small(script, folder, checkpoint_every=100), at=3, number=number) == SIGNALS[number]
    assert {s: signal.getsignal(s) for s in SIGNALS} == before
    assert len(metrics(folder)) == load(folder)["iteration"] == 3
    output = capsys.readouterr().out
    assert "Ctrl-C" in output if number == signal.SIGINT else "SIGTERM" in output
    assert str(folder / "checkpoint.pt") in output
    resume = re.search(r"^resume +(python .+)$", output, re.MULTILINE)[1]
    assert shlex.split(resume) == ["python", f"{script.__name__}.py", "--resume", str(folder)]
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.pt", "metrics.jsonl"]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_second_signal_stops_at_once_and_keeps_the_last_checkpoint(script, number, whole, tmp_path, capsys):
    """The recording is closed, which alone bounds how long that takes. Fails with a handler that only counts,
    and with the recording left to Python's end."""
    before, closed = {s: signal.getsignal(s) for s in SIGNALS}, []
    recording = types.SimpleNamespace(log=lambda line: None, close=lambda: closed.append(True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common.run_folder, "open_recording", lambda *args: recording)
        interrupt(patch, script, "collect_rollout", 4, signal.SIGINT, number)
        with pytest.raises(SystemExit) as stop:
            script.train(small(script, tmp_path / "cut", checkpoint_every=2, rerun=True))
    assert stop.value.code == SIGNALS[number] and closed == [True]
    assert {s: signal.getsignal(s) for s in SIGNALS} == before
    assert load(tmp_path / "cut")["iteration"] == 2 and len(metrics(tmp_path / "cut")) == 3
    assert f"--resume {tmp_path / 'cut'}" in capsys.readouterr().out.splitlines()[-1]
    script.train(resumed(script, tmp_path / "cut"))
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(whole)


@pytest.mark.parametrize("after", ["log", "save"])
def test_a_signal_between_saving_and_stopping_is_saved_too(script, after, whole, tmp_path, monkeypatch):
    """When the run says "saved", the iterations whose metrics it wrote are. Fails with a `stop_if_asked` that
    takes a signal `save` has not seen."""
    method = getattr(Run, after)

    def then_signal(run, *args):
        method(run, *args)
        if len(run.lines) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Run, after, then_signal)
    with pytest.raises(SystemExit) as stop:
        script.train(small(script, tmp_path / "cut", checkpoint_every=100))
    monkeypatch.undo()
    assert stop.value.code == 130
    assert load(tmp_path / "cut")["iteration"] == len(metrics(tmp_path / "cut")) >= 3
    script.train(resumed(script, tmp_path / "cut"))
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(whole)


def test_a_signal_while_the_last_checkpoint_is_written_waits(script, whole, tmp_path, monkeypatch):
    """One Ctrl-C loses nothing, at whatever moment it comes. Fails where the run counts as trained before its
    last checkpoint is on disk."""
    save = torch.save

    def signal_then_save(content, file):
        if content["iteration"] == 6:
            os.kill(os.getpid(), signal.SIGINT)
        save(content, file)

    monkeypatch.setattr(torch, "save", signal_then_save)
    with pytest.raises(SystemExit) as stop:
        script.train(small(script, tmp_path / "cut", checkpoint_every=100))
    assert stop.value.code == 130
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(whole)


def test_a_signal_during_the_evaluation_stops_it_at_once(script, whole, tmp_path, monkeypatch, capsys):
    """There is nothing left to save, neither at the end of training nor in a resumed run that had only its
    evaluation to do. Fails with a first signal that always waits for the iteration's end."""
    evaluate = script.evaluate

    def signal_then_evaluate(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*args)

    monkeypatch.setattr(script, "evaluate", signal_then_evaluate)
    args = small(script, tmp_path / "cut")
    for _ in range(2):
        with pytest.raises(SystemExit) as stop:
            script.train(args)
        assert stop.value.code == 143
        assert f"--resume {tmp_path / 'cut'}" in capsys.readouterr().out.splitlines()[-1]
        assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(whole)
        assert read_json(tmp_path / "cut" / "summary.json")["eval_returns"] is None
        args = resumed(script, tmp_path / "cut")
    monkeypatch.setattr(script, "evaluate", evaluate)
    script.train(resumed(script, tmp_path / "cut"))
    assert timeless(read_json(tmp_path / "cut" / "summary.json")) == timeless(
        read_json(whole / "summary.json")
    )


def test_signal_handlers_and_thread_count_are_given_back(script, tmp_path):
    """After a return, a refusal and a crash. Fails with `restores_process` without its `finally`."""

    def mine(number, frame):
        raise AssertionError("not during this test")

    before, threads = {s: signal.signal(s, mine) for s in SIGNALS}, torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        script.train(small(script, tmp_path / "returns"))
        assert [signal.getsignal(s) for s in SIGNALS] == [mine, mine] and torch.get_num_threads() == 3
        with pytest.raises(ValueError):
            script.train(small(script, tmp_path / "refuses", total_timesteps=1))
        assert [signal.getsignal(s) for s in SIGNALS] == [mine, mine] and torch.get_num_threads() == 3
        with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="crash"):
            patch.setattr(script, "collect_rollout", crash_at(script.collect_rollout, 2))
            script.train(small(script, tmp_path / "crashes"))
        assert [signal.getsignal(s) for s in SIGNALS] == [mine, mine] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
        for number, handler in before.items():
            signal.signal(number, handler)


# --resume


def test_more_timesteps_extend_a_finished_run(script, tmp_path, capsys):
    """Without annealing, to what a longer run would have been; with it, the learning rate goes on along the
    longer line. Fails with num_iterations taken from the checkpoint, and with the old total in it."""
    twelve = 12 * 32
    script.train(small(script, tmp_path / "long", anneal_lr=False, total_timesteps=twelve))
    script.train(small(script, tmp_path / "short", anneal_lr=False))
    script.train(resumed(script, tmp_path / "short", total_timesteps=twelve))
    assert checkpoint_bytes(tmp_path / "short") == checkpoint_bytes(tmp_path / "long")
    summaries = [timeless(read_json(tmp_path / name / "summary.json")) for name in ("short", "long")]
    assert summaries[0] == summaries[1]
    assert summaries[0]["iterations"] == load(tmp_path / "short")["iteration"] == 12
    script.train(small(script, tmp_path / "annealed"))
    script.train(resumed(script, tmp_path / "annealed", total_timesteps=twelve))
    full = small(script, None).learning_rate
    expected = [full * (1 - i / 6) for i in range(6)] + [full * (1 - i / 12) for i in range(6, 12)]
    assert [line["learning_rate"] for line in metrics(tmp_path / "annealed")] == pytest.approx(expected)


def test_a_finished_run_says_so_and_stays_as_it_is(script, tmp_path, capsys):
    """Fails with the word only where summary.json is missing, and with a checkpoint rewritten each time."""
    script.train(small(script, tmp_path / "run"))
    before, said = everything(tmp_path / "run"), "is finished: --total-timesteps extends it"
    assert said not in capsys.readouterr().out
    script.train(resumed(script, tmp_path / "run"))
    after = everything(tmp_path / "run")
    assert said in capsys.readouterr().out
    assert after["checkpoint.pt"] == before["checkpoint.pt"]
    assert [after[name][0] for name in after] == [before[name][0] for name in after]


@pytest.mark.parametrize("total", [32, 5 * 32 + 31])
def test_fewer_timesteps_than_done_are_refused(script, whole, total):
    """Fails without the check: the run would call itself finished. What the sentence proposes works."""
    before = everything(whole)
    with pytest.raises(
        ValueError, match=r"^--total-timesteps \d+ is less than the run has done: "
    ) as refusal:
        script.train(resumed(script, whole, total_timesteps=total))
    assert everything(whole) == before
    proposed = int(re.search(r"give (\d+) or more$", str(refusal.value))[1])
    script.train(resumed(script, whole, total_timesteps=proposed))


def test_a_changed_flag_beside_resume_is_refused_by_name(script, whole):
    """Every flag that shapes training, --total-timesteps apart. Fails with the comparison left out."""
    before = everything(whole)
    for name, value in training_changes(script).items():
        if name != "total_timesteps":
            flag = "--" + name.rstrip("_").replace("_", "-")
            with pytest.raises(ValueError, match=f"^--resume takes {flag} from the saved run"):
                script.train(resumed(script, whole, **{name: value}))
    assert everything(whole) == before


def test_flags_that_shape_no_training_are_free_beside_resume(script, whole, tmp_path):
    """All of NOT_TRAINING but the folders. Fails with one of them saved among the args of the checkpoint, and
    with --gamma among them."""
    cut(script, small(script, tmp_path / "cut"), at=2)
    free = {"eval_episodes": 2, "eval_max_steps": 3, "checkpoint_every": 2, "rerun": True, "watch": True}
    of_one_script = {"cuda_graph", "log_every", "record", "episodes", "timeout"}
    assert {*free, *of_one_script, "out", "resume", "eval_only"} == set(NOT_TRAINING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rerun", None)  # no recording and no viewer are wanted here
        script.train(resumed(script, tmp_path / "cut", **free))
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(whole)
    assert len(read_json(tmp_path / "cut" / "summary.json")["eval_returns"]) == 2


def test_out_beside_resume_is_refused(script, whole, tmp_path):
    """Fails without the check: the run would go on in its own folder and leave --out unused."""
    with pytest.raises(ValueError, match=r"^--resume .*--out"):
        script.train(resumed(script, whole, out=str(tmp_path / "elsewhere")))
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("flag", ["resume", "eval_only"])
def test_another_scripts_checkpoint_is_refused(script, whole, tmp_path, flag):
    """Fails without the comparison: the weights may even fit."""
    content = load(whole)
    tmp_path.joinpath("other").mkdir()
    torch.save({**content, "script": "ppo_other"}, tmp_path / "other" / "checkpoint.pt")
    before = everything(tmp_path / "other")
    with pytest.raises(ValueError, match=r"is a run of ppo_other\.py"):
        go_on(script, content, flag, tmp_path / "other")
    assert everything(tmp_path / "other") == before


def go_on(script, content, flag, folder):
    args = saved_args(script.Args, content, rerun=False, **{flag: str(folder)})
    script.train(args) if flag == "resume" else script.evaluate_only(args)


@pytest.mark.parametrize("flag", ["resume", "eval_only"])
def test_a_missing_or_corrupt_checkpoint_is_refused(script, whole, tmp_path, flag):
    """In one sentence, naming the flag and the folder, and leaving the folder alone. Fails with torch.load's
    own errors, of which an empty file raises one without a message and others have many lines."""
    content, good = load(whole), checkpoint_bytes(whole)
    foreign, keyless = io.BytesIO(), io.BytesIO()
    torch.save({"script": script.__name__, "args": statistics.Fraction(1, 2)}, foreign)
    torch.save([1, 2], keyless)
    broken = {
        "empty": b"", "text": b"nothing of the kind\n", "foreign": foreign.getvalue(),
        "keyless": keyless.getvalue(), "half": good[: len(good) // 2], "all but the end": good[:-1],
    }  # fmt: skip
    (tmp_path / "no checkpoint").mkdir()
    for name, data in broken.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint.pt").write_bytes(data)
    for name in [*broken, "no checkpoint", "no folder"]:
        with pytest.raises(ValueError) as refusal:
            go_on(script, content, flag, tmp_path / name)
        sentence = str(refusal.value)
        assert sentence.startswith(f"--{flag.replace('_', '-')} {tmp_path / name}"), sentence
        assert "checkpoint.pt" in sentence and "\n" not in sentence and sentence.isascii(), sentence
        if name in broken:
            assert [path.name for path in (tmp_path / name).iterdir()] == ["checkpoint.pt"]
            assert (tmp_path / name / "checkpoint.pt").read_bytes() == broken[name]
    assert not (tmp_path / "no folder").exists() and not list((tmp_path / "no checkpoint").iterdir())


# The folder


@pytest.mark.parametrize("left", ["checkpoint.pt", "summary.json"])
def test_a_folder_with_a_run_in_it_is_refused(script, whole, tmp_path, left):
    """Naming --resume. Fails with only checkpoint.pt looked for, which a finished run may have lost."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / left).write_bytes((whole / left).read_bytes())
    before = everything(tmp_path / "out")
    with pytest.raises(ValueError, match=r"^--out .* holds a run already: .*--resume "):
        script.train(small(script, tmp_path / "out"))
    assert everything(tmp_path / "out") == before


def test_what_a_failed_start_left_is_no_run(script, whole, tmp_path):
    """Without a checkpoint --out starts anew there, and the refusal of --resume says so. Fails with any other
    file taken for a run, and with the lines of metrics that were there kept."""
    for name in ("metrics.jsonl", "recording.rrd", "checkpoint.tmp"):
        (tmp_path / name).write_bytes((whole / "metrics.jsonl").read_bytes())
    with pytest.raises(
        ValueError, match=rf"has no checkpoint\.pt: .*, or --out {tmp_path} to begin one there$"
    ):
        go_on(script, load(whole), "resume", tmp_path)
    script.train(small(script, tmp_path))
    assert checkpoint_bytes(tmp_path) == checkpoint_bytes(whole)
    assert [timeless(line) for line in metrics(tmp_path)] == [timeless(line) for line in metrics(whole)]


def test_out_takes_a_folder_with_other_things_in_it(script, whole, tmp_path):
    """And makes those above it. Fails with mkdir(exist_ok=False)."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "notes.txt").write_text("mine")
    for folder in ("a/b", "c/d/e"):
        script.train(small(script, tmp_path / folder))
        assert checkpoint_bytes(tmp_path / folder) == checkpoint_bytes(whole)
    assert (tmp_path / "a" / "b" / "notes.txt").read_text() == "mine"


def test_runs_of_the_same_second_get_different_folders(script, tmp_path, monkeypatch):
    """Under runs/, named after script, environment, seed and time, with no ':' or '/' of the environment's.
    Fails with mkdir(exist_ok=True), and with env_id as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20300102-030405")
    for _ in range(3):
        args = small(script, "", total_timesteps=32, eval_episodes=0)
        script.train(dataclasses.replace(args, out=None))
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(names) == 3
    for name in names:
        assert re.fullmatch(r"[\w.-]+", name) and name.startswith(script.__name__)
        assert "seed0" in name and "20300102-030405" in name
        if actions_of(script):
            assert "Walk-v0" in name
        assert (tmp_path / "runs" / name / "summary.json").exists()


def test_a_run_leaves_these_files_and_no_other(script, whole):
    """Fails with a temporary file copied instead of renamed."""
    assert sorted(path.name for path in whole.iterdir()) == ["checkpoint.pt", "metrics.jsonl", "summary.json"]


# The checkpoint


def test_a_checkpoint_holds_what_shapes_training_and_nothing_else(script, tmp_path):
    """Loads with weights_only=True and tells nothing of time or place. Fails with the folder's name or
    time.time() in it, and with NOT_TRAINING without checkpoint_every."""
    before = time.time()
    script.train(small(script, tmp_path / "somewhere", checkpoint_every=2))
    content = load(tmp_path / "somewhere")
    assert set(content) == {"script", "args", "iteration", "global_step", "state"}
    assert set(content["args"]) == set(fields(script)) - set(NOT_TRAINING)
    assert (content["iteration"], content["global_step"]) == (6, 192)

    def numbers_and_strings(value):
        if isinstance(value, torch.Tensor):
            yield from value.flatten().tolist()
        elif isinstance(value, (dict, list)):
            for pair in value.items() if isinstance(value, dict) else value:
                yield from numbers_and_strings(list(pair) if isinstance(pair, tuple) else pair)
        else:
            yield value

    for value in numbers_and_strings(content):
        assert value is None or isinstance(value, (str, int, float)), type(value)
        assert "somewhere" not in str(value)
        assert not isinstance(value, float) or not before - 1e5 < value < before + 1e5


def test_equal_content_gives_equal_bytes():
    """Whatever is one object or two. Fails with canonical() returning its argument, without intern, without
    the copy of a tensor, and with tuples kept."""

    def written(content):
        file = io.BytesIO()
        torch.save(canonical(content), file)
        return file.getvalue()

    one, two = torch.arange(4.0), torch.arange(4.0)
    shared, key, pair = {"lr": 0.5}, "".join(["a", "dam"]), (1, 2)
    first = [one, one, shared, shared, "adam", key, pair, pair, one[:2]]
    second = [one, two, {"lr": 0.5}, {"lr": 0.5}, "adam", "adam", [1, 2], (1, 2), torch.arange(2.0)]
    assert written(first) == written(second)
    loaded = torch.load(io.BytesIO(written(first)), weights_only=True)
    assert written(loaded) == written(first)
    assert written([one]) != written([one + 1])
    with pytest.raises(TypeError, match="no ndarray"):
        canonical({"a": np.zeros(3)})


# Disks that are full, folders that are gone


def full_disk(monkeypatch, name, at):
    """From here on the `at`-th writing of the file `name` finishes in "No space left on device"."""
    writings, replace = itertools.count(1), Path.replace

    def no_space(path, target):
        if target.name == name and next(writings) == at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", no_space)


@pytest.mark.parametrize(
    "name, at, stays",
    [("checkpoint.pt", 3, 2), ("checkpoint.pt", 2, 0), ("summary.json", 1, 6), ("summary.json", 2, 6)],
)
def test_what_cannot_be_written_is_one_sentence_and_a_line(
    script, whole, name, at, stays, tmp_path, monkeypatch, capsys
):
    """An OSError from train that says which file, why, and what stays, with a line that goes on from there to
    the same bytes. At the command line it is all of stderr, and the exit status is 1. Fails with the error
    passed on as it is, with the checkpoint written in place, and with a checkpoint said to be newer."""
    full_disk(monkeypatch, name, at)
    folder = tmp_path / "a run"
    with pytest.raises(OSError) as failure:
        script.train(small(script, folder, checkpoint_every=2))
    resume = f"resume   python {script.__name__}.py --resume '{folder}'"
    why = f"{folder / name} cannot be written (No space left on device)"
    assert str(failure.value) == f"{why}: the checkpoint of iteration {stays} stays\n{resume}"
    assert load(folder)["iteration"] == stays and not list(folder.glob("*.tmp"))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop, command_line():
        raise failure.value
    assert (stop.value.code, *capsys.readouterr()) == (1, "", f"{failure.value}\n")
    monkeypatch.undo()
    script.train(resumed(script, folder))
    assert checkpoint_bytes(folder) == checkpoint_bytes(whole)
    assert timeless(read_json(folder / "summary.json")) == timeless(read_json(whole / "summary.json"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the device that is always full is Linux's")
def test_metrics_that_cannot_be_written_end_the_run_too(script, whole, tmp_path, monkeypatch):
    """In a line that was never flushed, which closing the file tries again. Fails with the write alone looked
    after, and with a second error out of `close`."""
    log = Run.log

    def onto_a_full_disk(run, *lines):
        if lines[-1]["iteration"] == 3:
            run.metrics.close()
            run.metrics = open("/dev/full", "w")
        log(run, *lines)

    monkeypatch.setattr(Run, "log", onto_a_full_disk)
    with pytest.raises(OSError) as failure:
        script.train(small(script, tmp_path / "cut", checkpoint_every=1))
    stays = r"metrics\.jsonl cannot be written \(No space.*: the checkpoint of iteration 2 stays"
    assert re.search(stays, str(failure.value))
    assert failure.value.__cause__.__context__ is None
    monkeypatch.undo()
    script.train(resumed(script, tmp_path / "cut"))
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(whole)


def test_a_folder_that_is_deleted_says_that_nothing_stays(script, whole, tmp_path, monkeypatch):
    """And starting again there works. Fails with a checkpoint that is said to stay."""
    collect = script.collect_rollout

    def delete(*args):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return collect(*args)

    monkeypatch.setattr(script, "collect_rollout", delete)
    with pytest.raises(OSError) as failure:
        script.train(small(script, tmp_path / "run"))
    anew = f"no checkpoint is left, so --out {tmp_path / 'run'} begins anew"
    assert str(failure.value).endswith(f"checkpoint.pt cannot be written (No such file or directory): {anew}")
    monkeypatch.undo()
    script.train(small(script, tmp_path / "run"))
    assert checkpoint_bytes(tmp_path / "run") == checkpoint_bytes(whole)


def test_an_evaluation_that_cannot_be_written_is_said(script, whole, tmp_path, monkeypatch, capsys):
    """After it was printed. Fails with the error passed on as it is."""
    shutil.copytree(whole, tmp_path / "run")
    full_disk(monkeypatch, "eval.json", 1)
    with pytest.raises(
        OSError, match=r"eval\.json cannot be written \(No space.*: the run itself is as it was$"
    ):
        go_on(script, load(whole), "eval_only", tmp_path / "run")
    assert "evaluation" in capsys.readouterr().out
    assert {name: content for name, (content, _) in everything(tmp_path / "run").items()} == {
        name: content for name, (content, _) in everything(whole).items()
    }


FILE_SIZE_LIMIT = """
import resource, signal, sys, {name} as script, tests.run_envs
from common.cli import command_line
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
with command_line():
    script.train(eval(sys.argv[2], dict(Args=script.Args)))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a limit of Unix's")
def test_a_file_size_limit_is_met_in_one_sentence(tmp_path):
    """The operating system's own refusal in a process of its own, in the first checkpoint, which torch would
    call an unexpected position; --out then starts anew there. Fails with torch.save onto the file."""
    script = importlib.import_module("ppo_continuous")
    args = small(script, tmp_path / "run")
    words = [sys.executable, "-c", FILE_SIZE_LIMIT.format(name="ppo_continuous"), "3000", repr(args)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    anew = f"no checkpoint is left, so --out {tmp_path / 'run'} begins anew"
    assert done.stderr == f"{tmp_path}/run/checkpoint.pt cannot be written (File too large): {anew}\n"
    script.train(args)
    assert load(tmp_path / "run")["iteration"] == 6


# Environments that fail


def test_a_failing_environment_says_where_and_how_to_go_on(script, whole, tmp_path, monkeypatch):
    """In the last lines. Fails with the error passed on as it is, and with the last line of metrics taken for
    the checkpoint's."""

    def fail(error):
        raise error

    rollouts, collect = itertools.count(1), script.collect_rollout
    error = EnvironmentFailed("Walk-v0: no luck")
    monkeypatch.setattr(
        script, "collect_rollout", lambda *args: fail(error) if next(rollouts) == 4 else collect(*args)
    )
    with pytest.raises(EnvironmentFailed) as failure:
        script.train(small(script, tmp_path / "run", checkpoint_every=2))
    assert failure.value.__cause__ is error
    assert str(failure.value).splitlines() == [
        "iteration 4: Walk-v0: no luck",
        "the checkpoint of iteration 2 stays",
        f"resume   python {script.__name__}.py --resume {tmp_path / 'run'}",
    ]
    monkeypatch.undo()
    script.train(resumed(script, tmp_path / "run"))
    assert checkpoint_bytes(tmp_path / "run") == checkpoint_bytes(whole)


@pytest.mark.parametrize("error", [EnvironmentFailed("no luck"), Refusal("cannot be made")], ids=repr)
def test_a_failing_evaluation_loses_no_training(script, whole, error, tmp_path, monkeypatch, capsys):
    """The summary stands, its evaluation null, and the line that evaluates works; a run that was evaluated
    keeps what it had. Fails with the summary written only after the evaluation, and written over."""

    def fail(*args):
        raise error

    monkeypatch.setattr(script, "evaluate", fail)
    with pytest.raises(EnvironmentFailed) as failure:
        script.train(small(script, tmp_path / "run"))
    first, *_, last = str(failure.value).splitlines()
    evaluate = ["evaluate", "python", f"{script.__name__}.py", "--eval-only", str(tmp_path / "run")]
    assert (first, shlex.split(last)) == (str(error), evaluate)
    summary, complete = read_json(tmp_path / "run" / "summary.json"), read_json(whole / "summary.json")
    evaluation = {key for key in complete if key.startswith("eval_")}
    assert len(evaluation) == 4 and {key for key in summary if summary[key] is None} >= evaluation
    assert timeless({**complete, **dict.fromkeys(evaluation)}) == timeless(summary)
    monkeypatch.undo()
    go_on(script, load(tmp_path / "run"), "eval_only", tmp_path / "run")
    script.train(resumed(script, tmp_path / "run"))
    kept = read_json(tmp_path / "run" / "summary.json")
    assert timeless(kept) == timeless(complete)
    monkeypatch.setattr(script, "evaluate", fail)
    with pytest.raises(EnvironmentFailed):
        script.train(resumed(script, tmp_path / "run"))
    assert read_json(tmp_path / "run" / "summary.json") == kept


# Environments in a checkpoint


def episode(env, steps, rng):
    """Take `steps` random steps, resetting where an episode ends; everything that was seen."""
    seen = []
    for _ in range(steps):
        discrete = env.action_shape == ()
        action = rng.integers(env.action_dim) if discrete else rng.normal(0, 1, env.action_dim)
        action = action if discrete else np.clip(action, -1, 1).astype(np.float32)
        obs, reward, terminated, truncated, _ = env.step(action)
        seen += [obs.tobytes(), np.asarray(env.raw_obs).tobytes(), reward, terminated, truncated]
        seen += [env.episodic_return, env.episodic_length, env.episode]
        if terminated or truncated:
            seen.append(env.reset()[0].tobytes())
    return seen


@pytest.mark.parametrize("observes", ["vector", "matrix", "cell"])
@pytest.mark.parametrize("actions", ["box", "integers", "unbounded", "discrete"])
def test_an_environment_comes_back_by_replay(actions, observes, capsys):
    """With float64, integer and Discrete observations, and every kind of action, in the middle of an episode
    and right after a reset. Fails with actions kept before they are converted, with the index of a Discrete
    action that starts at -1, with observations compared as float32 (by a saved obs for raw_obs), and with the
    episode's number or its return not brought back."""
    kwargs = json.dumps({"actions": actions, "observes": observes, "steps": 9})
    rng = np.random.default_rng(0)
    for steps in (0, 4, 9, 25):
        env, later = (make_env("tests.run_envs:Walk-v0", kwargs, seed=3, index=2) for _ in range(2))
        env.reset()
        episode(env, steps, rng)
        later.reset()
        later.load_state_dict(torch_round_trip(env.state_dict()))
        assert (
            later.raw_obs.dtype == env.raw_obs.dtype if observes != "cell" else later.raw_obs == env.raw_obs
        )
        assert repr(later.state_dict()) == repr(env.state_dict())
        assert episode(later, 30, np.random.default_rng(1)) == episode(env, 30, np.random.default_rng(1))
    assert capsys.readouterr().out == ""


def torch_round_trip(state):
    file = io.BytesIO()
    torch.save(canonical(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("observes", ["vector", "matrix", "cell"])
def test_a_replay_that_arrives_elsewhere_is_said_and_starts_afresh(observes, capsys):
    """Fails with the observations not compared, with np.allclose, and with the old episode gone on with."""
    env, later = (make_env("tests.run_envs:Walk-v0", json.dumps({"observes": observes})) for _ in range(2))
    env.reset()
    episode(env, 3, np.random.default_rng(0))
    state = env.state_dict()
    state["raw_obs"] = state["raw_obs"] + (1e-9 if observes == "vector" else 1)
    later.load_state_dict(state)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and "Walk-v0" in lines[0] and lines[0].isascii()
    assert later.episode == env.episode + 1 and later.episodic_length == 0
    assert later.state_dict()["seed"] != state["seed"] and len(later.state_dict()["actions"]) == 0


def test_an_environment_that_remembers_resumes_with_one_line(script, tmp_path, capsys):
    """What an environment carries across resets no replay brings back; here the replay even runs into the end
    of an episode, after which a step is an error. Fails with actions sent on after that end."""
    settings = {**walk(script, remembers=True, steps=1000, edge=1e9), "num_envs": 1, "num_steps": 16}
    assert cut(script, small(script, tmp_path / "cut", **settings), at=3) == 130
    capsys.readouterr()
    script.train(resumed(script, tmp_path / "cut"))
    output = capsys.readouterr().out
    assert len(re.findall(r"^Walk-v0 .*fresh episode.*not the same bytes", output, re.MULTILINE)) == 1
    assert read_json(tmp_path / "cut" / "summary.json")["iterations"] == 12
    assert [line["iteration"] for line in metrics(tmp_path / "cut")] == list(range(1, 13))


@pytest.mark.extras
@pytest.mark.parametrize(
    "script, env_id",
    [*((name, "LunarLander-v3") for name in SCRIPTS), ("ppo_continuous", "Hopper-v5")],
    indirect=["script"],
)
def test_real_environments_come_back_by_replay(script, env_id, tmp_path, capsys):
    """Fails with the actions of a replay rounded to float16."""
    kind = actions_of(script)
    kwargs = json.dumps({"continuous": kind == "box"} if env_id == "LunarLander-v3" else {})
    settings = {"env_id": env_id, "env_kwargs": kwargs, "num_steps": 64, "total_timesteps": 6 * 128}
    script.train(small(script, tmp_path / "whole", **settings))
    args = small(script, tmp_path / "cut", **settings)
    for at in (2, 3):
        assert cut(script, args, at=at) == 130
        args = resumed(script, tmp_path / "cut")
    script.train(args)
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(tmp_path / "whole")
    assert "fresh episode" not in capsys.readouterr().out


# Metrics and summary


def test_metrics_and_summary_hold_what_they_should(script, whole):
    """Every key, null where there is nothing to say. Fails with any one left out, and with a rate of the last
    session instead of the run."""
    expected = BASE | ({"approx_kl", "clipfrac"} if "clip_coef" in fields(script) else set())
    for number, line in enumerate(map(json.loads, (whole / "metrics.jsonl").read_text().splitlines()), 1):
        assert expected <= set(line)
        assert (line["iteration"], line["global_step"]) == (number, 32 * number)
        assert all(value is None or math.isfinite(value) for value in line.values())
        nothing = {"episodic_return", "episodic_length"} if not line["episodes"] else set()
        allowed = nothing | {"value_at_time_limit"}
        assert nothing <= {name for name, value in line.items() if value is None} <= allowed
    summary = read_json(whole / "summary.json")
    assert set(summary) >= SUMMARY
    assert summary["script"] == script.__name__ and summary["seed"] == 0
    assert (summary["global_step"], summary["iterations"], summary["eval_episodes"]) == (192, 6, 1)
    assert summary["args"] == load(whole)["args"]
    assert summary["eval_return_mean"] == summary["eval_returns"][0] and summary["eval_return_std"] == 0
    assert summary["sps"] == pytest.approx(192 / summary["train_seconds"], rel=0.02)


def test_what_a_run_never_saw_is_null(script, tmp_path):
    """No episode ended, no time limit met, no evaluation; and a rollout of one step has no variance. Fails
    with NaN written as NaN, and with a mean of nothing that is 0."""
    script.train(small(script, tmp_path, **walk(script, steps=0, edge=1e9), eval_episodes=0))
    for line in map(timeless, metrics(tmp_path)):
        assert line["episodes"] == 0
        assert all(
            line[name] is None for name in ("episodic_return", "episodic_length", "value_at_time_limit")
        )
    summary = read_json(tmp_path / "summary.json")
    for name in ("train_return_mean", "value_at_time_limit", "eval_return_mean", "eval_return_std"):
        assert summary[name] is None, name
    assert summary["eval_returns"] == [] and summary["eval_episodes"] == 0
    one_row = {"num_envs": 1, "num_steps": 1, "num_minibatches": 1, "norm_adv": False, "total_timesteps": 2}
    script.train(small(script, tmp_path / "one row", **one_row))
    text = (tmp_path / "one row" / "metrics.jsonl").read_text()
    assert text.count('"explained_variance": null') == 2 and "NaN" not in text


@pytest.mark.parametrize(
    "change", [{}, {"break_": True}, {"break_reset": True}, {"norm_reward": True}], ids=str
)
def test_the_two_figures_a_final_score_hides(script, change, tmp_path, monkeypatch):
    """train_return_mean is the mean over all episodes, raw; value_at_time_limit that of V at the states where
    the clock ran out, also with the bugs on. Fails with a mean of the iterations' means, with rewards scaled
    before they are summed, and with the value at the time limit taken after --break-reset replaced it."""
    scores, values = [], []
    collect, agent_value = script.collect_rollout, script.Agent.value

    def collect_rollout(agent, *args):
        rollout, finished = collect(agent, *args)
        scores.extend(finished)
        with torch.no_grad():
            at_limit = agent_value(agent, rollout.next_obs)[rollout.truncated].tolist()
        values.append(statistics.fmean(at_limit) if at_limit else None)
        return rollout, finished

    monkeypatch.setattr(script, "collect_rollout", collect_rollout)
    script.train(small(script, tmp_path, **change))
    lines, summary = metrics(tmp_path), read_json(tmp_path / "summary.json")
    assert sum(line["episodes"] for line in lines) == len(scores) > 20
    assert summary["train_return_mean"] == pytest.approx(statistics.fmean(score for score, _ in scores))
    # At most 7 steps of at most 1 each; a step far from the centre pays less.
    assert all(length <= 7 and score <= length for score, length in scores)
    means = [line["value_at_time_limit"] for line in lines]
    assert means == [value if value is None else pytest.approx(value, rel=1e-4, abs=1e-5) for value in values]
    expected = statistics.fmean(value for value in values if value is not None)
    assert summary["value_at_time_limit"] == pytest.approx(expected, rel=1e-4, abs=1e-5)


# Evaluation


def test_eval_only_repeats_the_evaluation_and_touches_nothing_else(script, tmp_path, capsys):
    """With the checkpoint's settings and statistics. Fails with seeds from the clock, with its result written
    to summary.json, with parameters laid out in memory otherwise than in training, where the last bit of a
    product differs, and with `restores_process` taken off it."""
    settings = {"norm_obs": True, "shared_trunk": True, "hidden_dim": 12, "eval_episodes": 3}
    script.train(small(script, tmp_path, **settings))
    before, summary = everything(tmp_path), read_json(tmp_path / "summary.json")
    capsys.readouterr()
    handlers, threads = [signal.getsignal(s) for s in SIGNALS], torch.get_num_threads()
    args = saved_args(script.Args, load(tmp_path), eval_only=str(tmp_path), eval_episodes=3)
    for _ in range(2):
        script.evaluate_only(args)
        after = everything(tmp_path)
        after.pop("eval.json")
        assert after == before
        result = read_json(tmp_path / "eval.json")
        for name in ("eval_returns", "eval_return_mean", "eval_return_std", "eval_episodes"):
            assert result[name] == summary[name], name
        assert result["eval_return_std"] == pytest.approx(np.std(summary["eval_returns"]))
        assert result["global_step"] == 192
    assert [signal.getsignal(s) for s in SIGNALS] == handlers and torch.get_num_threads() == threads
    line = f"evaluation {summary['eval_return_mean']:.1f} +- {summary['eval_return_std']:.1f} over 3 episodes"
    assert capsys.readouterr().out.count(line) == 2
    longer = saved_args(script.Args, load(tmp_path), eval_only=str(tmp_path), eval_episodes=5)
    script.evaluate_only(longer)
    assert read_json(tmp_path / "eval.json")["eval_returns"][:3] == summary["eval_returns"]


def test_eval_only_refuses_what_it_cannot_do(script, whole):
    """Another training flag, no episodes, and --resume beside it. Fails without each check; with --resume
    beside it, the wrong folder's settings were compared."""
    before = everything(whole)
    for change, names in (
        ({"gamma": 0.5}, "--gamma"), ({"eval_episodes": 0}, "--eval-episodes"),
        ({"resume": str(whole)}, "--resume"),
    ):  # fmt: skip
        args = saved_args(script.Args, load(whole), **{"eval_only": str(whole), "eval_episodes": 1, **change})
        with pytest.raises(ValueError, match=names):
            script.evaluate_only(args)
    assert everything(whole) == before


def test_no_evaluation_is_none(script, tmp_path, capsys):
    """Fails with a mean of no returns, which warns and is NaN."""
    script.train(small(script, tmp_path, eval_episodes=0))
    assert "evaluation" not in capsys.readouterr().out
    assert read_json(tmp_path / "summary.json")["eval_returns"] == []


def test_an_evaluation_that_never_ends_is_stopped_and_said(script, tmp_path, capsys):
    """Fails with any other limit, or none."""
    endless = walk(script, steps=0, edge=1e9)
    calls, best = [], script.Agent.best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Agent, "best", lambda *args: calls.append(1) or best(*args))
        script.train(small(script, tmp_path, **endless, eval_episodes=2, eval_max_steps=30))
    assert len(calls) == 60
    output = capsys.readouterr().out
    assert "--eval-max-steps 30" in output and re.search(r"\b2\b.*stopped", output)
    assert len(read_json(tmp_path / "summary.json")["eval_returns"]) == 2
    short = saved_args(
        script.Args, load(tmp_path), eval_only=str(tmp_path), eval_episodes=1, eval_max_steps=7
    )
    script.evaluate_only(short)
    assert "--eval-max-steps 7" in capsys.readouterr().out


# The recording


@pytest.mark.parametrize("failing", ["__init__", "_log", "_film", "_send_layout"])
def test_a_failing_recording_costs_one_line(script, whole, failing, tmp_path, monkeypatch, capsys):
    """Fails with any of the recording's own `try` taken away, and with a warning a frame."""
    recording = pytest.importorskip("common.recording")
    pytest.importorskip("rerun")

    def fails(*args, **kwargs):
        raise RuntimeError("the recording is broken\nand says more than a line")

    monkeypatch.setattr(recording.Recording, failing, fails)
    script.train(small(script, tmp_path / "run", rerun=True))
    output = capsys.readouterr().out
    assert len(re.findall("recording[^.]*broken", output)) == 1
    assert "says more" not in output
    assert checkpoint_bytes(tmp_path / "run") == checkpoint_bytes(whole)
    assert (tmp_path / "run" / "summary.json").exists()
