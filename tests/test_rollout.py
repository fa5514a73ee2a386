"""What is recorded, what the update is given, and what a training step does, seen from inside a run."""

import copy
import itertools
import json
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

import ppo_continuous
import ppo_discrete
from common.cli import NonFinite, Refusal
from common.envs import FlatEnv, RewardScaling, RunningNorm, make_env
from common.seeding import RandomStream, episode_seed
from tests.conftest import load, metrics, of_ppo, tiny_args
from tests.envs_for_tests import SPACES, Spaces, has_discrete_actions


def watch(monkeypatch, script, name, before=lambda *arguments: None):
    """Record every call of script.<name>: a list, growing as the script runs, of (arguments, result,
    what `before(*arguments)` returned just before the call)."""
    calls, function = [], getattr(script, name)

    def wrapper(*arguments):
        noted = before(*arguments)
        result = function(*arguments)
        calls.append((arguments, result, noted))
        return result

    monkeypatch.setattr(script, name, wrapper)
    return calls


def args_for(script, out, probe=None, env_kwargs=None, **changes):
    """`tiny_args`, without an evaluation, and on a probe with the kind of actions the script takes."""
    if probe:
        kwargs = {"discrete": has_discrete_actions(script), **(env_kwargs or {})}
        changes = {"env_id": f"Probe{probe}-v0", "env_kwargs": json.dumps(kwargs), **changes}
    elif env_kwargs:
        changes["env_kwargs"] = env_kwargs
    return tiny_args(script, out, **{"eval_episodes": 0, **changes})


def find(kind, arguments):
    """The argument of this type, wherever a script's signature has it."""
    return next(x for x in arguments if isinstance(x, kind))


def loss_name(script):
    return "ppo_loss" if hasattr(script, "ppo_loss") else "a2c_loss"


def tensors(arguments):
    """All tensors among the arguments, in order, those in tuples too."""
    flat = itertools.chain.from_iterable(x if isinstance(x, tuple) else [x] for x in arguments)
    return [x for x in flat if isinstance(x, torch.Tensor)]


# What a rollout holds

ENDS = (("fall", 3), ("limit", 4), ("both", 2))  # how the episodes of ProbeScripted-v0 end, over and over


def scripted_rows(seed, index, count):
    """The first `count` steps of environment `index`: (obs, next_obs, reward, terminated, truncated)."""
    rows, episode = [], 0
    while len(rows) < count:
        kind, length = ENDS[episode % len(ENDS)]
        mark = gym.utils.seeding.np_random(episode_seed(seed, "env", index, episode))[0].random()
        for step in range(1, length + 1):
            over = step == length
            obs, next_obs = ([episode / 8, s, mark] for s in (step - 1, step))
            ended = (over and kind in ("fall", "both"), over and kind in ("limit", "both"))
            rows.append((obs, next_obs, episode + step / 8, *ended))
        episode += 1
    return rows[:count]


def test_every_cell_of_the_rollouts_and_no_transition_across_a_reset(script, monkeypatch, tmp_path):
    """Fails with: next_obs taken after the reset; a reset at terminated alone; the reset left to the next
    step, as Gymnasium's vector environments do; the rollout's first obs from a fresh reset; two environments
    of one seed."""
    calls = watch(monkeypatch, script, "collect_rollout")
    script.train(args_for(script, tmp_path, "Scripted", {"ends": ENDS}, seed=3))
    rollouts = [rollout for _, (rollout, _), _ in calls]
    assert len(rollouts) == 6
    for i in range(2):
        expected = scripted_rows(3, i, 6 * 32)
        for position, name in enumerate(("obs", "next_obs", "reward", "terminated", "truncated")):
            recorded = torch.cat([getattr(rollout, name)[:32, i] for rollout in rollouts])
            column = torch.tensor([row[position] for row in expected])
            assert torch.equal(recorded, column), name
            assert recorded.dtype == (torch.bool if name in ("terminated", "truncated") else torch.float32)
    for earlier, later in itertools.pairwise(rollouts):
        assert torch.equal(earlier.obs[32], later.obs[0])
    for rollout in rollouts:
        going_on = ~(rollout.terminated | rollout.truncated)
        assert torch.equal(rollout.obs[1:][going_on], rollout.next_obs[going_on])
        assert not torch.equal(rollout.obs[1:][~going_on], rollout.next_obs[~going_on])


