"""ppo_gpu_batched.py: what is captured replays to the bit, and what only the batched path has."""

import copy
import json
import os
import signal

import pytest
import torch

import ppo_gpu_batched as script
from common.envs.batched import BatchedEnv
from tests.capture_emulator import CaptureError, capture
from tests.conftest import load, metrics

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


def emulated(function, device=None):
    """What `script.capture` does on a GPU, on a CPU: the tensors of the partial's arguments are the state."""
    state = []
    for value in function.args:
        if isinstance(value, BatchedEnv):
            state += [value.state, value.episode_steps]
        elif isinstance(value, (torch.nn.Module, torch.Tensor)):
            state.append(value)
    return capture(function, state=state).replay


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
def test_a_captured_run_ends_in_the_bytes_of_an_eager_one(monkeypatch, tmp_path, flags):
    """Every function of 20 iterations replayed from its tape. Fails with the annealed learning rate computed
    in Python, and with Adam's moments rebound instead of written in place."""
    train(tmp_path / "eager", cuda_graph=False, **flags)
    captured = []
    monkeypatch.setattr(script, "capture", lambda f, _: captured.append(emulated(f)) or captured[-1])
    train(tmp_path / "captured", **flags)
    assert len(captured) == 6
    eager, replayed = (tmp_path / name / "checkpoint.pt" for name in ("eager", "captured"))
    assert eager.read_bytes() == replayed.read_bytes()
    for one, other in zip(metrics(tmp_path / "eager"), metrics(tmp_path / "captured"), strict=True):
        clock = {name: one[name] for name in ("sps", "seconds")}
        assert one == {**other, **clock}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_sharing_the_trunk_leaves_the_parameters_where_they_are(tmp_path, env_id):
    """Fails without `tie_weights=False`: the trunk is put back as a tensor of the gradient transform."""
    agent = train(tmp_path, env_id=env_id, shared_trunk=True, total_timesteps=3 * 128)
    storages = {p.untyped_storage().data_ptr() for p in agent.parameters()}
    assert len(storages) == 1


def test_a_broken_capture_is_caught(monkeypatch, tmp_path):
    """A learning rate annealed by a Python number is baked in: other bytes; .item() is refused."""

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
    """Over 20 iterations. Fails with any tensor of `Memory` or the environment rebound."""
    seen = []
    original = script.draw

    def draw(memory, agent, streams):
        env = [value for value in created if isinstance(value, BatchedEnv)][-1]
        tensors = [*memory.buffers(), *agent.parameters(), *agent.buffers(), env.state, env.episode_steps]
        seen.append([tensor.data_ptr() for tensor in tensors])
        original(memory, agent, streams)

    created = []
    make = script.make_batched_env
    monkeypatch.setattr(script, "make_batched_env", lambda *a: created.append(make(*a)) or created[-1])
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
    script.estimate_advantages(agent, script.RewardScaling(8, 0.99).to("meta"), memory, args)
    script.update_minibatch(agent, parameters, memory, args)
    script.end_epoch(memory, args)
    script.end_iteration(agent, memory, args)


def run_rollout(tamper=None, **flags):
    """One rollout of CartPole-v1; `tamper(env, t)` may change lanes before step t. Returns the memory."""
    args = script.Args(**{**SMALL, **flags})
    torch.manual_seed(0)
    agent = script.Agent(script.make_env("CartPole-v1"), args)
    env = script.make_batched_env("CartPole-v1", args.num_envs)
    memory = script.Memory(agent, env, sum(p.numel() for p in agent.parameters()), args)
    generator = torch.Generator().manual_seed(1)
    memory.action_noise.normal_(generator=generator)
    memory.reset_noise.uniform_(generator=generator)
    env.reset(torch.rand(args.num_envs, 4, generator=generator))
    step, t = script.step_lanes, iter(range(args.num_steps))

    def tampered(*row):
        if tamper:
            tamper(env, next(t))
        step(*row)

    script.collect_rollout(tampered, agent, env, memory, args)
    return memory


