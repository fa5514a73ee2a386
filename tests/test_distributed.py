"""variants/ppo_distributed.py and common/distributed.py: several processes train as one does, and they start,
fail, stop and go on together.

Each docstring ends with what was broken to see the test fail.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ppo_continuous
import ppo_discrete
import variants.ppo_distributed as script
from common.cli import Refusal
from common.distributed import process_group
from tests.conftest import ROOT, load, metrics
from tests.run_envs import small, walk
from tests.test_cli import main, words
from tests.test_run import checkpoint_bytes, cut, resumed, timeless

# A process that has imported everything forks the ranks of each run it is told of, as torchrun would start
# them. Each leaves its weights, stdout and stderr in files.
RANKS = """
import json, os, sys, time, traceback, torch, torch._dynamo, tests.run_envs
import variants.ppo_distributed as script
from common.cli import command_line
from common.distributed import process_group
for line in sys.stdin:
    world, port, args, setup, logs = json.loads(line)
    pids = []
    for rank in range(world):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(port)}
            os.fsync = lambda file: None
            for number in (1, 2):
                os.dup2(os.open(f"{logs}/{rank}.{number}", os.O_WRONLY | os.O_CREAT), number)
            status = 0
            try:
                exec(setup)
                with command_line(), process_group():
                    agent = script.train(eval(args, {"Args": script.Args}))
                torch.save(agent.state_dict(), f"{logs}/{rank}.pt")
            except SystemExit as stop:
                status = stop.code
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            os._exit(status)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)
"""


class Ranks:
    """Runs of several processes, started in a fraction of a second."""

    def __init__(self):
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.process = subprocess.Popen([sys.executable, "-c", RANKS], cwd=ROOT, env=environ, **pipes)

    def start(self, world, args, logs, setup=""):
        """Start `script.train(args)` in `world` processes, after `setup`, which may look at `rank`, in each.
        Returns their pids."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        logs.mkdir()
        self.world, self.logs = world, logs
        job = [world, port, repr(args), textwrap.dedent(setup), str(logs)]
        self.process.stdin.write(json.dumps(job) + "\n")
        return json.loads(self.process.stdout.readline())

    def end(self):
        """(exit statuses, stdouts, stderrs) of the ranks that were started last."""
        statuses = json.loads(self.process.stdout.readline())
        return statuses, *([(self.logs / f"{r}.{n}").read_text() for r in range(self.world)] for n in (1, 2))

    def run(self, world, args, logs, setup=""):
        self.start(world, args, logs, setup)
        return self.end()


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks()
    yield ranks
    ranks.process.stdin.close()
    ranks.process.wait(10)
    ranks.process.stdout.close()


