"""ppo_gpu_batched.py: what is captured replays to the bit, and what only the batched path has."""

import copy
import json
import math

import pytest
import torch

import ppo_continuous
import ppo_gpu_batched as script
from common.envs.batched import BatchedCartPole
from tests.capture_emulator import CaptureError, capture, emulated
from tests.conftest import interrupt, load, metrics

SMALL = {
    "num_envs": 8, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 20 * 128,
    "eval_episodes": 0, "rerun": False, "threads": 1, "log_every": 7,
}  # fmt: skip
CASES = {
    "plain": {},
    "continuous": {"env_id": "CartPoleContinuous-v0"},
    "normalised": {"env_id": "Pendulum-v1", "norm_obs": True, "norm_reward": True},
    "adaptive": {"adaptive_kl": 0.01, "anneal_lr": False},
    "annealed": {"anneal_clip": True, "anneal_ent": True, "ent_coef": 0.01, "clip_vloss": True},
    "masked": {"target_kl": 1e-4, "shared_trunk": True},
}


def train(out, **flags):
    return script.train(script.Args(**{**SMALL, **flags, "out": str(out)}))


def estimate(*state):
    script.estimate_advantages(script.values_and_log_probs, *state)


def update(*state):
    script.update_minibatch(script.minibatch_gradients, *state)


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_a_captured_run_ends_in_the_bytes_of_an_eager_one(monkeypatch, tmp_path, flags):
    """Every function of 20 iterations replayed from its tape. Fails with the annealed learning rate computed
    in Python, with Adam's moments rebound instead of written in place, and with `captured` left out."""
    train(tmp_path / "eager", cuda_graph=False, **flags)
    captured = []
    monkeypatch.setattr(script, "capture", lambda f, _: captured.append(emulated(f)) or captured[-1])
    train(tmp_path / "captured", **flags)
    assert len(captured) == 6 and json.loads((tmp_path / "captured/summary.json").read_text())["captured"]
    eager, replayed = (tmp_path / name / "checkpoint.pt" for name in ("eager", "captured"))
    assert eager.read_bytes() == replayed.read_bytes()
    for one, other in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "captured"), strict=True):
        clock = {name: one[name] for name in ("sps", "seconds")}
        assert one == {**other, **clock}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_sharing_the_trunk_leaves_the_parameters_where_they_are(tmp_path, env_id):
    """Fails without `tie_weights=False`, when the trunk is put back as a tensor of the gradient transform,
    and with a trunk of the critic's own."""
    agent = train(tmp_path, env_id=env_id, shared_trunk=True, total_timesteps=3 * 128)
    storages = {p.untyped_storage().data_ptr() for p in agent.parameters()}
    assert len(storages) == 1 and agent.actor[1] is agent.critic[1]


def test_a_broken_capture_is_caught(monkeypatch, tmp_path):
    """A learning rate annealed by a Python number is baked in: other bytes; .item() is refused. Fails
    with `emulated` giving back the function itself, and with no refusal in the emulator."""

    def baked(memory, args):
        original(memory, args)
        baked.calls += 1
        memory.learning_rate.fill_(args.learning_rate / baked.calls)

    original, baked.calls = script.begin_iteration, 0
    monkeypatch.setattr(script, "begin_iteration", baked)
    train(tmp_path / "eager", cuda_graph=False)
    baked.calls = 0
    with monkeypatch.context() as patch:
        patch.setattr(script, "capture", emulated)
        train(tmp_path / "captured")
    eager, captured = (load(tmp_path / name)["state"]["agent"] for name in ("eager", "captured"))
    assert any(not torch.equal(eager[name], captured[name]) for name in eager)

    def waits(memory, args):
        original(memory, args)
        memory.learning_rate.fill_(memory.iteration.item())

    memory = torch.nn.Module()
    monkeypatch.undo()
    agent = train(tmp_path / "other", total_timesteps=128)
    env = script.make_batched_env("CartPole-v1", 8)
    args = script.Args(**SMALL)
    memory = script.Memory(agent, env, sum(p.numel() for p in agent.parameters()), args)
    with pytest.raises(CaptureError, match="item"):
        capture(lambda: waits(memory, args), state=[memory])