def test_a_diverging_lane_is_ended_and_touches_no_other():
    """One lane driven to infinity, one to NaN. Fails with `~(abs() >= bound)` as what is sound, which NaN
    passes, and with the reward multiplied by `sound` instead of chosen."""

    def tamper(env, t):
        if t == 5:
            env.state[2, 1] = torch.inf
            env.state[6, 3] = torch.nan

    clean, hurt = run_rollout(), run_rollout(tamper)
    others = [i for i in range(8) if i not in (2, 6)]
    for name in ("obs", "next_obs", "action", "reward", "terminated", "truncated"):
        a, b = getattr(clean, name), getattr(hurt, name)
        assert torch.equal(a[:, others], b[:, others]), name
        assert torch.isfinite(b.float()).all(), name
    for lane in (2, 6):
        assert hurt.terminated[5, lane] and hurt.reward[5, lane] == 0
        assert torch.equal(hurt.next_obs[5, lane], hurt.obs[5, lane])
        assert hurt.obs[6, lane].abs().max() <= 0.05
    assert hurt.sums[script.SUMS.index("diverged")] == 2
    assert clean.sums[script.SUMS.index("diverged")] == 0


def test_a_rollout_of_one_lane_gives_the_advantages_of_the_single_script():
    """Lane by lane, `compute_gae` of ppo_continuous.py on what a lane recorded. Fails with V(next_obs) taken
    after the reset."""
    import ppo_continuous

    memory = run_rollout(num_steps=64, num_envs=4)
    args = script.Args(**{**SMALL, "num_steps": 64, "num_envs": 4})
    torch.manual_seed(0)
    agent = script.Agent(script.make_env("CartPole-v1"), args)
    script.estimate_advantages(agent, script.RewardScaling(4, args.gamma), memory, args)
    assert memory.terminated.any()
    with torch.no_grad():
        value, next_value = agent.value(memory.obs[:-1]), agent.value(memory.next_obs)
    for lane in range(4):
        columns = (x[:, lane : lane + 1] for x in (memory.reward, value, next_value, memory.terminated))
        truncated = memory.truncated[:, lane : lane + 1]
        advantages, returns = ppo_continuous.compute_gae(*columns, truncated, args.gamma, args.gae_lambda)
        packed = memory.rows.reshape(64, 4, -1)[:, lane]
        torch.testing.assert_close(packed[:, -2:], torch.cat([advantages, returns], 1), rtol=1e-5, atol=1e-5)


def test_the_update_is_that_of_torch_adam():
    """Against autograd, clip_grad_norm_ and torch.optim.Adam. Fails with a bias correction or eps changed."""
    args = script.Args(**SMALL)
    memory = run_rollout()
    torch.manual_seed(0)
    agent = script.Agent(script.make_env("CartPole-v1"), args)
    script.estimate_advantages(agent, script.RewardScaling(8, args.gamma), memory, args)
    reference = copy.deepcopy(agent)
    parameters = script.flatten_parameters(agent).detach()
    optimizer = torch.optim.Adam(reference.parameters(), lr=args.learning_rate, eps=1e-5)
    memory.active.fill_(True)
    for k in range(4):
        memory.index.copy_(torch.arange(64) + 64 * (k % 2))
        script.update_minibatch(agent, parameters, memory, args)
        obs, action, *old = memory.rows[memory.index].split([4, 1, 1, 1, 1, 1], 1)
        new_log_prob, entropy, new_value = reference(obs, action.squeeze(1).long())
        old = (x.squeeze(1) for x in old)
        loss, _ = script.ppo_loss(new_log_prob, entropy, new_value, *old, args)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), args.max_grad_norm)
        optimizer.step()
    for p, q in zip(agent.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6)


def test_a_masked_update_changes_nothing():
    """Parameters, moments and step count, to the bit. Fails with `torch.where` left out for any of them."""
    args = script.Args(**SMALL)
    memory = run_rollout()
    torch.manual_seed(0)
    agent = script.Agent(script.make_env("CartPole-v1"), args)
    script.estimate_advantages(agent, script.RewardScaling(8, args.gamma), memory, args)
    parameters = script.flatten_parameters(agent).detach()
    state = [parameters, memory.adam_step, memory.exp_avg, memory.exp_avg_sq]
    before = [tensor.clone() for tensor in state]
    memory.active.fill_(False)
    script.update_minibatch(agent, parameters, memory, args)
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
    memory.active.fill_(True)
    script.update_minibatch(agent, parameters, memory, args)
    assert not any(torch.equal(a, b) for a, b in zip(before, state, strict=True))


