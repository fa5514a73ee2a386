"""variants/ppo_distributed.py and common/distributed.py: several processes train as one does, and they start,
fail, stop and go on together.

Each docstring ends with what was broken to see the test fail.
"""

import os
import subprocess
import sys

import pytest
import torch

import ppo_continuous
import ppo_discrete
import variants.ppo_distributed as script
from tests.conftest import ROOT, load, metrics
from tests.run_envs import small
from tests.test_cli import words
from tests.test_run import checkpoint_bytes, cut, resumed, timeless


def launch(processes, args, **environ):
    """torchrun's own module, on this machine's loopback; the process, with its output as text."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(processes), "-m", "variants.ppo_distributed", *words(args)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def torchrun(processes, args, **environ):
    """(exit status, stdout, stderr) of a whole run."""
    process = launch(processes, args, **environ)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


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