def test_addresses_stay_where_they_are(monkeypatch, tmp_path):
    """Over 20 iterations. Fails with any tensor of `Memory`, the environment or a normalisation rebound."""
    seen, created = [], []
    original, make, scaling = script.draw, script.make_batched_env, script.RewardScaling

    def draw(memory, agent, streams):
        env, rewards = created
        modules = (memory, agent, rewards)
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        tensors += [env.state, env.episode_steps]
        seen.append([tensor.data_ptr() for tensor in tensors])
        original(memory, agent, streams)

    monkeypatch.setattr(script, "make_batched_env", lambda *a: created.append(make(*a)) or created[-1])
    monkeypatch.setattr(script, "RewardScaling", lambda *a: created.append(scaling(*a)) or created[-1])
    monkeypatch.setattr(script, "draw", draw)
    train(tmp_path, norm_obs=True, norm_reward=True)
    assert len(seen) == 20 and all(addresses == seen[0] for addresses in seen)


def test_the_functions_run_on_meta(tmp_path):
    """device="meta" has shapes and no numbers, and refuses .cpu(), .numpy(), .tolist() and .item(). Fails
    with any of them in a captured function."""
    switches = {"target_kl": 0.1, "adaptive_kl": 0.1, "norm_reward": True}
    args = script.Args(**SMALL, **switches, device="meta")
    env = script.make_batched_env("CartPole-v1", args.num_envs, "meta")
    agent = script.Agent(script.make_env("CartPole-v1"), args).to("meta")
    parameters = script.flatten_parameters(agent).detach()
    memory = script.Memory(agent, env, parameters.numel(), args)
    script.begin_iteration(memory, args)
    script.collect_rollout(script.step_lanes, agent, env, memory, args)
    estimate(agent, script.RewardScaling(8, 0.99).to("meta"), memory, args)
    update(agent, parameters, memory, args)
    script.end_epoch(memory, args)
    script.end_iteration(agent, memory, args)


def build(**flags):
    """The parts of a run before its first iteration, with noise drawn: args, agent, env and memory."""
    args = script.Args(**{**SMALL, **flags})
    torch.manual_seed(0)
    agent = script.Agent(script.make_env(args.env_id), args)
    env = script.make_batched_env(args.env_id, args.num_envs)
    memory = script.Memory(agent, env, sum(p.numel() for p in agent.parameters()), args)
    generator = torch.Generator().manual_seed(1)
    memory.action_noise.normal_(generator=generator)
    memory.reset_noise.uniform_(generator=generator)
    env.reset(torch.rand(args.num_envs, env.reset_noise_dim, generator=generator))
    return args, agent, env, memory


def run_rollout(tamper=None, **flags):
    """One rollout; `tamper(env, t)` may change lanes before step t. Returns what `build` does."""
    args, agent, env, memory = build(**flags)
    step, t = script.step_lanes, iter(range(args.num_steps))

    def tampered(*row):
        if tamper:
            tamper(env, next(t))
        step(*row)

    script.collect_rollout(tampered, agent, env, memory, args)
    return args, agent, env, memory


def near_the_limit(env, t):
    """To tamper with: all lanes but the first two are 10 steps from their time limit."""
    if t == 0:
        env.episode_steps[2:] = env.max_episode_steps - 10


