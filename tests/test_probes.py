"""Environments so small that the right value is known: each is trained in seconds and its value checked."""

import json

import pytest
import torch

from tests.conftest import tiny_args
from tests.envs_for_tests import has_discrete_actions

GAMMA = 0.9  # at 0.99 the time-limited probe learns too slowly for a test
LIMITED = {(1.0, 0.0): GAMMA / (1 - GAMMA), (0.0, 1.0): 1 / (1 - GAMMA)}


def train_on(script, out, probe, iterations, **changes):
    """An agent trained on Probe{probe}-v0, with the kind of actions that its script takes."""
    settings = {
        "env_id": f"Probe{probe}-v0",
        "env_kwargs": json.dumps({"discrete": has_discrete_actions(script)}),
        "total_timesteps": iterations * 8 * 16,
        "num_envs": 8,
        "num_steps": 16,
        "learning_rate": 1e-2,
        "gamma": GAMMA,
        "hidden_dim": 16,
        "eval_episodes": 0,
        "checkpoint_every": 1000,
        **changes,
    }
    return script.train(tiny_args(script, out, **settings))


def values(agent, observations):
    with torch.no_grad():
        return agent.value(torch.tensor(list(observations))).tolist()


def test_one_step_and_one_reward(script, tmp_path):
    """Fails with the value loss of the advantages for the returns."""
    agent = train_on(script, tmp_path, "OneStep", 15)
    assert values(agent, [(1.0,)]) == pytest.approx([1.0], rel=0.05)


def test_the_reward_is_the_observation(script, tmp_path):
    """Fails with the returns in another order than the observations."""
    agent = train_on(script, tmp_path, "ByObservation", 15)
    assert values(agent, [(-1.0,), (1.0,)]) == pytest.approx([-1.0, 1.0], rel=0.05)


def test_the_reward_comes_a_step_later(script, tmp_path):
    """Fails with `gamma * next_values` left out, and with `~terminated` left out."""
    agent = train_on(script, tmp_path, "TwoStep", 15)
    assert values(agent, [(0.0,), (1.0,)]) == pytest.approx([GAMMA, 1.0], rel=0.05)


def test_the_reward_follows_the_action(script, monkeypatch, tmp_path):
    """Fails with the sign of the policy loss turned round, and with the log-probability of a wrong action.
    The policy starts away from the best action: otherwise a shrinking spread alone would pass."""

    class OffCentre(script.Agent):
        def __init__(self, env, args):
            super().__init__(env, args)
            bias = [1.5, 0.0] if has_discrete_actions(script) else [0.8]
            self.actor[-1].bias.data.copy_(torch.tensor(bias))

    monkeypatch.setattr(script, "Agent", OffCentre)
    agent = train_on(script, tmp_path, "ByAction", 40)
    best = agent.best(torch.ones(1, 1)).item()
    assert best == 1 if has_discrete_actions(script) else abs(best) < 0.1
    assert values(agent, [(1.0,)]) == pytest.approx([1.0], rel=0.05)


def test_an_episode_that_only_its_time_limit_ends(script, tmp_path):
    """Fails with `~terminated` replaced by `~(terminated | truncated)`, and with the last step of the rollout
    not bootstrapped."""
    agent = train_on(script, tmp_path, "TimeLimited", 20)
    assert values(agent, LIMITED) == pytest.approx(list(LIMITED.values()), rel=0.05)


@pytest.mark.parametrize("bug", ["break_", "break_reset"])
def test_the_famous_bugs_show_in_the_value_at_the_time_limit(script, tmp_path, bug):
    """Fails with the flag without effect. --break reads 2.5 for 10, --break-reset 8.1: the reset state, which
    pays nothing, is taken for the last one."""
    agent = train_on(script, tmp_path, "TimeLimited", 20, **{bug: True})
    for value, right in zip(values(agent, LIMITED), LIMITED.values(), strict=True):
        assert value < 0.95 * right