@pytest.mark.parametrize(("kl", "factor"), [(0.03, 1 / 1.5), (0.01, 1.0), (0.004, 1.5), (0.0, 1.0)])
def test_the_learning_rate_adapts_to_the_kl(kl, factor):
    """Down above twice the target, up below half of it and above 0. Fails with the factors swapped."""
    args = script.Args(**SMALL, adaptive_kl=0.01, anneal_lr=False)
    memory = run_rollout()
    memory.losses[script.LOSSES.index("approx_kl")] = kl
    memory.iteration.fill_(1)
    script.end_iteration(torch.nn.Module(), memory, args)
    assert memory.learning_rate.item() == pytest.approx(args.learning_rate * factor)
    memory.learning_rate.fill_(1e-5 if factor < 1 else 1e-2)
    script.end_iteration(torch.nn.Module(), memory, args)
    assert 0.99e-5 <= memory.learning_rate.item() <= 1.01e-2


def test_what_is_annealed_starts_whole_and_ends_above_zero(tmp_path):
    """Fails with the iteration counted before its schedule is set."""
    train(tmp_path, anneal_clip=True, anneal_ent=True, ent_coef=0.01)
    first, *_, last = metrics(tmp_path)
    for name, start in (("learning_rate", 2e-3), ("clip_coef", 0.2), ("ent_coef", 0.01)):
        assert first[name] == pytest.approx(start) and last[name] == pytest.approx(start / 20)


def test_the_same_seed_is_the_same_bytes(tmp_path):
    """Also with other cadences and with an evaluation. Fails with an evaluation that draws from a stream."""
    train(tmp_path / "one")
    train(tmp_path / "two", log_every=3, checkpoint_every=1, eval_episodes=1)
    train(tmp_path / "other", seed=1)
    one, two, other = ((tmp_path / n / "checkpoint.pt").read_bytes() for n in ("one", "two", "other"))
    assert one == two != other


@pytest.mark.parametrize("case", ["plain", "normalised", "adaptive"])
def test_cut_and_resumed_is_the_same_bytes(monkeypatch, tmp_path, case):
    """Cut by Ctrl-C in iteration 9, between two reads. Fails with the schedule, a lane's episode or a stream
    left out of the checkpoint."""
    flags = CASES[case]
    train(tmp_path / "whole", **flags)
    calls = []

    def interrupted(memory, args):
        calls.append(1)
        if len(calls) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        original(memory, args)

    original = script.begin_iteration
    with monkeypatch.context() as patch:
        patch.setattr(script, "begin_iteration", interrupted)
        with pytest.raises(SystemExit) as stop:
            train(tmp_path / "cut", **flags)
    assert stop.value.code == 130 and load(tmp_path / "cut")["iteration"] == 9
    script.train(script.Args(**{**SMALL, **flags, "resume": str(tmp_path / "cut")}))
    whole, cut = ((tmp_path / name / "checkpoint.pt").read_bytes() for name in ("whole", "cut"))
    assert whole == cut
    for one, other in zip(metrics(tmp_path / "whole"), metrics(tmp_path / "cut"), strict=True):
        assert one == {**other, "sps": one["sps"], "seconds": one["seconds"]}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"env_id": "Hopper-v5"}, "--env-id Hopper-v5 has no batched form: choose one of .*Pendulum-v1"),
        ({"num_minibatches": 3}, "--num-minibatches 3 does not divide 128 rows: 1 does"),
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
    """Fails with the statistics left out of the checkpoint."""
    train(tmp_path, norm_obs=True, eval_episodes=3)
    summary = json.loads((tmp_path / "summary.json").read_text())
    args = {**SMALL, "norm_obs": True, "eval_episodes": 3, "eval_only": str(tmp_path)}
    script.evaluate_only(script.Args(**args))
    assert json.loads((tmp_path / "eval.json").read_text())["eval_returns"] == summary["eval_returns"]
    assert summary["captured"] is False and summary["train_return_mean"] > 0


def test_a_loss_that_is_no_number_stops_the_run(monkeypatch, tmp_path):
    """At the next read, with the iteration named. Fails with the check left out of `read_metrics`."""
    original = script.end_epoch

    def poisoned(memory, args):
        if memory.iteration == 5:
            memory.epoch_sum.fill_(torch.nan)
        original(memory, args)

    monkeypatch.setattr(script, "end_epoch", poisoned)
    with pytest.raises(FloatingPointError, match="iteration 5: the loss is not finite"):
        train(tmp_path, checkpoint_every=2)
    assert load(tmp_path)["iteration"] == 4