@pytest.mark.parametrize("env_id", ["CartPole-v1", "CartPoleContinuous-v0"])
def test_a_rollout_records_what_happened_before_and_after_a_reset(env_id):
    """Row by row against the environment's own functions. Fails with next_obs or `obs_after` from the wrong
    side of the reset, with one row of noise for all steps, with the deviation left out of the sample, and
    with a lane's return or length kept at a time limit."""
    args, agent, env, memory = run_rollout(near_the_limit, num_steps=64, env_id=env_id, log_std_init=-1.0)
    assert memory.terminated.any() and memory.truncated[:, 2:].any(0).all()
    length = torch.zeros(args.num_envs)
    for t in range(args.num_steps):
        obs = memory.obs[t]
        with torch.no_grad():
            output, noise = agent.actor(obs), memory.action_noise[t]
        discrete = env_id == "CartPole-v1"
        action = (output + noise).argmax(-1) if discrete else output + math.exp(-1) * noise
        torch.testing.assert_close(memory.action[t], action)
        next_obs, reward, fell = env.dynamics(obs, memory.action[t])  # a cart-pole's observation is its state
        done = memory.terminated[t] | memory.truncated[t]
        assert torch.equal(memory.next_obs[t], next_obs) and torch.equal(memory.terminated[t], fell)
        assert torch.equal(memory.reward[t], reward)
        start = env.initial_state(memory.reset_noise[t])
        assert torch.equal(memory.obs[t + 1], torch.where(done.unsqueeze(1), start, next_obs))
        length = (length + 1) * ~done
    assert torch.equal(memory.episodic_length, length) and torch.equal(memory.episodic_return, length)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_diverging_lane_is_ended_and_touches_no_other(env_id):
    """One lane driven to infinity, one to NaN. Fails with `~(abs() >= bound)` as what is sound, which NaN
    passes, with the reward multiplied by `sound` instead of chosen (Pendulum's is NaN then), with the lane
    not terminated, and with the count wrong."""

    def tamper(env, t):
        if t == 5:
            env.state[2, 1] = torch.inf
            env.state[6, -1] = torch.nan

    (*_, clean), (_, _, env, hurt) = (run_rollout(f, env_id=env_id) for f in (None, tamper))
    others = [i for i in range(8) if i not in (2, 6)]
    for name in ("obs", "next_obs", "action", "reward", "terminated", "truncated"):
        a, b = getattr(clean, name), getattr(hurt, name)
        assert torch.equal(a[:, others], b[:, others]), name
        assert torch.isfinite(b.float()).all(), name
    start = env.observe(env.initial_state(hurt.reset_noise[5]))
    for lane in (2, 6):
        assert hurt.terminated[5, lane] and hurt.reward[5, lane] == 0
        assert torch.equal(hurt.next_obs[5, lane], hurt.obs[5, lane])
        assert torch.equal(hurt.obs[6, lane], start[lane])
    assert hurt.diverged == 2 and clean.diverged == 0


def test_a_fall_on_the_step_of_the_limit_is_both_and_has_no_future():
    """Fails with either flag clearing the other, and with V(next_obs) in the advantage."""

    def tamper(env, t):
        if t == 5:
            env.state[3, 0] = 10.0  # metres from the middle, and off the track
            env.episode_steps[3] = env.max_episode_steps - 1

    args, agent, _, memory = run_rollout(tamper)
    estimate(agent, None, memory, args)
    assert memory.terminated[5, 3] and memory.truncated[5, 3]
    assert memory.rows.reshape(16, 8, -1)[5, 3, -1] == pytest.approx(1.0)  # the return: this reward alone


def test_a_reward_out_of_bounds_ends_the_lane_too():
    """Fails with the reward left out of what is sound."""
    *_, memory = run_rollout(env_id="Pendulum-v1", divergence_bound=9.0)  # observations are at most 8
    cut = memory.terminated
    assert cut.any() and not cut.all() and (memory.reward[cut] == 0).all() and memory.reward.min() > -9


