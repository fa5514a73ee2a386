"""Generalized advantage estimation: against values from exact arithmetic, and rule by rule."""

import json

import pytest
import torch

from tests.conftest import ROOT

CASES = json.loads((ROOT / "tests" / "data" / "gae.json").read_text())
GAMMA, LAMBDA = 0.9, 0.8


def steps(terminated=(), truncated=(), length=6, seed=0):
    """Random rewards, values and next_values of one environment, and flags set at the steps listed."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(3, length, 1, generator=generator, dtype=torch.float64)
    flags = torch.zeros(2, length, 1, dtype=torch.bool)
    flags[0, list(terminated)] = True
    flags[1, list(truncated)] = True
    return rewards, values, next_values, *flags


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_agrees_with_exact_arithmetic(script, case, dtype, tolerance):
    """Fails with `~terminated` replaced by `~(terminated | truncated)`, and the other way round in
    `carry`."""
    numbers = (torch.tensor(case[name], dtype=dtype) for name in ("rewards", "values", "next_values"))
    flags = (torch.tensor(case[name]) for name in ("terminated", "truncated"))
    advantages, returns = script.compute_gae(*numbers, *flags, case["gamma"], case["gae_lambda"])
    for name, result in (("advantages", advantages), ("returns", returns)):
        expected = torch.tensor(case[name], dtype=torch.float64)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_cases_have_falls_time_limits_and_both_at_once():
    def any_step(fits):
        return any(
            fits(*flags)
            for case in CASES
            for rows in zip(case["terminated"], case["truncated"], strict=True)
            for flags in zip(*rows, strict=True)
        )

    assert any_step(lambda terminated, truncated: terminated and not truncated)
    assert any_step(lambda terminated, truncated: truncated and not terminated)
    assert any_step(lambda terminated, truncated: terminated and truncated)


def test_a_fall_is_not_bootstrapped(script):
    """Fails with `~terminated` left out."""
    rewards, values, *rest = steps(terminated=[2])
    advantages, returns = script.compute_gae(rewards, values, *rest, GAMMA, LAMBDA)
    torch.testing.assert_close(advantages[2], rewards[2] - values[2])
    torch.testing.assert_close(returns[2], rewards[2])


def test_a_time_limit_is_bootstrapped(script):
    """Fails with `~terminated` replaced by `~(terminated | truncated)`."""
    rewards, values, next_values, *flags = steps(truncated=[2])
    _, returns = script.compute_gae(rewards, values, next_values, *flags, GAMMA, LAMBDA)
    torch.testing.assert_close(returns[2], rewards[2] + GAMMA * next_values[2])


def test_both_flags_terminated_wins(script):
    """Fails with `~terminated` replaced by `(truncated | ~terminated)`."""
    both = script.compute_gae(*steps(terminated=[2], truncated=[2]), GAMMA, LAMBDA)
    fall = script.compute_gae(*steps(terminated=[2]), GAMMA, LAMBDA)
    torch.testing.assert_close(both, fall, rtol=0, atol=0)


@pytest.mark.parametrize("kinds", [["terminated"], ["truncated"], ["terminated", "truncated"]], ids=str)
def test_nothing_crosses_an_episode_end(script, kinds):
    """Fails with `carry` masked by `~terminated` alone, and by `~truncated` alone."""
    before = steps(**{kind: [2] for kind in kinds})
    after = [x.clone() for x in before]
    for x in after[:3]:
        x[3:] += 100.0
    for one, other in zip(*(script.compute_gae(*x, GAMMA, LAMBDA) for x in (before, after)), strict=True):
        torch.testing.assert_close(one[:3], other[:3], rtol=0, atol=0)
        assert (one[3:] - other[3:]).abs().min() > 1.0


def test_the_last_step_bootstraps_from_next_values(script):
    """Fails with `next_values[-1]` taken for 0."""
    rewards, values, next_values, *flags = steps()
    advantages, _ = script.compute_gae(rewards, values, next_values, *flags, GAMMA, LAMBDA)
    torch.testing.assert_close(advantages[-1], rewards[-1] + GAMMA * next_values[-1] - values[-1])


def test_lambda_1_is_the_discounted_return_minus_the_value(script):
    """Fails with `carry` of gae_lambda alone, without gamma."""
    rewards, values, next_values, *flags = steps()
    next_values[:-1] = values[1:]  # as in an episode that goes on: then only the last one is left in the sum
    advantages, returns = script.compute_gae(rewards, values, next_values, *flags, GAMMA, 1.0)
    discounted = next_values[-1]
    for t in reversed(range(len(rewards))):
        discounted = rewards[t] + GAMMA * discounted
        torch.testing.assert_close(returns[t], discounted)
        torch.testing.assert_close(advantages[t], discounted - values[t])


def test_lambda_0_is_the_td_error(script):
    """Fails with `carry` of gamma alone, without gae_lambda."""
    rewards, values, next_values, *flags = steps()
    advantages, _ = script.compute_gae(rewards, values, next_values, *flags, GAMMA, 0.0)
    torch.testing.assert_close(advantages, rewards + GAMMA * next_values - values)


def test_arguments_are_left_alone(script):
    """Fails with `rewards += ...`: the same tensors still go into the metrics."""
    given = steps(terminated=[1], truncated=[4])
    copies = [x.clone() for x in given]
    script.compute_gae(*given, GAMMA, LAMBDA)
    assert all(torch.equal(x, copy) for x, copy in zip(given, copies, strict=True))