def torchrun(processes, args):
    """torchrun itself on this machine's loopback: a process, with its output as text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(processes), "-m", "variants.ppo_distributed", *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)


def weights(folder):
    return torch.cat([value.flatten().double() for value in load(folder)["state"]["agent"].values()])


@pytest.mark.parametrize("single", [ppo_continuous, ppo_discrete], ids=lambda module: module.__name__)
@pytest.mark.parametrize(
    "settings", [{}, {"norm_obs": True, "norm_reward": True, "clip_vloss": True}], ids=str
)
def test_one_process_is_the_single_script(tmp_path, single, settings):
    """To the same bytes of weights and streams, and the same metrics. Fails with advantages normalised by the
    whole rollout, with the share of a minibatch left out, and with any draw from a stream more or less."""
    env = {"env_id": small(single, None).env_id, "env_kwargs": small(single, None).env_kwargs}
    single.train(small(single, tmp_path / "single", **settings))
    script.train(small(script, tmp_path / "one", **{**settings, **env}))
    states = [load(tmp_path / name)["state"] for name in ("single", "one")]
    assert repr(states[0]) == repr(states[1])
    assert torch.equal(weights(tmp_path / "single"), weights(tmp_path / "one"))
    lines = [[timeless(line) for line in metrics(tmp_path / name)] for name in ("single", "one")]
    for one, other in zip(*lines, strict=True):
        assert {**one, "log_std": 0} == pytest.approx({**other, "log_std": 0}, rel=1e-6)


DISCRETE = {"env_id": "CartPole-v1", "learning_rate": 1e-3}


@pytest.mark.parametrize(
    "settings",
    [{}, {**DISCRETE, "norm_obs": True, "norm_reward": True, "ent_coef": 0.01, "shared_trunk": True}],
    ids=str,
)
def test_two_processes_are_one(ranks, tmp_path, settings):
    """Eight environments in one process, four in each of two: after ten iterations the same weights to 1e-5,
    the same episodes, a checkpoint of the same parts; and both ranks have the very same weights. Fails with
    the gradient of each rank's own mean, without the all-reduce, with noise or seeds counted from 0 on each
    rank, with an order of rows of its own on each, and with advantages, observations or rewards normalised by
    a rank's own rows."""
    size = {"num_steps": 64, "total_timesteps": 10 * 512, "eval_episodes": 0, "rerun": False, **settings}
    script.train(script.Args(out=str(tmp_path / "one"), **size))
    args = script.Args(out=str(tmp_path / "two"), **size)
    statuses, (out, other_out), errors = ranks.run(2, args, tmp_path / "logs")
    assert (statuses, errors, other_out) == ([0, 0], ["", ""], "")
    assert "2 processes, 4 of the environments in each" in out
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=0, atol=1e-5)
    for one, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        for name, value in timeless(one).items():
            close = None if value is None else pytest.approx(value, rel=1e-3, abs=1e-4)
            assert other[name] == close, name
        assert all(one[name] == other[name] for name in ("episodes", "episodic_return", "episodic_length"))
    assert list(load(tmp_path / "one")["state"]) == list(load(tmp_path / "two")["state"])
    ranks_own = [torch.load(tmp_path / f"logs/{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(ranks_own[0][name], ranks_own[1][name]) for name in ranks_own[0])


def test_a_minibatch_may_have_no_rows_of_a_rank(ranks, tmp_path):
    """Of minibatches of two rows, half are of one rank alone; --target-kl stops the epochs by all rows. Fails
    with the mean of no rows in the gradient or in the metrics, and with each rank stopping by its own KL,
    after which they wait for each other in vain."""
    size = {"num_steps": 8, "num_minibatches": 8, "total_timesteps": 10 * 16, "eval_episodes": 0}
    size |= {"update_epochs": 4, "target_kl": 3e-4, "learning_rate": 1e-3, "timeout": 5}
    script.train(small(script, tmp_path / "one", **size))
    statuses, _, errors = ranks.run(2, small(script, tmp_path / "two", **size), tmp_path / "logs")
    assert (statuses, errors) == ([0, 0], ["", ""])
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=0, atol=1e-5)
    kl = [line["approx_kl"] for line in metrics(tmp_path / "two")]
    assert kl == pytest.approx([line["approx_kl"] for line in metrics(tmp_path / "one")], rel=1e-2, abs=1e-6)
    assert min(kl) < 3e-4 < max(kl)


# Going on


def test_two_processes_resume_to_the_same_bytes(ranks, tmp_path):
    """And write them every time. A signal that reaches rank 1 alone stops both after the same iteration.
    Fails with the signals not agreed on, with a rank's environments left out of the checkpoint, and with any
    part restored on rank 0 alone."""
    settings = {"num_envs": 4, "norm_obs": True, "norm_reward": True, "checkpoint_every": 100}
    statuses, _, errors = ranks.run(2, small(script, tmp_path / "whole", **settings), tmp_path / "a")
    assert (statuses, errors) == ([0, 0], ["", ""])
    at_2 = """
        collect, calls = script.collect_rollout, []
        def interrupted(*args):
            calls.append(1)
            if rank == 1 and len(calls) == 2:
                os.kill(os.getpid(), 2)
            return collect(*args)
        script.collect_rollout = interrupted
    """
    statuses, outs, errors = ranks.run(2, small(script, tmp_path / "cut", **settings), tmp_path / "b", at_2)
    assert (statuses, errors, outs[1]) == ([130, 130], ["", ""], "")
    resume = re.search("^resume +(.*)$", outs[0], re.M)[1]
    start = ["torchrun", "--nproc-per-node", "2", "-m", "variants.ppo_distributed"]
    assert shlex.split(resume) == [*start, "--resume", str(tmp_path / "cut")]
    assert load(tmp_path / "cut")["iteration"] == 2 == len(metrics(tmp_path / "cut"))
    statuses, _, errors = ranks.run(2, resumed(script, tmp_path / "cut"), tmp_path / "c")
    assert (statuses, errors) == ([0, 0], ["", ""])
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(tmp_path / "whole")


def test_another_number_of_processes_may_go_on(ranks, tmp_path):
    """From four to one to two. Fails with a rank's state under its own numbers, and with a share that is
    taken from the number of processes that wrote the checkpoint."""
    settings = {"num_envs": 4, "norm_reward": True, "anneal_lr": False, "learning_rate": 1e-3}
    script.train(small(script, tmp_path / "whole", **settings, total_timesteps=12 * 64))
    run = tmp_path / "run"
    ranks.run(4, small(script, run, **settings, total_timesteps=4 * 64), tmp_path / "four")
    script.train(resumed(script, run, total_timesteps=8 * 64))
    statuses, (out, _), _ = ranks.run(2, resumed(script, run, total_timesteps=12 * 64), tmp_path / "two")
    assert statuses == [0, 0] and "2 processes, 2 of the environments in each" in out
    assert "fresh episode" not in out
    torch.testing.assert_close(weights(run), weights(tmp_path / "whole"), rtol=0, atol=1e-5)


def test_cut_and_resumed_is_uninterrupted(tmp_path):
    """As one process. Fails with a part left out of `state`."""
    script.train(small(script, tmp_path / "whole", norm_reward=True))
    assert cut(script, small(script, tmp_path / "cut", norm_reward=True), at=3) == 130
    script.train(resumed(script, tmp_path / "cut"))
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(tmp_path / "whole")


# Failing

IN_THE_THIRD = """
collect, calls = script.collect_rollout, []
def collect_rollout(agent, envs, noise):
    calls.append(1)
    if rank == 1 and len(calls) == 3:
        {what}
    return collect(agent, envs, noise)
script.collect_rollout = collect_rollout
"""


FAILURES = {  # what rank 1 does: both exit statuses, rank 0's sentence, and what rank 1's traceback ends with
    "envs[1].env.step = None": ([1, 1], r"rank 1: environment 3 \(Walk-v0\) raised in step, .*", "TypeError"),
    "raise OSError('no luck')": ([1, 1], "rank 1: OSError: no luck", "OSError: no luck"),
    "envs[0].obs[0] = float('nan')": ([1, 1], "rank 1: iteration 3: the observation is not finite.*", None),
    "os.kill(os.getpid(), 9)": ([1, -9], "rank 0: another rank is gone, or did not answer .*", None),
    "time.sleep(2.5)": ([1, 1], "rank 0: another rank is gone, or did not .* within --timeout 1; .*", None),
}


@pytest.mark.parametrize("what", FAILURES)
def test_one_rank_fails_and_all_end(ranks, tmp_path, what):
    """Soon, with one sentence of rank 0 that names the rank, what stays and how to go on; the traceback is of
    the rank where it happened, and of no other. The checkpoint goes on. Fails without `together`: rank 0 then
    says that someone is gone, and not who; and with torch.distributed's own timeout of half an hour."""
    statuses, sentence, trace = FAILURES[what]
    size = {"num_envs": 4, "total_timesteps": 6 * 64, "timeout": 1 if "sleep" in what else 20}
    args = small(script, tmp_path / "run", checkpoint_every=2, **size)
    began, setup = time.time(), IN_THE_THIRD.format(what=what)
    ended, outs, (error, other) = ranks.run(2, args, tmp_path / "logs", setup)
    assert (ended, outs[1]) == (statuses, "") and time.time() - began < 10
    first, *rest = error.splitlines()
    assert re.fullmatch(("" if "nan" in what else "iteration 3: ") + sentence, first), error
    resume = f"resume   torchrun --nproc-per-node 2 -m variants.ppo_distributed --resume {tmp_path / 'run'}"
    assert rest == ([] if "nan" in what else ["the checkpoint of iteration 2 stays", resume])
    assert (trace in other) if trace else "Traceback" not in other
    assert load(tmp_path / "run")["iteration"] == 2
    script.train(resumed(script, tmp_path / "run"))
    assert load(tmp_path / "run")["iteration"] == 6


def test_a_full_disk_ends_all(ranks, tmp_path):
    """The others in silence. Fails with the checkpoint written outside of `together`."""
    full = """
        import common.run_folder
        def write_checkpoint(path, content):
            if content["iteration"]:
                raise OSError(28, "No space left on device")
            write(path, content)
        write, common.run_folder.write_checkpoint = common.run_folder.write_checkpoint, write_checkpoint
    """
    statuses, _, errors = ranks.run(2, small(script, tmp_path / "run"), tmp_path / "logs", full)
    assert statuses == [1, 1] and errors[1] == ""
    assert errors[0].startswith(
        f"{tmp_path}/run/checkpoint.pt cannot be written (No space left on device): the"
    )


def test_the_others_leave_before_the_evaluation(ranks, tmp_path):
    """It takes longer than they would wait. Fails with an evaluation that they wait for."""
    slow = """
        evaluate = script.evaluate
        script.evaluate = lambda *args: time.sleep(2) or evaluate(*args)
    """
    args = small(script, tmp_path / "run", timeout=1, eval_episodes=1)
    statuses, outs, errors = ranks.run(2, args, tmp_path / "logs", slow)
    assert (statuses, errors) == ([0, 0], ["", ""]) and "evaluation" in outs[0]
    ended = [(tmp_path / f"logs/{rank}.pt").stat().st_mtime for rank in (0, 1)]
    assert ended[1] < ended[0] - 1


# Refusals


def test_environments_that_do_not_divide_are_refused(ranks, tmp_path):
    """In one sentence, once, and what it proposes works. Fails with the check left out, and with a sentence
    from each rank."""
    args = small(script, tmp_path / "run", num_envs=3)
    statuses, outs, errors = ranks.run(2, args, tmp_path / "logs")
    assert (statuses, outs, errors[1]) == ([2, 2], ["", ""], "")
    assert errors[0] == "--num-envs 3 does not divide among 2 processes: give --num-envs 4, or start 1\n"
    assert not (tmp_path / "run").exists()
    script.train(args)
    assert ranks.run(2, small(script, tmp_path / "four", num_envs=4), tmp_path / "4")[0] == [0, 0]


def test_a_refusal_of_one_rank_is_said_by_rank_0(ranks, tmp_path):
    """Where an environment is not installed on one machine. Fails with `make_env` outside of `together`."""
    setup = """
        from common.cli import Refusal
        def refuse(*args):
            raise Refusal("--env-id x needs a package")
        if rank == 1:
            script.make_env = refuse
    """
    statuses, _, errors = ranks.run(2, small(script, tmp_path / "run"), tmp_path / "logs", setup)
    assert (statuses, errors) == ([2, 2], ["rank 1: --env-id x needs a package\n", ""])


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"num_minibatches": 5}, "--num-minibatches 5 does not divide 32 rows: 1 does"),
        (
            {"num_minibatches": 32},
            "--norm-adv needs 2 rows in a minibatch: give --num-steps 32 or --no-norm-adv",
        ),
        ({"total_timesteps": 31}, "--total-timesteps 31 is less than one rollout: give 32 or more"),
        ({"timeout": 0}, "--timeout 0 cannot be: it takes above 0"),
        (
            {"env_kwargs": '{"actions": "multidiscrete"}'},
            ".*MultiDiscrete actions, ppo_distributed.py takes Disc",
        ),
        ({"device": "meta"}, "--device meta "),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, changes, sentence):
    """Fails with the check left out."""
    with pytest.raises(Refusal, match=sentence):
        script.train(small(script, tmp_path / "run", **{**walk(script), **changes}))
    assert not (tmp_path / "run").exists()