@pytest.mark.parametrize("flags", [{}, {"break_": True}, {"break_reset": True}, {"norm_reward": True}])
def test_the_advantages_of_a_lane_are_those_of_the_single_script(flags):
    """Lane by lane, `compute_gae` of ppo_continuous.py on what a lane recorded, with falls and time limits.
    Fails with V(next_obs) taken after the reset, with a time limit taken for a fall, with --break or
    --break-reset without effect, and with the reward scaling unused or told of falls alone."""
    args, agent, _, memory = run_rollout(near_the_limit, num_steps=64, num_envs=4, **flags)
    fell, late = memory.terminated, memory.truncated
    assert fell.any() and late.any()

    def halved(rewards, done):
        assert torch.equal(done, fell | late)
        return rewards / 2

    estimate(agent, halved, memory, args)
    with torch.no_grad():
        value, after_reset = agent.value(memory.obs[:-1]), agent.value(memory.obs[1:])
        next_value = after_reset if args.break_reset else agent.value(memory.next_obs)
    reward = memory.reward / 2 if args.norm_reward else memory.reward
    columns = (reward, value, next_value, fell | late if args.break_ else fell, late)
    for lane in range(4):
        one = (x[:, lane : lane + 1] for x in columns)
        advantages, returns = ppo_continuous.compute_gae(*one, args.gamma, args.gae_lambda)
        packed = memory.rows.reshape(64, 4, -1)[:, lane]
        torch.testing.assert_close(packed[:, -2:], torch.cat([advantages, returns], 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_the_packed_rows_are_what_the_loss_unpacks(monkeypatch, env_id):
    """Before the first step new and old agree. Fails with the old log-probability of another observation,
    with two columns swapped, with the explained variance of anything else, and with the loss given the flags
    for the annealed tensors."""
    args, agent, _, memory = run_rollout(env_id=env_id)
    estimate(agent, None, memory, args)
    memory.clip_coef.fill_(0.1)
    memory.ent_coef.fill_(0.02)
    given, original = [], script.ppo_loss
    monkeypatch.setattr(script, "ppo_loss", lambda *a: given.extend(a) or original(*a))
    _, diagnostics = script.minibatch_loss(dict(agent.named_parameters()), agent, memory.rows, memory, args)
    figures = dict(zip(script.LOSSES, diagnostics.tolist(), strict=True))
    assert abs(figures["approx_kl"]) < 1e-6 and figures["clipfrac"] == 0
    log_prob, _, value, old_log_prob, old_value, advantages, returns, now = given
    torch.testing.assert_close(log_prob, old_log_prob)
    torch.testing.assert_close(value, old_value)
    torch.testing.assert_close(returns, advantages + value)
    assert now.clip_coef is memory.clip_coef and now.ent_coef is memory.ent_coef
    explained = 1 - advantages.var(correction=0) / returns.var(correction=0)
    assert memory.explained_variance.item() == pytest.approx(explained.item(), abs=1e-5)


def test_a_draw_is_fresh_and_from_the_right_distribution():
    """Fails with any of the three not drawn again, with one row or epoch for all, with the sign of the Gumbel
    noise, and with normal noise for it."""
    _, agent, _, memory = build(num_envs=256, env_id="Acrobot-v1")
    streams = [script.RandomStream(0, name) for name in ("action", "reset", "minibatch")]
    names, draws = ("action_noise", "reset_noise", "order"), []
    for _ in range(2):
        script.draw(memory, agent, streams)
        draws += [getattr(memory, name).clone() for name in names]
    for name, first, second in zip(names, draws[:3], draws[3:], strict=True):
        rows = [*first, *second]
        assert len({row.numpy().tobytes() for row in rows}) == len(rows), name
    assert all(torch.equal(epoch.flatten().sort()[0], torch.arange(256 * 16)) for epoch in memory.order)
    assert memory.reset_noise.min() >= 0 and memory.reset_noise.max() < 1
    agent.actor = torch.nn.Sequential(torch.nn.Identity())  # takes the observation for logits
    wanted = torch.tensor([0.8, 0.15, 0.05])
    often = agent.sample(wanted.log(), memory.action_noise).flatten().bincount() / memory.action.numel()
    torch.testing.assert_close(often, wanted, rtol=0, atol=0.02)


def test_every_epoch_goes_through_every_row_in_an_order_of_its_own(monkeypatch, tmp_path):
    """Fails with one epoch's order for all, and with the first minibatch taken for each."""
    seen, original = [], script.update_minibatch
    monkeypatch.setattr(
        script, "update_minibatch", lambda *a: seen.append(a[3].index.tolist()) or original(*a)
    )
    train(tmp_path, total_timesteps=3 * 128)
    epochs = [tuple(a + b) for a, b in zip(seen[::2], seen[1::2], strict=True)]
    assert len(set(epochs)) == len(epochs) == 6
    assert all(sorted(epoch) == list(range(128)) for epoch in epochs)


def test_the_metrics_are_those_of_the_recorded_steps(monkeypatch, tmp_path):
    """Episodes counted again from the rollouts, of which some end in a fall and some at a limit. Fails with
    sums not cleared, with a return or length not restarted or added after it was, with the value at the limit
    of another observation or over all ends, and with a lane that starts without a reset."""
    monkeypatch.setattr(script.BATCHED_ENVS["CartPole-v1"], "max_episode_steps", 20)
    records, original = [], script.estimate_advantages

    def record(forward, agent, scaling, memory, args):
        original(forward, agent, scaling, memory, args)
        names = ("obs", "reward", "terminated", "truncated")
        values = agent.value(memory.next_obs).detach()
        records.append([*(getattr(memory, name).clone() for name in names), values])

    monkeypatch.setattr(script, "estimate_advantages", record)
    train(tmp_path)
    scores, limits, fell = [0] * 8, 0, 0
    for line, (_, reward, terminated, truncated, value) in zip(metrics(tmp_path), records, strict=True):
        ended = []
        for t in range(16):
            for lane in range(8):
                scores[lane] += reward[t, lane].item()
                if terminated[t, lane] or truncated[t, lane]:
                    ended.append(scores[lane])
                    scores[lane] = 0
        assert line["episodes"] == len(ended) and line["global_step"] == 128 * line["iteration"]
        assert line["episodic_return"] == line["episodic_length"] == pytest.approx(sum(ended) / len(ended))
        at_limit = line["value_at_time_limit"]
        assert (at_limit is None) == (not truncated.any())
        assert at_limit is None or at_limit == pytest.approx(value[truncated].mean().item(), rel=1e-4)
        limits, fell = limits + truncated.sum(), fell + terminated.sum()
    assert limits > 5 and fell > 5
    first = records[0][0][0]
    assert first.abs().max() <= 0.05 and len({tuple(row) for row in first.tolist()}) == 8


def test_length_and_return_are_not_mistaken_for_each_other(tmp_path):
    """Pendulum's reward is negative. Fails with the two read in each other's place."""
    train(tmp_path, env_id="Pendulum-v1")
    ended = [line for line in metrics(tmp_path) if line["episodes"]]
    assert ended and all(line["episodic_length"] == 200 > 0 > line["episodic_return"] for line in ended)


def test_observation_statistics_are_of_the_rollout_and_wait_for_its_end(monkeypatch, tmp_path):
    """Fails with the last observation taken in twice, with no update, and with one inside the loss."""
    seen, original = [], script.end_iteration

    def end_iteration(agent, memory, args):
        assert agent.obs_norm.count == 128 * len(seen)
        seen.append(memory.obs[:-1].double().flatten(0, 1))
        original(agent, memory, args)

    monkeypatch.setattr(script, "end_iteration", end_iteration)
    agent = train(tmp_path, norm_obs=True, total_timesteps=3 * 128)
    torch.testing.assert_close(agent.obs_norm.mean, torch.cat(seen).mean(0))
    assert agent.obs_norm.count == 3 * 128


def test_a_diverged_row_stays_out_of_the_statistics():
    """Before a lane diverges its numbers are large, but not yet too large. Fails with all rows taken in."""

    def hurt(env, t):
        if t == 5:
            env.state[2, 1] = torch.nan

    args, agent, _, memory = run_rollout(hurt, norm_obs=True)
    memory.obs[5, 2] = 1e5
    script.end_iteration(agent, memory, args)
    others = memory.obs[:-1].flatten(0, 1)[torch.arange(128) != 5 * 8 + 2].double()
    torch.testing.assert_close(agent.obs_norm.mean, others.mean(0))
    assert agent.obs_norm.count == 127


def test_each_stream_and_the_weights_follow_from_the_seed_alone(monkeypatch, tmp_path):
    """Fails with two streams of one name, and with a fixed seed for streams or weights."""
    states, original = [], script.draw

    def draw(memory, agent, streams):
        states.extend(stream.generator.get_state().numpy().tobytes() for stream in streams)
        states.append(agent.actor[1].weight.detach().numpy().tobytes())
        original(memory, agent, streams)

    monkeypatch.setattr(script, "draw", draw)
    for seed in (0, 1):
        train(tmp_path / str(seed), seed=seed, total_timesteps=128)
    assert len(set(states)) == len(states) == 8


@pytest.mark.parametrize("orthogonal_init", [True, False])
def test_the_initial_weights(orthogonal_init):
    """Fails with --no-orthogonal-init without effect."""
    _, agent, *_ = build(orthogonal_init=orthogonal_init)
    layer = agent.actor[3]
    is_orthogonal = torch.allclose(layer.weight @ layer.weight.T, 2 * torch.eye(64), atol=1e-4)
    assert is_orthogonal == orthogonal_init == (not layer.bias.any())


def test_what_an_evaluation_plays():
    """Fails with the least probable action, with an action that is not clipped to its bounds, and with no end
    at --eval-max-steps, or one that is not counted."""
    args, agent, *_ = build(eval_episodes=2, eval_max_steps=5)
    assert script.evaluate(agent, args) == ([5.0, 5.0], 2)
    logits = agent.actor(torch.eye(4))
    assert torch.equal(agent.best(torch.eye(4)), logits.max(-1).indices)
    _, agent, *_ = build(env_id="Pendulum-v1")
    assert agent.env_action(torch.tensor([[-9.0], [0.5], [9.0]])).tolist() == [[-2.0], [0.5], [2.0]]


@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_the_update_is_that_of_torch_adam(max_grad_norm):
    """Against autograd, clip_grad_norm_ and torch.optim.Adam. Fails with a bias correction or eps changed,
    with the flag for the scheduled learning rate, and with --max-grad-norm 0 taken for a bound."""
    args, agent, _, memory = run_rollout(max_grad_norm=max_grad_norm)
    estimate(agent, None, memory, args)
    reference = copy.deepcopy(agent)
    parameters = script.flatten_parameters(agent).detach()
    memory.learning_rate.fill_(args.learning_rate / 2)
    optimizer = torch.optim.Adam(reference.parameters(), lr=args.learning_rate / 2, eps=1e-5)
    memory.active.fill_(True)
    for k in range(4):
        memory.index.copy_(torch.arange(64) + 64 * (k % 2))
        update(agent, parameters, memory, args)
        obs, action, *old = memory.rows[memory.index].split([4, 1, 1, 1, 1, 1], 1)
        new_log_prob, entropy, new_value = reference(obs, action.squeeze(1).long())
        old = (x.squeeze(1) for x in old)
        loss, _ = script.ppo_loss(new_log_prob, entropy, new_value, *old, args)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), args.max_grad_norm or torch.inf)
        optimizer.step()
    for p, q in zip(agent.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6)


