"""The loss and the policy's densities, against torch.distributions, autograd and numerical integrals."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.distributions import AffineTransform, Independent, Normal, TanhTransform, TransformedDistribution

import ppo_continuous
from common.envs import make_env
from tests.conftest import of_ppo

SWITCHES = ("norm_adv", "clip_ratio", "clip_vloss")
COMBINATIONS = [dict(zip(SWITCHES, on, strict=True)) for on in itertools.product([False, True], repeat=3)]
CLIP = 0.2


def written_out(log_prob, entropy, value, old_log_prob, old_value, advantages, returns, args):
    """The loss of arXiv:1707.06347, one row after the other."""
    n = len(advantages)
    if args.norm_adv:
        mean = sum(advantages) / n
        std = math.sqrt(sum((a - mean) ** 2 for a in advantages) / (n - 1))
        advantages = [(a - mean) / (std + 1e-8) for a in advantages]
    objective, error = 0.0, 0.0
    for i in range(n):
        ratio = torch.exp(log_prob[i] - old_log_prob[i])
        surrogate = ratio * advantages[i]
        if args.clip_ratio:
            surrogate = min(surrogate, torch.clamp(ratio, 1 - CLIP, 1 + CLIP) * advantages[i])
        squared = (value[i] - returns[i]) ** 2
        if args.clip_vloss:
            near = old_value[i] + torch.clamp(value[i] - old_value[i], -CLIP, CLIP)
            squared = max(squared, (near - returns[i]) ** 2)
        objective, error = objective + surrogate / n, error + squared / n
    return -objective + args.vf_coef * error / 2 - args.ent_coef * entropy.mean()


@of_ppo
@pytest.mark.parametrize("flags", COMBINATIONS, ids=str)
def test_loss_and_gradient_are_the_formula(script, flags):
    """Fails with: the population std for the sample's; `min` for `max` in the value loss, and the other way
    round in the surrogate; no half in the value loss; the entropy added for subtracted; no vf_coef."""
    args = script.Args(**flags, clip_coef=CLIP, vf_coef=0.7, ent_coef=0.03)
    torch.manual_seed(0)
    old_log_prob, old_value, advantages, returns = torch.randn(4, 24, dtype=torch.float64)
    moved = (old_log_prob + 0.3 * torch.randn(24), torch.rand(24), old_value + 0.4 * torch.randn(24))
    results = []
    for function in (script.ppo_loss, written_out):
        inputs = [x.double().clone().requires_grad_() for x in moved]
        loss = function(*inputs, old_log_prob, old_value, advantages, returns, args)
        loss = loss[0] if function is script.ppo_loss else loss
        results.append([loss, *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("flags", COMBINATIONS, ids=str)
def test_gradient_reaches_the_weights_as_torch_distributions_would_send_it(flags, squash):
    """Fails with: `mean.detach()` or `log_std.detach()` in the log-probability; the tanh correction added for
    subtracted."""
    script = ppo_continuous
    env = make_env("tests.envs_for_tests:ProbeSpaces-v0", '{"action": "uneven"}')
    args = script.Args(
        **flags, squash=squash, clip_coef=CLIP, vf_coef=0.7, ent_coef=0.03, hidden_dim=8, log_std_init=-0.5
    )
    torch.manual_seed(1)
    agent = script.Agent(env, args).double()
    old_log_prob, old_value, advantages, returns = torch.randn(4, 16, dtype=torch.float64)
    obs, action = torch.randn(16, 3, dtype=torch.float64), torch.randn(16, 2, dtype=torch.float64)

    def reference():
        policy = Independent(Normal(agent.actor(obs), agent.log_std.exp()), 1)
        log_prob = policy.log_prob(action)
        if squash:  # a change of variables: divide the density by |d action / d u|
            half_range = torch.tensor([2.5, 0.25])
            log_prob = log_prob - (half_range * (1 - torch.tanh(action) ** 2)).log().sum(-1)
        return log_prob, policy.entropy()

    old_log_prob = reference()[0].detach() + 0.3 * old_log_prob
    results = []
    for distribution in (lambda: agent.log_prob_entropy(obs, action), reference):
        log_prob, entropy = distribution()
        value = agent.critic(obs)[:, 0]
        function = written_out if distribution is reference else script.ppo_loss
        loss = function(log_prob, entropy, value, old_log_prob, old_value, advantages, returns, args)
        loss = loss if distribution is reference else loss[0]
        results.append([loss, *torch.autograd.grad(loss, list(agent.parameters()))])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


@of_ppo
@pytest.mark.parametrize("clip_ratio", [True, False])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0])
def test_the_clip_binds_only_where_moving_further_would_gain(script, ratio, advantage, clip_ratio):
    """Fails with the clipped ratio alone for the minimum of both: it would bind on the losing side too."""
    args = script.Args(clip_ratio=clip_ratio, clip_coef=CLIP, norm_adv=False)
    log_prob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.float64)
    loss, _ = script.ppo_loss(log_prob, zero, zero, zero, zero, zero + advantage, zero, args)
    loss.backward()
    binds = clip_ratio and (ratio > 1 + CLIP if advantage > 0 else ratio < 1 - CLIP)
    assert log_prob.grad.item() == pytest.approx(0.0 if binds else -ratio * advantage)


@of_ppo
def test_diagnostics_are_what_their_names_say(script):
    """Fails with: approx_kl as -log ratio, or of the opposite sign in its log ratio; clipfrac counted on one
    side only."""
    args = script.Args(clip_coef=CLIP, norm_adv=False)
    ratio = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0, 3.0], dtype=torch.float64)
    zero = torch.zeros(8, dtype=torch.float64)
    old_log_prob, entropy, value = zero - 1.5, zero + 0.25, zero + 2
    log_prob = (ratio.log() + old_log_prob).requires_grad_()
    loss, diagnostics = script.ppo_loss(log_prob, entropy, value, old_log_prob, zero, zero, zero + 1, args)
    expected_kl = sum((r - 1) - math.log(r) for r in ratio.tolist()) / 8
    assert diagnostics["approx_kl"].item() == pytest.approx(expected_kl, rel=1e-12)
    assert diagnostics["clipfrac"].item() == pytest.approx(5 / 8)
    assert diagnostics["entropy"].item() == pytest.approx(0.25)
    assert diagnostics["loss"].item() == loss.item()
    assert not diagnostics["approx_kl"].requires_grad and not diagnostics["clipfrac"].requires_grad


def test_approx_kl_estimates_the_kl_divergence():
    """Fails with (ratio - 1) - log ratio of the inverse ratio. Exact in the mean, for samples of the old
    policy."""
    torch.manual_seed(0)
    old, new = Normal(0.0, 1.0), Normal(torch.tensor(0.1, dtype=torch.float64), 0.9)
    action = old.sample((200_000,)).double()
    zero = torch.zeros_like(action)
    args = ppo_continuous.Args(norm_adv=False)
    log_probs = new.log_prob(action), old.log_prob(action).double()
    _, diagnostics = ppo_continuous.ppo_loss(log_probs[0], zero, zero, log_probs[1], zero, zero, zero, args)
    exact = torch.distributions.kl_divergence(old, new)
    assert diagnostics["approx_kl"].item() == pytest.approx(exact.item(), rel=0.02)


def test_gaussian_log_prob_and_entropy_are_those_of_torch():
    """Fails with log_std left out of the log-probability, and with 2 pi for 2 pi e in the entropy."""
    torch.manual_seed(0)
    mean, action = torch.randn(2, 5, 7, 3, dtype=torch.float64)
    log_std = torch.tensor([-2.0, 0.0, 1.5], dtype=torch.float64)
    policy = Independent(Normal(mean, log_std.exp()), 1)
    log_prob = ppo_continuous.gaussian_log_prob(mean, log_std, action)
    torch.testing.assert_close(log_prob, policy.log_prob(action), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ppo_continuous.gaussian_entropy(log_std), policy.entropy()[0, 0])


def squashed_density(low, high, mean, log_std, edges):
    """(density at the middle of each cell, probability of each cell) of the squashed policy's action, for
    cells between `edges`, which lie within low and high. The probability is the Gaussian's own, by its
    CDF."""
    middle, half_range = (low + high) / 2, torch.tensor([(high - low) / 2], dtype=torch.float64)

    def pre_tanh(action):
        return torch.atanh((action - middle) / half_range)

    u = pre_tanh((edges[1:] + edges[:-1]) / 2)[:, None]
    log_prob = ppo_continuous.gaussian_log_prob(mean, log_std, u) - ppo_continuous.tanh_log_det(u, half_range)
    cdf = Normal(mean, log_std.exp()).cdf(pre_tanh(edges))
    return log_prob.exp(), cdf.diff()


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (-2.0, 3.0), (0.0, 0.1)])
def test_squashed_density_integrates_to_one_over_the_action_range(low, high):
    """Fails with the half-range left out, and with half of the logarithm of the slope."""
    mean, log_std = (torch.tensor([x], dtype=torch.float64) for x in (0.4, -0.7))
    edges = torch.linspace(low, high, 20_001, dtype=torch.float64)
    density, probability = squashed_density(low, high, mean, log_std, edges)
    width = (high - low) / 20_000
    assert (density * width).sum().item() == pytest.approx(1.0, abs=1e-6)
    inner = slice(200, -200)
    torch.testing.assert_close(density[inner], probability[inner] / width, rtol=1e-4, atol=1e-6 / width)


@pytest.mark.parametrize("u", [12.0, -12.0, 50.0, -50.0])
def test_squashed_log_prob_is_finite_far_out(u):
    """Fails with log(1 - tanh(u)^2), which is the logarithm of 0 from |u| = 9 on in float32."""
    pre_tanh = torch.tensor([u], requires_grad=True)
    log_det = ppo_continuous.tanh_log_det(pre_tanh, torch.tensor([2.0]))
    log_det.backward()
    # 1 - tanh(u)^2 = 4 e^(-2|u|) / (1 + e^(-2|u|))^2, and the last factor is 1 here.
    assert log_det.item() == pytest.approx(math.log(2.0) + math.log(4.0) - 2 * abs(u), rel=1e-6)
    assert pre_tanh.grad.item() == pytest.approx(-2.0 * math.copysign(1.0, u), rel=1e-6)


def test_squash_maps_onto_the_bounds_and_its_log_prob_is_of_that_action():
    """Fails with the action left in (-1, 1), and with the half-range left out of the log-probability."""
    env = make_env("tests.envs_for_tests:ProbeSpaces-v0", '{"action": "uneven"}')
    torch.manual_seed(0)
    agent = ppo_continuous.Agent(env, ppo_continuous.Args(squash=True)).double()
    low, high = torch.as_tensor(np.stack([env.action_space.low, env.action_space.high])).double()
    u, obs = torch.randn(50, 2, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64)
    action = torch.as_tensor(agent.env_action(u))
    torch.testing.assert_close(action, low + (high - low) * (torch.tanh(u) + 1) / 2)
    log_prob, entropy = agent.log_prob_entropy(obs, u)
    base = Independent(Normal(agent.actor(obs), agent.log_std.exp()), 1)
    onto_bounds = AffineTransform((low + high) / 2, (high - low) / 2, event_dim=1)
    squashed = TransformedDistribution(base, [TanhTransform(), onto_bounds])
    torch.testing.assert_close(log_prob, squashed.log_prob(action))
    torch.testing.assert_close(entropy, base.entropy()[0])  # the bonus stays the Gaussian's