def test_a_group_of_the_callers_is_left_alone(tmp_path):
    """Fails with a second one, which torch refuses, and with the caller's destroyed."""
    with process_group():
        script.train(small(script, tmp_path))
        assert dist.is_initialized()
    assert not dist.is_initialized()


def test_the_command_line_of_one_process(tmp_path, monkeypatch, capsys):
    """Fails with the arguments pickled where there is nobody to send them to."""
    assert main(script, *words(small(script, tmp_path / "run"))) == 0
    assert "processes" not in capsys.readouterr().out
    assert main(script, "--eval-only", str(tmp_path / "run"), "--eval-episodes", "1") == 0
    assert main(script, "--num-envs", "0") == 2
    assert capsys.readouterr().err == "--num-envs 0 cannot be: it takes 1 or more\n"


# torchrun itself


@pytest.mark.slow
def test_torchrun(ranks, tmp_path):
    """Starts, trains, evaluates and writes the bytes that the ranks of the other tests write; refuses once.
    Fails with each rank reading the command line for itself."""
    out, err = torchrun(2, words(small(script, tmp_path / "run"))).communicate(timeout=120)
    assert "Traceback" not in err and "FAILED" not in err, err
    assert out.count("ppo_distributed  ") == out.count("evaluation ") == 1
    ranks.run(2, small(script, tmp_path / "again"), tmp_path / "logs")
    assert checkpoint_bytes(tmp_path / "run") == checkpoint_bytes(tmp_path / "again")
    process = torchrun(2, ["--num-envs", "0"])
    out, err = process.communicate(timeout=120)
    assert process.returncode != 0 and out == ""
    assert err.count("--num-envs 0 cannot be: it takes 1 or more\n") == 1