def test_a_masked_update_changes_nothing():
    """Parameters, moments and step count, to the bit. Fails with `torch.where` left out for any of them."""
    args, agent, _, memory = run_rollout()
    estimate(agent, None, memory, args)
    parameters = script.flatten_parameters(agent).detach()
    state = [parameters, memory.adam_step, memory.exp_avg, memory.exp_avg_sq]
    before = [tensor.clone() for tensor in state]
    memory.active.fill_(False)
    update(agent, parameters, memory, args)
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
    memory.active.fill_(True)
    update(agent, parameters, memory, args)
    assert not any(torch.equal(a, b) for a, b in zip(before, state, strict=True))


@pytest.mark.parametrize(("target_kl", "epochs"), [(1e-9, 1), (1.0, 3), (None, 3)])
def test_target_kl_masks_the_rest_of_an_iteration_and_no_more(tmp_path, target_kl, epochs):
    """By Adam's count of steps. Fails with the mask ignored, reversed, or left on for the next iteration."""
    train(tmp_path, target_kl=target_kl, update_epochs=3, total_timesteps=5 * 128)
    assert load(tmp_path)["state"]["memory"]["adam_step"] == 5 * 2 * epochs


def test_the_diagnostics_are_means_of_the_last_epoch_that_moved_the_policy():
    """Fails with the sums not cleared, divided by another number, or overwritten by a masked epoch."""
    args, _, _, memory = build(num_minibatches=4, update_epochs=3, target_kl=1.0)
    memory.active.fill_(True)
    for total, kept, active in ((2.0, 0.5, True), (8.0, 2.0, False), (4.0, 2.0, False)):
        memory.epoch_sum.fill_(total)
        script.end_epoch(memory, args)
        assert (memory.losses == kept).all() and (memory.epoch_sum == 0).all() and memory.active == active


