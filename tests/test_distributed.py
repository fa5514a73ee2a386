"""variants/ppo_distributed.py and common/distributed.py: several processes train as one does, and they start,
fail, stop and go on together.

Each docstring ends with what was broken to see the test fail.
"""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

import ppo_continuous
import ppo_discrete
import variants.ppo_distributed as script
from tests.conftest import ROOT, load, metrics
from tests.run_envs import small
from tests.test_cli import words
from tests.test_run import checkpoint_bytes, cut, resumed, timeless


# A process that has imported everything forks the ranks of each run it is told of, as torchrun would start
# them, and writes each one's exit status, stdout and stderr.
RANKS = """
import json, os, sys, traceback, torch._dynamo, tests.run_envs, variants.ppo_distributed as script
from common.cli import command_line
from common.distributed import process_group
for line in sys.stdin:
    world, port, args, setup, folder = json.loads(line)
    pids = []
    for rank in range(world):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.fsync = lambda file: None
            for number in (1, 2):
                os.dup2(os.open(f"{folder}/{rank}.{number}", os.O_WRONLY | os.O_CREAT), number)
            status = 0
            try:
                exec(setup)
                with command_line(), process_group():
                    script.train(eval(args, {"Args": script.Args}))
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
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANKS],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(self, world, args, logs, setup=""):
        """Start `script.train(args)` in `world` processes, after `setup`, which may look at `rank`, in each.
        Their output goes to files in `logs`. Returns their pids."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        logs.mkdir()
        job = [world, port, repr(args), textwrap.dedent(setup), str(logs)]
        self.process.stdin.write(json.dumps(job) + "\n")
        self.logs, self.world = logs, world
        return json.loads(self.process.stdout.readline())

    def end(self):
        """[(exit status, stdout, stderr)] of the ranks of the run that was started last."""
        statuses = json.loads(self.process.stdout.readline())
        texts = [[(self.logs / f"{rank}.{n}").read_text() for n in (1, 2)] for rank in range(self.world)]
        return [(status, *text) for status, text in zip(statuses, texts, strict=True)]

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


def torchrun(processes, args, **environ):
    """(exit status, stdout, stderr) of torchrun's own."""
    process = launch(processes, args)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def launch(processes, args):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(processes), "-m", "variants.ppo_distributed", *words(args)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


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


def test_two_processes_are_one(tmp_path):
    """Eight environments in one process, four in each of two: after ten iterations the same weights to 1e-5.
    Fails with the gradient of each rank's own mean, with noise or seeds counted from 0 on each rank, with
    advantages normalised by a rank's own rows, and without the all-reduce."""
    size = {"total_timesteps": 10 * 1024, "eval_episodes": 0, "rerun": False}
    script.train(script.Args(out=str(tmp_path / "one"), **size))
    status, out, err = torchrun(2, script.Args(out=str(tmp_path / "two"), **size))
    assert status == 0, err
    assert "2 processes, 4 of the environments in each" in out and out.count("ppo_distributed  ") == 1
    torch.testing.assert_close(weights(tmp_path / "two"), weights(tmp_path / "one"), rtol=0, atol=1e-5)
    for one, other in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert one["episodes"] == other["episodes"] and one["episodic_return"] == other["episodic_return"]
    assert list(load(tmp_path / "one")["state"]) == list(load(tmp_path / "two")["state"])


def test_cut_and_resumed_is_uninterrupted(tmp_path):
    """As one process. Fails with a part left out of `state`."""
    script.train(small(script, tmp_path / "whole", norm_reward=True))
    assert cut(script, small(script, tmp_path / "cut", norm_reward=True), at=3) == 130
    script.train(resumed(script, tmp_path / "cut"))
    assert checkpoint_bytes(tmp_path / "cut") == checkpoint_bytes(tmp_path / "whole")