def begun(folder):
    """Wait until the run has done some iterations."""
    for _ in range(600):
        if (folder / "metrics.jsonl").exists() and len(metrics(folder)) > 5:
            return
        time.sleep(0.1)
    raise AssertionError("no iteration in a minute")


LONG = {"total_timesteps": 10**4 * 64, "num_envs": 4, "checkpoint_every": 1000, "eval_episodes": 0}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_to_torchrun_stops_all(tmp_path, number):
    """Within 30 s, saved. Fails with handlers on rank 0 alone, which the others' end cuts off."""
    args = small(script, tmp_path / "run", **LONG)
    process = torchrun(2, words(args))
    begun(tmp_path / "run")
    process.send_signal(number)
    began = time.time()
    out, err = process.communicate(timeout=60)
    assert process.returncode != 0 and time.time() - began < 30
    assert "saved " in out and "resume   torchrun --nproc-per-node 2" in out, err
    assert "another rank is gone" not in err and "terminate called" not in err
    assert load(tmp_path / "run")["iteration"] == len(metrics(tmp_path / "run")) > 0


@pytest.mark.slow
def test_torchrun_names_the_rank_that_was_killed(tmp_path):
    """Within 30 s; the checkpoint stays. Fails with torch.distributed's own timeout and a rank that hangs."""
    args = small(script, tmp_path / "run", **{**LONG, "checkpoint_every": 5})
    process = torchrun(2, words(args))
    begun(tmp_path / "run")
    workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [pid for pid in workers if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(int(ranks[0]), signal.SIGKILL)
    began = time.time()
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0 and time.time() - began < 30
    root_cause = err[err.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", root_cause) and "SIGKILL" in root_cause
    assert load(tmp_path / "run")["iteration"] % 5 == 0


THREADS = """
import sys, tests.run_envs, variants.ppo_distributed as script
from pathlib import Path
script.train(eval(sys.argv[1], {"Args": script.Args}))
print(sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="where the threads are is Linux's")
def test_no_thread_of_the_group_outlives_it(tmp_path):
    """Such a one, at Python's end, can abort the process, after which torchrun ends the others. Fails without
    torch.distributed.nn imported before a group is made."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS, repr(small(script, tmp_path))],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "python" in done.stderr and "gloo" not in done.stderr
