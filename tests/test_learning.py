"""Whole training runs: what the README promises of the defaults. Minutes, and so marked slow."""

import json

import pytest

import a2c
import ppo_continuous
import ppo_discrete
import ppo_gpu_batched
from variants import ppo_imitation, ppo_memory, ppo_pixels, ppo_robot

pytestmark = pytest.mark.slow
PENDULUM = {
    "num_envs": 64, "num_steps": 64, "num_minibatches": 16, "update_epochs": 10, "total_timesteps": 819200,
    "learning_rate": 1e-3, "gamma": 0.98, "gae_lambda": 0.95, "norm_reward": True,
}  # fmt: skip


def evaluation(script, out, **flags):
    script.train(script.Args(out=str(out), rerun=False, **flags))
    return json.loads((out / "summary.json").read_text())["eval_return_mean"]


@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("script", [ppo_continuous, ppo_discrete])
def test_the_default_run_solves(script, tmp_path, seed):
    """500.0 over 20 episodes. Fails with the advantages' sign lost."""
    assert evaluation(script, tmp_path, seed=seed) == 500.0


def test_a2c_solves(tmp_path):
    """Fails with the advantages' sign lost."""
    assert evaluation(a2c, tmp_path) >= 475.0


@pytest.mark.parametrize(
    ("script", "least"),
    [(ppo_memory, 450.0), (ppo_pixels, 0.99), (ppo_imitation, -300.0), (ppo_robot, -200.0)],
)
def test_a_variant_learns_by_default(script, least, tmp_path):
    """Fails with the advantages' sign lost."""
    assert evaluation(script, tmp_path) >= least


@pytest.mark.parametrize(
    ("env_id", "flags", "least"),
    [
        ("CartPole-v1", {}, 500.0),
        ("CartPoleContinuous-v0", {}, 500.0),
        ("Pendulum-v1", PENDULUM, -200.0),
    ],
)
def test_the_batched_script_learns(tmp_path, env_id, flags, least):
    """Fails with the advantages' sign lost, and for Pendulum-v1 with --break's line always on."""
    assert evaluation(ppo_gpu_batched, tmp_path, env_id=env_id, **flags) >= least