@pytest.mark.parametrize(("kl", "factor"), [(0.03, 1 / 1.5), (0.01, 1.0), (0.004, 1.5), (0.0, 1.0)])
def test_the_learning_rate_adapts_to_the_kl(kl, factor):
    """Down above twice the target, up below half of it and above 0, within bounds. Fails with the factors
    swapped, without the bounds, and with the next rate logged for the one that was used."""
    args, _, _, memory = run_rollout(adaptive_kl=0.01, anneal_lr=False)
    memory.losses[script.LOSSES.index("approx_kl")] = kl
    memory.iteration.fill_(1)
    script.end_iteration(torch.nn.Module(), memory, args)
    assert memory.learning_rate.item() == pytest.approx(args.learning_rate * factor)
    logged = memory.metrics[0, script.METRICS.index("learning_rate")].item()
    assert logged == pytest.approx(args.learning_rate)
    memory.learning_rate.fill_(1e-5 if factor < 1 else 1e-2)
    script.end_iteration(torch.nn.Module(), memory, args)
    assert 0.99e-5 <= memory.learning_rate.item() <= 1.01e-2


@pytest.mark.parametrize("annealed", ["learning_rate", "clip_coef", "ent_coef"])
def test_what_is_annealed_starts_whole_and_ends_above_zero(tmp_path, annealed):
    """And nothing else moves. Fails with the iteration counted before its schedule is set, with an end one
    iteration early, and with two of the flags in each other's place."""
    switches = {"anneal_clip": annealed == "clip_coef", "anneal_ent": annealed == "ent_coef"}
    train(tmp_path, anneal_lr=annealed == "learning_rate", ent_coef=0.01, **switches)
    first, *_, last = metrics(tmp_path)
    for name, start in (("learning_rate", 4e-3), ("clip_coef", 0.2), ("ent_coef", 0.01)):
        end = start / 20 if name == annealed else start
        assert first[name] == pytest.approx(start) and last[name] == pytest.approx(end)