def test_reported_episodes_are_the_scripted_ones(script, tmp_path):
    """Fails with the return not cleared by the reset, and with the episodes of one environment alone."""
    script.train(args_for(script, tmp_path, "Scripted", {"ends": ENDS}))
    expected = []
    for _ in range(2):
        rows = scripted_rows(0, 0, 6 * 32)
        returns, score, length = [], 0.0, 0
        for t, (_, _, reward, terminated, truncated) in enumerate(rows):
            score, length = score + reward, length + 1
            if terminated or truncated:
                returns.append((t // 32, score, length))
                score, length = 0.0, 0
        expected += returns
    for line in metrics(tmp_path):
        ended = [(score, length) for at, score, length in expected if at == line["iteration"] - 1]
        assert line["episodes"] == len(ended)
        assert line["episodic_return"] == pytest.approx(np.mean([score for score, _ in ended]))
        assert line["episodic_length"] == pytest.approx(np.mean([length for _, length in ended]))


def sampled_and_received(env_action, squash=False):
    """(what the rollout keeps as action, what the environment was given, its space) of 64 random steps."""
    env = make_env("ProbeSpaces-v0", json.dumps({"action": env_action}))
    torch.manual_seed(0)
    agent = ppo_continuous.Agent(env, ppo_continuous.Args(squash=squash))
    env.reset()
    noise = 3 * torch.randn(64, 1, env.action_dim)
    rollout, _ = ppo_continuous.collect_rollout(agent, [env], noise)
    expected = agent.actor(rollout.obs[:64]).detach() + agent.log_std.exp().detach() * noise
    torch.testing.assert_close(rollout.action, expected)
    return rollout.action[:, 0].numpy(), env.unwrapped.received, env.action_space


@pytest.mark.parametrize("space", ["vector", "uneven", "float64", "matrix"])
def test_the_environment_gets_the_clipped_action_and_the_rollout_keeps_the_sampled_one(space):
    """Fails with env_action unclipped, and with the clipped action stored."""
    sampled, received, bounds = sampled_and_received(space)
    for action, sample in zip(received, sampled, strict=True):
        assert action.dtype == bounds.dtype and action.shape == bounds.shape and bounds.contains(action)
        assert np.array_equal(action, np.clip(sample.reshape(bounds.shape), bounds.low, bounds.high))
    assert (sampled.reshape(-1, *bounds.shape) > bounds.high).any()


def test_unbounded_actions_pass_as_sampled():
    """Fails with actions clipped to -1 and 1 whatever the space."""
    sampled, received, _ = sampled_and_received("unbounded")
    assert np.array_equal(np.stack(received), sampled) and abs(sampled).max() > 3


def test_integer_actions_are_rounded_and_cast():
    """Fails with astype alone, which cuts towards 0."""
    sampled, received, bounds = sampled_and_received("integer")
    assert np.array_equal(np.stack(received), np.rint(np.clip(sampled, -5, 5)).astype(np.int32))
    assert all(bounds.contains(action) for action in received)


@pytest.mark.parametrize("space", ["vector", "uneven"])
def test_with_squash_the_pre_tanh_sample_is_kept_and_the_action_is_within_bounds(space):
    """Fails with tanh(action) stored in the rollout, and with tanh not stretched onto the bounds."""
    sampled, received, bounds = sampled_and_received(space, squash=True)
    expected = bounds.low + (bounds.high - bounds.low) * (np.tanh(sampled) + 1) / 2
    np.testing.assert_allclose(np.stack(received), expected, atol=1e-6)
    assert all(bounds.contains(action) for action in received)
    assert abs(sampled).max() > 3


@pytest.mark.parametrize("name", ["vector", "float64", "matrix", "integer", "bytes", "unbounded"])
def test_box_observations_are_flattened_and_cast(name):
    """Fails with reshape left out, and with astype left out."""
    env = FlatEnv(Spaces(observation=name))
    for begin in (env.reset, lambda: env.step(np.zeros(3))):
        obs = begin()[0]
        assert obs.dtype == np.float32 and obs.shape == (env.obs_dim,)
        assert np.array_equal(obs, env.unwrapped.last.astype(np.float32).reshape(-1))
        assert obs is env.obs


@pytest.mark.parametrize("name", ["discrete", "discrete from 5"])
def test_discrete_observations_are_one_hot(name):
    """Fails with the space's start not subtracted."""
    env = FlatEnv(Spaces(observation=name))
    seen = []
    for _ in range(20):
        obs, _ = env.reset()
        which = env.unwrapped.last - SPACES[name].start
        assert obs.dtype == np.float32 and np.array_equal(obs, np.eye(3)[which])
        seen.append(int(which))
    assert set(seen) == {0, 1, 2}


@pytest.mark.parametrize("name", ["discrete", "discrete from 5"])
def test_discrete_actions_are_counted_from_the_start_of_the_space(name):
    """Fails with the space's start not added."""
    env = FlatEnv(Spaces(action=name))
    env.reset()
    for action in range(3):
        env.step(np.int64(action))
    assert env.unwrapped.received == [SPACES[name].start + action for action in range(3)]
    assert (env.action_dim, env.action_shape, env.action_dtype) == (3, (), torch.int64)


COMPOSITE = {
    "multibinary": lambda last: last.reshape(-1),
    "multidiscrete": lambda last: np.concatenate([np.eye(2)[last[0]], np.eye(3)[last[1]]]),
    "tuple": lambda last: np.concatenate([np.eye(2)[last[0]], np.eye(3)[last[1]]]),
    "dict": lambda last: np.concatenate([np.eye(2)[last["a"]], last["b"]]),
}


@pytest.mark.parametrize(("name", "expected"), COMPOSITE.items(), ids=COMPOSITE)
def test_composite_observations_are_flattened(name, expected):
    """Fails with any of the kinds refused, and with the parts of a Dict in another order than its keys'."""
    env = FlatEnv(Spaces(observation=name))
    for begin in (env.reset, lambda: env.step(np.zeros(3))):
        obs = begin()[0]
        assert obs.dtype == np.float32 and obs.shape == (env.obs_dim,)
        np.testing.assert_array_equal(obs, expected(env.unwrapped.last).astype(np.float32))


REFUSED = {
    "image": r"images \(uint8\[8, 8, 3\]\), and",
    "text": "Text, and",
    "dict with image": r"images \(uint8\[4, 4\]\) in \['camera'\]\['left'\], and",
}


@pytest.mark.parametrize(("name", "said"), REFUSED.items(), ids=REFUSED)
def test_other_observations_are_refused_by_name(script, tmp_path, name, said):
    """Fails with each kind let through to NumPy, and with only the outermost space looked at."""
    kwargs = json.dumps({"observation": name})
    args = tiny_args(script, tmp_path / "run", env_id="ProbeSpaces-v0", env_kwargs=kwargs)
    with pytest.raises(Refusal, match=rf"--env-id ProbeSpaces-v0 observes {said}"):
        script.train(args)
    assert not (tmp_path / "run").exists()


MULTI = {  # space: the indices that a policy sends, and what the environment gets
    "multidiscrete": ([1, 2], np.array([1, 2])),
    "multidiscrete from": ([1, 2, 0, 3], np.array([[0, 4], [5, 4]])),
    "multibinary": ([0, 1, 1, 0, 1, 0], np.array([[0, 1, 1], [0, 1, 0]], np.int8)),
}


@pytest.mark.parametrize("name", MULTI)
def test_several_choices_reach_the_environment_in_its_shape(name):
    """Fails with the start left out, with the flat indices passed on, and with another dtype."""
    env = FlatEnv(Spaces(action=name))
    env.reset()
    sent, received = MULTI[name]
    env.step(np.array(sent))
    got = env.unwrapped.received[0]
    assert np.array_equal(got, received) and got.dtype == env.action_space.dtype
    assert env.action_space.contains(got)
    options = getattr(env.action_space, "nvec", np.full(env.action_space.shape, 2))
    assert env.choices == options.reshape(-1).tolist() and env.action_dim == options.sum()


@pytest.mark.parametrize("name", MULTI)
def test_several_choices_are_independent_categoricals(name, tmp_path):
    """The log-probability and the entropy are sums. Fails with the options of all choices under one softmax,
    with the first choice alone, and with draws that do not follow the probabilities."""
    env = make_env("ProbeSpaces-v0", json.dumps({"action": name}))
    env.reset()
    agent = ppo_discrete.Agent(env, ppo_discrete.Args())
    with torch.no_grad():
        agent.actor[-1].bias.copy_(torch.linspace(-1, 1, env.action_dim))
        stream, obs = RandomStream(0, "action"), torch.as_tensor(env.obs).expand(20_000, -1)
        noise = -torch.log(-torch.log(stream.uniform(20_000, env.action_dim)))
        actions = agent.sample(obs, noise)
        log_prob, entropy = agent.log_prob_entropy(obs, actions)
        parts = [Categorical(logits=x) for x in agent.actor(obs).split(env.choices, -1)]
    assert actions.shape == (20_000, len(env.choices)) and actions.dtype == torch.int64
    expected = [part.log_prob(a) for part, a in zip(parts, actions.unbind(-1), strict=True)]
    torch.testing.assert_close(log_prob, torch.stack(expected).sum(0))
    torch.testing.assert_close(entropy, torch.stack([part.entropy() for part in parts]).sum(0))
    for part, a in zip(parts, actions.unbind(-1), strict=True):
        assert (a.bincount(minlength=part.probs.shape[-1]) / 20_000 - part.probs[0]).abs().max() < 0.02
    best = torch.stack([part.probs[0].argmax() for part in parts])
    assert torch.equal(agent.best(obs)[0], best)


@pytest.mark.parametrize("name", MULTI)
def test_training_on_several_choices(name, monkeypatch, tmp_path):
    """Fails with old and new log-probabilities of other choices: the first ratios would not be 1."""
    probe = {"env_id": "ProbeSpaces-v0", "env_kwargs": json.dumps({"action": name})}
    check_first_steps(monkeypatch, ppo_discrete, tmp_path, **probe)


# Actions that are forbidden


def masked_agent(**changes):
    env = make_env("ProbeMasked-v0", json.dumps(changes), mask=True)
    env.reset()
    return env, ppo_discrete.Agent(env, ppo_discrete.Args(mask_actions=True))


def test_a_forbidden_action_has_no_probability(tmp_path):
    """Not in sampling, not in the log-probability, not in the entropy, whose gradient is finite. Fails with
    logits of -inf (0 times infinity is no number), and with the mask left out of any of the three."""
    env, agent = masked_agent()
    allowed = torch.tensor([True, False, True, False])
    assert env.obs.tolist()[-4:] == allowed.tolist() and env.obs_dim == 5
    obs = torch.as_tensor(env.obs).expand(500, -1)
    noise = -torch.log(-torch.log(RandomStream(0, "action").uniform(500, 4)))
    with torch.no_grad():
        agent.actor[-1].bias.copy_(torch.tensor([0.0, 50.0, 1.0, 50.0]))  # the forbidden ones attract
        actions = agent.sample(obs, noise)
    assert set(actions.tolist()) == {0, 2} and set(agent.best(obs).tolist()) == {2}
    log_prob, entropy = agent.log_prob_entropy(obs, actions)
    expected = Categorical(logits=torch.tensor([0.0, 1.0]))  # but for the small first weights
    torch.testing.assert_close(log_prob.exp().detach(), expected.probs[actions // 2], atol=0.02, rtol=0)
    torch.testing.assert_close(entropy.detach(), expected.entropy().expand(500), atol=0.02, rtol=0)
    (log_prob.sum() + entropy.sum()).backward()
    grads = [p.grad for p in agent.actor.parameters()]
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert (grads[-1][~allowed] == 0).all() and (grads[-1][allowed] != 0).all()


def test_training_with_masks_never_does_what_is_forbidden(monkeypatch, tmp_path):
    """The environment raises at a forbidden action; in the update the masks are those of the rollout, or the
    first ratios would not be 1. Fails with the mask of the reset kept for the whole episode, and with
    evaluation unmasked."""
    probe = {"env_id": "ProbeMasked-v0", "mask_actions": True}
    check_first_steps(monkeypatch, ppo_discrete, tmp_path, **probe)
    args = args_for(ppo_discrete, tmp_path / "again", eval_episodes=3, **probe)
    agent = ppo_discrete.train(args)
    ppo_discrete.evaluate_only(ppo_discrete.Args(eval_only=str(tmp_path / "again"), **{
        name: value for name, value in vars(args).items() if name not in ("out", "eval_only")
    }))  # fmt: skip
    assert len(ppo_discrete.evaluate(agent, args)[0]) == 3


def test_a_mask_that_allows_nothing_is_refused(monkeypatch):
    """Fails with the first action taken for want of another."""
    env = make_env("ProbeMasked-v0", mask=True)
    monkeypatch.setattr(type(env.unwrapped), "allowed", lambda self: np.zeros(4, np.int8))
    with pytest.raises(Refusal, match="--mask-actions: ProbeMasked-v0 forbids every action"):
        env.reset()


def test_masks_of_several_choices_follow_one_another():
    """As Gymnasium's own sample() takes them, a tuple of arrays. Fails with these in another order."""
    env = FlatEnv(Spaces(action="multidiscrete"), mask=True)
    reset, masks = env.unwrapped.reset, (np.array([1, 0], np.int8), np.array([0, 1, 1], np.int8))
    env.unwrapped.reset = lambda **kwargs: (reset(**kwargs)[0], {"action_mask": masks})
    assert env.reset()[0][-5:].tolist() == [1, 0, 0, 1, 1]


def test_an_environment_without_masks_is_refused(tmp_path):
    """At the first reset. Fails with every action allowed in silence."""
    args = tiny_args(ppo_discrete, tmp_path / "run", mask_actions=True)
    with pytest.raises(Refusal, match="--mask-actions: CartPole-v1 gives no action_mask"):
        ppo_discrete.train(args)
    assert not (tmp_path / "run").exists()


# What the update is given


def check_first_steps(monkeypatch, script, out, **flags):
    """Train, and look at the first minibatch of every iteration: there new and old policy are the same."""
    calls = watch(monkeypatch, script, "ppo_loss")
    args = args_for(script, out, total_timesteps=8 * 128, num_steps=64, learning_rate=1e-2, **flags)
    script.train(args)
    steps = args.num_minibatches * args.update_epochs
    assert len(calls) == 8 * steps
    for (log_prob, _, _, old_log_prob, *_), (_, diagnostics), _ in calls[::steps]:
        assert ((log_prob - old_log_prob).exp() - 1).abs().max() < 1e-6
        assert abs(diagnostics["approx_kl"].item()) < 1e-6 and diagnostics["clipfrac"].item() == 0
    assert max(call[1][1]["approx_kl"].item() for call in calls) > 1e-5  # and does move afterwards


@of_ppo
@pytest.mark.parametrize("norm_obs", [False, True])
def test_before_the_first_gradient_step_the_policy_is_the_old_one(script, monkeypatch, tmp_path, norm_obs):
    """Fails with the observation statistics updated between the rollout and the update, and with an old
    log-probability that is 1e-5 off."""
    check_first_steps(monkeypatch, script, tmp_path, norm_obs=norm_obs)


@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize("squash", [False, True])
def test_and_so_it_is_where_actions_are_clipped_or_squashed(monkeypatch, tmp_path, squash, norm_obs):
    """Fails with the old log-probability of the clipped action."""
    probe = {"env_id": "ProbeSpaces-v0", "env_kwargs": '{"action": "uneven"}'}
    check_first_steps(monkeypatch, ppo_continuous, tmp_path, squash=squash, norm_obs=norm_obs, **probe)


def test_old_log_probability_is_of_the_sampled_action(monkeypatch, tmp_path):
    """Fails with the action clipped before its log-probability is taken, here and in `update` alike."""
    script = ppo_continuous
    calls = watch(monkeypatch, script, "update", before=lambda agent, *_: copy.deepcopy(agent))
    rollouts = watch(monkeypatch, script, "collect_rollout")
    script.train(args_for(script, tmp_path))
    for ((_, _, _, batch, *_), _, agent), (_, (rollout, _), _) in zip(calls, rollouts, strict=True):
        assert torch.equal(batch.action, rollout.action.flatten(0, 1)) and batch.action.abs().max() > 1.5
        with torch.no_grad():
            policy = Independent(Normal(agent.actor(batch.obs), agent.log_std.exp()), 1)
        torch.testing.assert_close(batch.log_prob, policy.log_prob(batch.action), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bug", [None, "break_", "break_reset"])
def test_what_gae_is_given(script, monkeypatch, tmp_path, bug):
    """Fails with: next_values of the next episode's first observation; `values[1:]` shifted, so that the
    rollout's last step bootstraps from itself; --break without truncated; --break-reset without effect."""
    rollouts = watch(monkeypatch, script, "collect_rollout", before=lambda agent, *_: copy.deepcopy(agent))
    calls = watch(monkeypatch, script, "compute_gae")
    updates = watch(monkeypatch, script, "update")
    args = args_for(script, tmp_path, "Scripted", {"ends": ENDS}, **({bug: True} if bug else {}))
    script.train(args)
    for (given, (advantages, returns), _), (_, (rollout, _), agent), (arguments, _, _) in zip(
        calls, rollouts, updates, strict=True
    ):
        rewards, values, next_values, terminated, truncated, gamma, gae_lambda = given
        with torch.no_grad():
            of_obs, of_next_obs = agent.value(rollout.obs), agent.value(rollout.next_obs)
        limit, fall = rollout.truncated, rollout.terminated
        assert (gamma, gae_lambda) == (args.gamma, args.gae_lambda) and torch.equal(rewards, rollout.reward)
        assert torch.equal(terminated, fall | limit if bug == "break_" else fall)
        assert torch.equal(truncated, limit) and (limit & ~fall).any() and (limit & fall).any()
        torch.testing.assert_close(values, of_obs[:-1], rtol=0, atol=1e-5)
        expected = of_obs[1:] if bug == "break_reset" else of_next_obs
        torch.testing.assert_close(next_values[~fall], expected[~fall], rtol=0, atol=1e-5)
        apart = (of_obs[1:] - of_next_obs)[limit & ~fall].abs()
        assert apart.max() > 1e-3  # or the two could not be told apart
        *_, used_advantages, used_returns = tensors(arguments)
        assert torch.equal(used_advantages, advantages.flatten())
        assert torch.equal(used_returns, returns.flatten())


@pytest.mark.parametrize("bug", [None, "break_", "break_reset"])
def test_value_at_time_limit_is_that_of_the_last_observation(script, monkeypatch, tmp_path, bug):
    """Fails with the values after the reset, and with the values of steps that were not truncated in the
    mean."""
    rollouts = watch(monkeypatch, script, "collect_rollout", before=lambda agent, *_: copy.deepcopy(agent))
    script.train(args_for(script, tmp_path, "Scripted", {"ends": ENDS}, **({bug: True} if bug else {})))
    for line, (_, (rollout, _), agent) in zip(metrics(tmp_path), rollouts, strict=True):
        with torch.no_grad():
            expected = agent.value(rollout.next_obs)[rollout.truncated].mean().item()
        assert line["value_at_time_limit"] == pytest.approx(expected, abs=1e-5)


def test_without_a_time_limit_its_value_is_null(script, tmp_path):
    """Fails with the values of falls in the mean."""
    script.train(args_for(script, tmp_path, "Scripted", {"ends": [["fall", 3]]}))
    assert all(line["value_at_time_limit"] is None for line in metrics(tmp_path))


# Learning rate and early stop


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_learning_rate_starts_full_and_never_reaches_zero(script, monkeypatch, tmp_path, anneal_lr):
    """Fails with `iteration` for `iteration - 1`: the first update is then not at the full rate, the last one
    at 0."""
    calls = watch(
        monkeypatch, script, "update", before=lambda *a: find(torch.optim.Optimizer, a).param_groups[0]["lr"]
    )
    script.train(args_for(script, tmp_path, learning_rate=0.006, anneal_lr=anneal_lr))
    expected = [0.006, 0.005, 0.004, 0.003, 0.002, 0.001] if anneal_lr else [0.006] * 6
    assert [rate for _, _, rate in calls] == pytest.approx(expected)
    assert [line["learning_rate"] for line in metrics(tmp_path)] == pytest.approx(expected)


@of_ppo
@pytest.mark.parametrize("target_kl", [None, 1e-9, 0.003, 0.005, 0.01, 100.0])
def test_target_kl_stops_further_epochs(script, monkeypatch, tmp_path, target_kl):
    """Fails with: no stop; a stop in the middle of an epoch; a stop at 1.5 times the target; the last
    minibatch's KL for the epoch's mean; the first minibatch's KL reported."""
    calls = watch(monkeypatch, script, "ppo_loss")
    args = args_for(script, tmp_path, target_kl=target_kl, learning_rate=1e-2)
    script.train(args)
    kls = [result[1]["approx_kl"].item() for _, result, _ in calls]
    epochs, counts = np.array(kls).reshape(-1, args.num_minibatches).mean(1).tolist(), []
    for line in metrics(tmp_path):
        count = 0
        while count < args.update_epochs:
            kl, count = epochs.pop(0), count + 1
            if target_kl is not None and kl > target_kl:
                break
        assert line["approx_kl"] == pytest.approx(kl, abs=1e-7)
        counts.append(count)
    assert not epochs
    if target_kl in (None, 100.0):
        assert set(counts) == {args.update_epochs}
    else:
        assert np.mean(counts) < args.update_epochs and (target_kl > 1e-9 or set(counts) == {1})


@of_ppo
def test_a_learning_rate_of_zero_is_no_stop(script, tmp_path):
    """Fails with the update skipped at a learning rate of 0. The weights stay, Adam's moments move."""
    args = args_for(script, tmp_path, learning_rate=0.0)
    script.train(args)
    adam = load(tmp_path)["state"]["optimizer"]["state"][0]
    assert adam["step"].item() == 6 * args.update_epochs * args.num_minibatches
    assert adam["exp_avg"].abs().max() > 0


# Normalisation


def test_running_norm_is_that_of_all_batches_together():
    """Fails with: the sample variance for the population's; the shift between the batches' means left out; a
    first count that is not 0."""
    rng = np.random.default_rng(0)
    batches = [rng.normal(50 * k, 1 + k, (n, 2, 3)) for k, n in enumerate((1, 7, 100, 3))]
    norm = RunningNorm(3)
    for batch in batches:
        norm.update(torch.as_tensor(batch))
    seen = np.concatenate(batches).reshape(-1, 3)
    np.testing.assert_allclose(norm.mean, seen.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.var, seen.var(0), rtol=1e-12)
    assert norm.count.item() == len(seen)
    x = torch.tensor([[0.0, 50.0, 1e6]])
    expected = np.clip((x.numpy() - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-8), -10, 10)
    assert norm(x).dtype == torch.float32
    np.testing.assert_allclose(norm(x), expected, rtol=1e-5)


def test_observation_statistics_are_constant_within_an_iteration_and_then_take_in_its_raw_observations(
    script, monkeypatch, tmp_path
):
    """Fails with: the update before the rollout's values are taken, and at every step; next_obs for obs; the
    normalised observations taken in."""

    def statistics(agent):
        return {name: x.clone() for name, x in agent.obs_norm.state_dict().items()}

    agents = []
    watch(monkeypatch, script, "flatten_parameters", before=agents.append)
    rollouts, gae, losses = (
        watch(monkeypatch, script, name, before=lambda *_: statistics(agents[0]))
        for name in ("collect_rollout", "compute_gae", loss_name(script))
    )
    args = args_for(script, tmp_path, "Scripted", {"ends": ENDS}, norm_obs=True)
    agent = script.train(args)
    seen = torch.empty(0, 3, dtype=torch.float64)
    steps = len(losses) // 6
    for k, (_, (rollout, _), before) in enumerate(rollouts):
        for _, _, during in [gae[k], *losses[k * steps : (k + 1) * steps]]:
            assert all(torch.equal(during[name], before[name]) for name in before)
        after = rollouts[k + 1][2] if k < 5 else statistics(agent)
        seen = torch.cat([seen, rollout.obs[:32].reshape(-1, 3).double()])
        torch.testing.assert_close(after["mean"], seen.mean(0))
        torch.testing.assert_close(after["var"], seen.var(0, unbiased=False))
        assert after["count"] == len(seen)


def test_observation_statistics_are_in_the_checkpoint_and_frozen_in_evaluation(script, tmp_path):
    """Fails with: statistics that are no buffers; a forward pass that updates them in evaluation."""
    args = args_for(script, tmp_path, norm_obs=True)
    agent = script.train(args)
    trained = copy.deepcopy(agent.state_dict())
    fresh = script.Agent(make_env(args.env_id), args)
    fresh.load_state_dict(load(tmp_path)["state"]["agent"])
    assert fresh.obs_norm.count == 6 * 64 and torch.equal(fresh.obs_norm.mean, agent.obs_norm.mean)
    args.eval_episodes = 3
    assert script.evaluate(fresh, args) == script.evaluate(agent, args)
    assert all(torch.equal(x, trained[name]) for name, x in agent.state_dict().items())
    obs = torch.randn(5, fresh.obs_norm.mean.shape[0])
    fresh.obs_norm.mean += 1.0
    assert not torch.equal(fresh.value(obs), agent.value(obs))  # the critic looks through them,
    assert not torch.equal(fresh.best(obs), agent.best(obs))  # and so does the actor


def test_reward_scaling_divides_by_the_spread_of_the_discounted_return():
    """Fails with: scaling before taking in; centred rewards; the spread of rewards for that of returns; the
    return not restarted at the end of an episode, or restarted before that step's reward; not carried over to
    the next rollout."""
    rng = np.random.default_rng(0)
    scaling, gamma, running, seen = RewardScaling(3, 0.9), 0.9, np.zeros(3), []
    for scale in (1.0, 5.0, 0.1):
        rewards, done = 2.0 + scale * rng.normal(size=(16, 3)), rng.random((16, 3)) < 0.2
        for t in range(16):
            running = gamma * running + rewards[t]
            seen.append(running)
            running = np.where(done[t], 0.0, running)
        expected = rewards / np.sqrt(np.var(seen) + 1e-8)
        scaled = scaling(torch.as_tensor(rewards), torch.as_tensor(done))
        np.testing.assert_allclose(scaled, expected, rtol=1e-10)


def test_scaled_rewards_are_clipped_at_10_and_zero_stays_zero():
    """Fails with no clip, and with centred rewards."""
    rewards = torch.zeros(1000, 1)
    rewards[500], rewards[600] = 100.0, -100.0
    scaled = RewardScaling(1, 0.0)(rewards, torch.zeros(1000, 1, dtype=torch.bool))
    assert scaled[500] == 10.0 and scaled[600] == -10.0
    assert (scaled == 0).sum() == 998 and scaled.dtype == rewards.dtype


def test_norm_reward_scales_what_gae_gets_and_nothing_that_is_reported(script, monkeypatch, tmp_path):
    """Fails with: the running return restarted at terminated alone, or at truncated alone; scaled rewards in
    the reported returns; raw rewards in GAE."""
    rollouts = watch(monkeypatch, script, "collect_rollout")
    gae = watch(monkeypatch, script, "compute_gae")
    probe = ("Scripted", {"ends": ENDS})
    args = args_for(script, tmp_path / "scaled", *probe, norm_reward=True)
    script.train(args)
    reference = RewardScaling(2, args.gamma)
    for (given, _, _), (_, (rollout, _), _) in zip(gae, rollouts, strict=True):
        expected = reference(rollout.reward, rollout.terminated | rollout.truncated)
        assert torch.equal(given[0], expected)
        episode, step = rollout.next_obs[..., 0] * 8, rollout.next_obs[..., 1]
        assert torch.equal(rollout.reward, episode + step / 8)  # as it was paid
    saved = load(tmp_path / "scaled")["state"]["reward_scaling"]
    assert all(torch.equal(saved[name], x) for name, x in reference.state_dict().items())
    script.train(args_for(script, tmp_path / "raw", *probe))
    scaled, raw = metrics(tmp_path / "scaled"), metrics(tmp_path / "raw")
    assert [line["episodic_return"] for line in scaled] == [line["episodic_return"] for line in raw]


# What is no number


@pytest.mark.parametrize("what", ["observation", "first observation", "reward", "loss"])
def test_what_is_no_number_stops_the_run_and_the_last_good_checkpoint_stays(script, tmp_path, what):
    """Fails with: each of the checks left out; the checkpoint written before the check."""
    args = args_for(script, tmp_path, "Broken", {"what": what, "at": 2 * 32 + 5}, checkpoint_every=1)
    with pytest.raises(NonFinite, match=f"iteration 3: the {what.split()[-1]} is not finite"):
        script.train(args)
    checkpoint = load(tmp_path)
    assert checkpoint["iteration"] == 2 and len(metrics(tmp_path)) == 2
    agent = script.Agent(make_env(args.env_id, args.env_kwargs), args)
    agent.load_state_dict(checkpoint["state"]["agent"])
    assert all(torch.isfinite(p).all() for p in agent.parameters())


def test_weights_that_are_no_numbers_are_not_saved(script, monkeypatch, tmp_path):
    """Fails with the loss alone checked: the last gradient of an iteration can be infinite where its loss is
    not."""

    def ruin(agent, *_):
        next(agent.parameters()).data[0] = np.inf

    function = script.update

    def update(*arguments):
        result = function(*arguments)
        ruin(*arguments)
        return result

    monkeypatch.setattr(script, "update", update)
    with pytest.raises(NonFinite, match=r"^iteration 1: the parameter.* not finite"):
        script.train(args_for(script, tmp_path, checkpoint_every=1))
    assert load(tmp_path)["iteration"] == 0


# A training step


class Rows(NamedTuple):
    obs: torch.Tensor
    action: torch.Tensor
    log_prob: torch.Tensor
    value: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


def agent_and_batch(script, args, scale=1.0):
    """An agent, and rows of its own actions with random advantages and returns."""
    env = make_env(args.env_id)
    torch.manual_seed(0)
    agent, rows = script.Agent(env, args), 64
    obs = torch.randn(rows, env.obs_dim)
    with torch.no_grad():
        action = agent.sample(obs, RandomStream(0, "action").normal(rows, env.action_dim))
        log_prob = agent.log_prob_entropy(obs, action)[0] + 0.1 * torch.randn(rows)
        value = agent.value(obs)
    return agent, Rows(obs, action, log_prob, value, *scale * torch.randn(2, rows))


def script_update(script, agent, flat, optimizer, batch, args):
    """The script's update with minibatches in the order of seed 0."""
    if hasattr(script, "a2c_loss"):
        script.update(agent, flat, optimizer, batch.obs, batch.action, *batch[-2:], args)
    else:
        order = RandomStream(0, "minibatch")
        script.update(agent, flat, optimizer, script.Batch._make(batch), order, args)


def plain_update(script, agent, batch, optimizer, args):
    """The same without the flat buffer: a list of tensors, clipped by torch."""
    order, a2c = RandomStream(0, "minibatch"), hasattr(script, "a2c_loss")
    epochs, minibatches = (1, 1) if a2c else (args.update_epochs, args.num_minibatches)
    for _ in range(epochs):
        for chosen in order.permutation(len(batch.returns)).chunk(minibatches):
            rows = Rows._make(x[chosen] for x in batch)
            old = rows[-2:] if a2c else rows[2:]
            log_prob, entropy = agent.log_prob_entropy(rows.obs, rows.action)
            loss, _ = getattr(script, loss_name(script))(log_prob, entropy, agent.value(rows.obs), *old, args)
            optimizer.zero_grad()
            loss.backward()
            if args.max_grad_norm > 0:
                torch.nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()


@pytest.mark.parametrize("shared_trunk", [False, True])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.5, 1e9])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_training_step_is_that_of_plain_tensors(script, kind, max_grad_norm, shared_trunk):
    """Fails with: the gradient not cleared; the clip left out, or also where the norm is smaller, or at each
    parameter's own norm; max_grad_norm 0 taken for a clip to 0. SGD shows the gradient's size, which Adam
    hides."""

    def make(parameters):
        if kind == "sgd":
            return torch.optim.SGD(parameters, lr=1e-3)
        return torch.optim.Adam(parameters, lr=1e-3, eps=1e-5, foreach=False, fused=False)

    args = script.Args(max_grad_norm=max_grad_norm, shared_trunk=shared_trunk, ent_coef=0.01)
    agent, batch = agent_and_batch(script, args, scale=10.0)
    plain = copy.deepcopy(agent)
    flat = script.flatten_parameters(agent)
    optimizer = make([flat]) if kind == "sgd" else torch.optim.Adam([flat], lr=1e-3, eps=1e-5, fused=True)
    script_update(script, agent, flat, optimizer, batch, args)
    plain_update(script, plain, batch, make(plain.parameters()), args)
    names = dict(plain.named_parameters())
    for name, parameter in agent.named_parameters():
        torch.testing.assert_close(parameter, names[name], rtol=0, atol=1e-6)
    start = agent_and_batch(script, args)[0]
    assert (start.value(batch.obs) - agent.value(batch.obs)).abs().max() > 1e-3  # they did learn


def test_the_gradient_is_clipped_to_its_global_norm(script):
    """Fails with the clip after the step, and with each parameter clipped on its own."""
    one_step = {} if hasattr(script, "a2c_loss") else {"update_epochs": 1, "num_minibatches": 1}
    args = script.Args(max_grad_norm=0.5, **one_step)
    agent, batch = agent_and_batch(script, args, scale=100.0)
    flat = script.flatten_parameters(agent)
    before = flat.detach().clone()
    script_update(script, agent, flat, torch.optim.SGD([flat], lr=1.0), batch, args)
    assert (flat - before).norm().item() == pytest.approx(0.5, rel=1e-4)


def test_parameters_are_views_of_the_buffer_after_training(script, monkeypatch, tmp_path):
    """Fails with parameters that are copies: they stay as they were when the buffer learns."""
    buffers = watch(monkeypatch, script, "flatten_parameters")
    agent = script.train(args_for(script, tmp_path, norm_obs=True))
    ((_, flat, _),) = buffers
    parameters = list(agent.parameters())
    assert torch.equal(torch.cat([p.flatten() for p in parameters]), flat)
    assert torch.equal(torch.cat([p.grad.flatten() for p in parameters]), flat.grad)
    assert flat.grad.abs().sum() > 0
    offset = 0
    for p in parameters:
        assert p.data_ptr() == flat[offset:].data_ptr()
        assert p.grad.data_ptr() == flat.grad[offset:].data_ptr()
        offset += p.numel()
    fresh = script.Agent(make_env(script.Args().env_id), script.Args(norm_obs=True))
    fresh.load_state_dict(load(tmp_path)["state"]["agent"])
    assert all(torch.equal(p, q) for p, q in zip(fresh.parameters(), parameters, strict=True))