def test_the_same_seed_is_the_same_bytes(tmp_path):
    """Also with other cadences and with an evaluation. Fails with a draw at each read or each checkpoint,
    with the metrics' ring saved, and with weights from torch's global generator."""
    train(tmp_path / "one")
    train(tmp_path / "two", log_every=3, checkpoint_every=1, eval_episodes=1)
    train(tmp_path / "other", seed=1)
    one, two, other = ((tmp_path / n / "checkpoint.pt").read_bytes() for n in ("one", "two", "other"))
    assert one == two != other


@pytest.mark.parametrize("case", ["plain", "normalised", "adaptive"])
def test_cut_and_resumed_is_the_same_bytes(monkeypatch, tmp_path, case):
    """Cut by Ctrl-C in iteration 9, between two reads. Fails with the schedule, a lane's episode, a stream,
    the reward scaling or Adam's state left out of the checkpoint, and with lines before it read again."""
    flags = CASES[case]
    train(tmp_path / "whole", **flags)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as stop:
        interrupt(patch, script, "begin_iteration", 9)
        train(tmp_path / "cut", **flags)
    assert stop.value.code == 130 and load(tmp_path / "cut")["iteration"] == 9
    script.train(script.Args(**{**SMALL, **flags, "resume": str(tmp_path / "cut")}))
    whole, cut = ((tmp_path / name / "checkpoint.pt").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "cut"), strict=True):
        assert one == {**other, "sps": one["sps"], "seconds": one["seconds"]}


def compiled_work(monkeypatch, out, **flags):
    """{function: operations in its graphs} of what a run of two iterations hands to the compiler."""
    work, compile = {}, torch.compile

    def recording(function, **options):
        def backend(graph, inputs):
            work[function.__name__].append(len(graph.graph.nodes))
            return graph.forward

        work[function.__name__] = []
        return compile(function, backend=backend)

    torch.compiler.reset()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", recording)
        train(out, compile=True, total_timesteps=2 * 8 * flags["num_steps"], **flags)
    return work


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True])
def test_the_work_of_compiling_does_not_grow_with_num_steps(monkeypatch, tmp_path, norm):
    """One graph for each function, as large for 64 steps as for 8. Fails with GAE or the reward scaling, that
    loop over the steps, compiled too, and with the row's number given to `step_lanes` for its tensors."""
    flags = {"norm_obs": norm, "norm_reward": norm}
    short = compiled_work(monkeypatch, tmp_path / "8", num_steps=8, **flags)
    long = compiled_work(monkeypatch, tmp_path / "64", num_steps=64, **flags)
    assert short == long and all(len(graphs) == 1 for graphs in long.values()), (short, long)
    assert list(long) == ["step_lanes", "values_and_log_probs", "minibatch_gradients"]


def test_a_run_says_that_it_compiles(monkeypatch, tmp_path, capsys):
    """Fails with the line left out, and with one in every run."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for compile in (True, False):
        train(tmp_path / str(compile), compile=compile, total_timesteps=128)
        assert ("compiling in the first iteration" in capsys.readouterr().out) == compile


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"env_id": "Hopper-v5"}, "--env-id Hopper-v5 has no batched form: choose one of .*Pendulum-v1"),
        ({"num_minibatches": 3}, "--num-minibatches 3 does not divide 128 rows: 1 does"),
        ({"num_minibatches": 192}, "--num-minibatches 192 does not divide 128 rows: 64 does"),
        ({"num_minibatches": 128}, "--no-norm-adv"),
        ({"adaptive_kl": 0.01}, "--no-anneal-lr"),
        ({"total_timesteps": 10}, "--total-timesteps 10 is less than one rollout: give 128"),
        ({"threads": 0}, "--threads 0"),
        ({"log_every": 0}, "--log-every 0"),
        ({"divergence_bound": 0.0}, "--divergence-bound"),
        ({"break_": True, "break_reset": True}, "--break"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, flags, named):
    """Fails with the check of each left out."""
    with pytest.raises(ValueError, match=named):
        train(tmp_path / "run", **flags)
    assert not (tmp_path / "run").exists()


def test_evaluating_only_repeats_the_evaluation(tmp_path):
    """Fails with the statistics left out of the checkpoint, and with an evaluation that updates them."""
    agent = train(tmp_path, norm_obs=True, eval_episodes=3)
    assert agent.obs_norm.count == SMALL["total_timesteps"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    args = {**SMALL, "norm_obs": True, "eval_episodes": 3, "eval_only": str(tmp_path)}
    script.evaluate_only(script.Args(**args))
    assert json.loads((tmp_path / "eval.json").read_text())["eval_returns"] == summary["eval_returns"]
    assert summary["captured"] is False and summary["train_return_mean"] > 0


def test_a_loss_that_is_no_number_stops_the_run(monkeypatch, tmp_path):
    """At the next read, with the iteration named. Fails with the check left out of `read_metrics`, and with
    the parameters, which are those of the last iteration, looked at first."""
    original = script.begin_iteration

    def poisoned(memory, args):
        original(memory, args)
        if memory.iteration == 5:
            memory.exp_avg.fill_(torch.nan)  # from the first step on the parameters are NaN, then the loss

    monkeypatch.setattr(script, "begin_iteration", poisoned)
    with pytest.raises(FloatingPointError, match="iteration 5: the loss is not finite"):
        train(tmp_path, checkpoint_every=2)
    assert load(tmp_path)["iteration"] == 4


@pytest.mark.parametrize("name", ["parameter", "observation"])
def test_a_checkpoint_never_holds_what_is_no_number(monkeypatch, tmp_path, name):
    """Made in the last function of iteration 6, before its checkpoint. Fails with the check in `train` left
    out for either."""
    original = script.end_iteration

    def poisoned(agent, memory, args):
        original(agent, memory, args)
        if memory.iteration == 6:
            (memory.obs if name == "observation" else agent.critic[-1].bias.data)[0] = torch.nan

    monkeypatch.setattr(script, "end_iteration", poisoned)
    with pytest.raises(FloatingPointError, match=f"iteration 6: the {name} is not finite"):
        train(tmp_path, checkpoint_every=2)
    assert load(tmp_path)["iteration"] == 4


def test_diverging_lanes_are_reported(monkeypatch, tmp_path, capsys):
    """In the console and in metrics.jsonl. Fails with the count left out of either."""
    calls, dynamics = [], BatchedCartPole.dynamics

    def broken(env, state, action):
        calls.append(1)
        new_state, *rest = dynamics(env, state, action)
        if len(calls) == 3 * 16 + 5:
            new_state[0, 1] = torch.inf
        return new_state, *rest

    monkeypatch.setattr(BatchedCartPole, "dynamics", broken)
    train(tmp_path)
    assert "iteration 4: 1 diverged lanes were ended" in capsys.readouterr().out
    assert [line["diverged"] for line in metrics(tmp_path)] == [0] * 3 + [1] + [0] * 16
