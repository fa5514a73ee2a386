"""variants/ppo_robot.py: with all of it off its parent, and each part of it against a few plain lines."""

import dataclasses
import json
import types

import numpy as np
import pytest
import torch
from gymnasium import spaces

import ppo_gpu_batched
from common.cli import Refusal, saved_args
from common.envs import make_env
from common.envs.batched import BATCHED_ENVS, BatchedCartPoleContinuous, BatchedEnv, make_batched_env
from common.envs.frames import Frames
from tests.capture_emulator import emulated
from tests.conftest import interrupt, load, metrics
from variants import ppo_robot as script

SMALL = {
    "num_envs": 8, "num_steps": 16, "num_minibatches": 2, "update_epochs": 2, "total_timesteps": 6 * 128,
    "eval_episodes": 0, "rerun": False, "log_every": 4,
}  # fmt: skip
MASKED = "CartPoleContinuousNoVelocity-v0"
CASES = {
    "plain": {},
    "shown": {"env_id": MASKED, "frame_stack": 3, "action_history": 3, "norm_obs": True},
    "costs": {"action_rate_cost": 0.1, "action_smoothness_cost": 0.01, "action_history": 1},
    "mirror": {"env_id": MASKED, "mirror_coef": 1.0, "frame_stack": 2, "action_history": 1},
    "pid": {"env_id": "SetPoint-v0", "actor": "pid", "norm_obs": True, "frame_stack": 2},
    "adaptive": {"adaptive_kl": 0.01, "anneal_lr": False, "target_kl": 0.02, "divergence_bound": 15.0},
}
each_case = pytest.mark.parametrize("flags", CASES.values(), ids=CASES)
mirrored_envs = [env_id for env_id, env in BATCHED_ENVS.items() if env.mirror_act]


def train(out, **flags):
    return script.train(script.Args(**{**SMALL, **flags, "out": str(out)}))


def build(**flags):
    """The parts of a run before its first iteration, with noise drawn: args, agent, env and memory."""
    args = script.Args(**{**SMALL, **flags})
    torch.manual_seed(0)
    agent = script.Agent(make_env(args.env_id), args)
    for p in agent.actor.parameters():  # actions that differ, some beyond their bounds
        p.data += 0.3 * torch.randn_like(p)
    env = make_batched_env(args.env_id, args.num_envs)
    memory = script.Memory(agent, env, sum(p.numel() for p in agent.parameters()), args)
    generator = torch.Generator().manual_seed(1)
    memory.action_noise.normal_(generator=generator)
    memory.reset_noise.uniform_(generator=generator)
    env.reset(torch.rand(args.num_envs, env.reset_noise_dim, generator=generator))
    memory.shown.copy_(agent.frames.first(env.obs()))
    return args, agent, env, memory


def rollout(tamper=None, **flags):
    """One rollout, and of each step what the environment itself returned and showed after a reset;
    `tamper(env, t)` may change lanes before step t."""
    args, agent, env, memory = build(**flags)
    seen, advance, t = [env.obs()], env.advance, iter(range(args.num_steps))

    def recorded(action):
        if tamper:
            tamper(env, next(t))
        seen.append(advance(action))
        return seen[-1]

    def step(*row):
        script.step_lanes(*row)
        seen[-1] = (*seen[-1], env.obs())

    env.advance = recorded
    script.collect_rollout(step, agent, env, memory, args)
    return args, agent, env, memory, seen


class Plain:
    """What one lane is shown, and what its changes of action cost, from lists."""

    def __init__(self, frames, obs):
        self.f, self.actions = frames, []
        self.frames, self.told = [self.frame(obs)] * frames.stack, [self.rest(obs)] * frames.stack

    def frame(self, obs):
        past = [a for action in self.actions[::-1] for a in action]
        length = self.f.history * self.f.action_dim
        return [*obs[: self.f.words], *(past + [0.0] * length)[:length]]

    def rest(self, obs):
        return [*obs[self.f.words :]][: self.f.privileged]

    def step(self, obs, action):
        self.actions.append(np.clip(action, self.f.low.numpy(), self.f.high.numpy()).tolist())
        self.frames = [self.frame(obs), *self.frames][: self.f.stack]
        self.told = [self.rest(obs), *self.told][: self.f.stack]

    def row(self):
        return np.concatenate([*self.frames, *self.told])

    def changes(self):
        a = np.array([*self.actions[::-1], *3 * [[np.nan] * self.f.action_dim]])
        rate, bend = a[0] - a[1], a[0] - 2 * a[1] + a[2]
        return np.nan_to_num([(rate**2).sum(), (bend**2).sum()])


@pytest.mark.parametrize(
    "flags", [{}, {"norm_obs": True, "norm_reward": True, "adaptive_kl": 0.01, "anneal_lr": False}]
)
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "CartPoleContinuous-v0"])
def test_with_all_of_it_off_it_trains_its_parents_weights(tmp_path, env_id, flags):
    """Byte for byte. Fails with the critic's trunk made before the actor's, with a frame that leaves out a
    word, and with rows shown that are not the environment's."""
    ours = train(tmp_path / "robot", env_id=env_id, **flags)
    defaults = dataclasses.asdict(script.Args())
    shared = {
        f.name: defaults[f.name] for f in dataclasses.fields(ppo_gpu_batched.Args) if f.name in defaults
    }
    changes = {**shared, **SMALL, "env_id": env_id, **flags, "out": str(tmp_path / "parent")}
    theirs = ppo_gpu_batched.train(ppo_gpu_batched.Args(**changes))
    weights = dict(ours.named_parameters())
    assert all(torch.equal(weights[name], p) for name, p in theirs.named_parameters())
    assert len(weights) == len(dict(theirs.named_parameters())) > 10


@pytest.mark.parametrize("more", [{}, {"privileged_critic": False}, {"actor_words": 3}])
def test_a_rollout_shows_frames(more):
    """Row by row against lists, over falls, time limits and resets. Fails with frames or actions the oldest
    first, with a history of sampled, not executed actions, with one kept over a reset, with slots of zeros at
    an episode's start, with next_obs after the reset, and with a privileged word in the actor's part."""

    def limits(env, t):
        if t == 3:
            env.episode_steps[:4] = env.max_episode_steps - 2

    flags = {"env_id": MASKED, "frame_stack": 3, "action_history": 2, "num_steps": 64, "log_std_init": 0.5}
    args, agent, _, memory, seen = rollout(limits, **flags, **more)
    assert memory.terminated.any() and memory.truncated.any()
    assert (memory.action.abs() > 1).any()
    for lane in range(args.num_envs):
        plain = Plain(agent.frames, seen[0][lane].numpy())
        for t in range(args.num_steps):
            np.testing.assert_allclose(memory.obs[t, lane], plain.row(), rtol=1e-6)
            next_obs, *_, after = seen[t + 1]
            plain.step(next_obs[lane].numpy(), memory.action[t, lane].numpy())
            np.testing.assert_allclose(memory.next_obs[t, lane], plain.row(), rtol=1e-6)
            if memory.terminated[t, lane] or memory.truncated[t, lane]:
                plain = Plain(agent.frames, after[lane].numpy())
        np.testing.assert_allclose(memory.shown[lane], plain.row(), rtol=1e-6)


def test_changes_of_action_cost_and_are_measured():
    """Against lists, resets included. Fails with the cost in the logged return, with a first action that is
    compared with 0 or with the last episode's, with sampled actions, and with the two costs swapped."""
    costs = {"action_rate_cost": 0.5, "action_smoothness_cost": 0.25}
    flags = {"env_id": "CartPoleContinuous-v0", "num_steps": 64, "log_std_init": 0.5}
    args, agent, _, memory, seen = rollout(**flags, **costs)
    returned, measured = np.zeros(args.num_envs), np.zeros(2)
    assert memory.terminated.any()
    for lane in range(args.num_envs):
        plain = Plain(agent.frames, seen[0][lane].numpy())
        for t in range(args.num_steps):
            _, reward, *_, after = seen[t + 1]
            plain.step(seen[t + 1][0][lane].numpy(), memory.action[t, lane].numpy())
            rate, bend = plain.changes()
            measured += rate, bend
            expected = reward[lane].item() - 0.5 * rate - 0.25 * bend
            assert memory.reward[t, lane].item() == pytest.approx(expected, abs=1e-5)
            returned[lane] += reward[lane].item()
            if memory.terminated[t, lane] or memory.truncated[t, lane]:
                plain, returned[lane] = Plain(agent.frames, after[lane].numpy()), 0.0
    assert measured.min() > 1
    np.testing.assert_allclose(memory.robot[:2], measured / memory.reward.numel(), rtol=1e-4)
    np.testing.assert_allclose(memory.episodic_return, returned, rtol=1e-5)


def test_a_rollout_goes_on_where_the_last_one_stopped():
    """Fails with frames or actions begun anew with every rollout, and with sums that run on."""
    args, agent, env, memory, _ = rollout(action_history=2, frame_stack=2)
    shown, past = memory.obs[-1].clone(), memory.past.clone()
    script.collect_rollout(script.step_lanes, agent, env, memory, args)
    assert torch.equal(memory.obs[0], shown) and (past != 0).any()
    assert torch.equal(memory.next_obs[0, :, 4:5], past[:, 0])  # after 3 words and the newest action
    assert memory.robot[0] > 0
    script.begin_iteration(memory, args)
    assert not memory.robot.any()


@pytest.mark.parametrize("cost", ["action_rate_cost", "action_smoothness_cost"])
def test_a_cost_reaches_the_weights_and_not_the_log(tmp_path, cost):
    """Fails with the flag unused."""
    plain, taxed = train(tmp_path / "plain"), train(tmp_path / "taxed", **{cost: 1.0})
    assert any(not torch.equal(a, b) for a, b in zip(plain.parameters(), taxed.parameters(), strict=True))
    first, other = (metrics(tmp_path / name)[0] for name in ("plain", "taxed"))
    assert first["action_rate"] == other["action_rate"] > 0 < first["action_smoothness"]
    assert first["policy_loss"] != other["policy_loss"]


@pytest.mark.parametrize("env_id", mirrored_envs)
def test_the_environments_mirrors_are_true(env_id):
    """A mirrored state under mirrored actions leads to the mirrored observation and the same reward. Fails
    with a sign of Pendulum-v1's turned, and with the words of the masked cart-pole in another order."""
    rng = torch.Generator().manual_seed(0)
    env, mirror = (make_batched_env(env_id, 64, dtype=torch.float64) for _ in range(2))
    frames = Frames(env, script.Args(env_id=env_id))
    env.reset(torch.rand(64, env.reset_noise_dim, generator=rng, dtype=torch.float64))
    mirror.state.copy_(-env.state)  # of all these environments
    for _ in range(20):
        action = 2 * torch.randn(64, 1, generator=rng, dtype=torch.float64)
        torch.testing.assert_close(mirror.obs(), frames.mirrored_obs(env.obs()))
        (_, paid, *_), (_, also, *_) = env.advance(action), mirror.advance(frames.mirrored_act(action))
        torch.testing.assert_close(paid, also)


class TwoLegs(BatchedEnv):
    """Words: body angle, left leg, right leg, and privileged: left load, right load. Actions: left, right."""

    single_observation_space = spaces.Box(-1, 1, (5,), np.float32)
    single_action_space = spaces.Box(-1, 1, (2,), np.float32)
    max_episode_steps, state_dim, reset_noise_dim = 100, 5, 5
    actor_words = 3
    mirror_obs = (0, 2, 1, 4, 3), (-1, 1, 1, 1, 1)
    mirror_act = (1, 0), (-1, -1)

    def initial_state(self, noise):
        return noise

    def dynamics(self, state, action):
        return state, state[:, 0], state[:, 0] > 2

    def observe(self, state):
        return state


def test_a_mirror_reaches_every_frame():
    """For two frames with two actions each, by hand. Fails with frames traded for one another, with
    the actions' mirror left out, and with privileged words mirrored into the actor's."""
    args = script.Args(frame_stack=2, action_history=2)
    frames = Frames(TwoLegs(1), args)
    row = torch.arange(1.0, 19.0)  # [2 x (3 words, 2 x 2 actions) | 2 x 2 privileged]
    expected = [-1, 3, 2, -5, -4, -7, -6, -8, 10, 9, -12, -11, -14, -13, 16, 15, 18, 17]
    assert frames.mirrored_obs(row).tolist() == expected
    assert frames.mirrored_act(torch.tensor([1.0, 2.0])).tolist() == [-2.0, -1.0]
    assert not Frames(TwoLegs(1), script.Args(actor_words=2)).mirrors  # the other leg is not seen
    broken = type("Broken", (TwoLegs,), {"mirror_obs": ((1, 2, 0, 4, 3), (1, 1, 1, 1, 1))})
    with pytest.raises(Refusal, match="applied twice, is not back"):
        Frames(broken(1), args)


def test_the_mirror_loss_and_its_gradient():
    """Against autograd, the target held fixed. Fails with the gradient going through the target, with
    a sum over actions for the mean, and with normalised observations mirrored."""
    flags = {"norm_obs": True, "mirror_coef": 0.5, "env_id": "Pendulum-v1"}
    args, agent, env, memory = build(**flags)
    for norm in agent.norms:
        norm.update(torch.randn(50, len(norm.mean)) + 1.0)
    script.collect_rollout(script.step_lanes, agent, env, memory, args)
    script.estimate_advantages(
        script.values_and_log_probs, agent, script.RewardScaling(8, 0.99), memory, args
    )
    memory.index.copy_(torch.randperm(128)[:64])
    with_mirror, _ = script.minibatch_gradients(agent, memory, args)
    agent.mirror_coef = 0.0
    without, _ = script.minibatch_gradients(agent, memory, dataclasses.replace(args, mirror_coef=0.0))
    obs = memory.rows[memory.index, :3]
    mirror = torch.tensor([1.0, -1.0, -1.0])
    loss = 0.5 * (agent.best(obs * mirror) + agent.best(obs).detach()).square().mean()
    loss.backward()
    for name, p in agent.named_parameters():
        expected = 0.0 * p if p.grad is None else p.grad
        torch.testing.assert_close(with_mirror[name] - without[name], expected, rtol=1e-3, atol=1e-6)
    assert loss > 1e-3
    torch.testing.assert_close(memory.robot[2], agent.asymmetry(memory.obs[:-1]).detach())


def test_without_its_loss_the_mirror_only_watches(monkeypatch, tmp_path):
    """Coefficient 0: the bytes of an environment that declares none, whose asymmetry is null. Fails with the
    measurement drawing noise, and with NaN written."""
    mirrored = train(tmp_path / "mirrored")
    monkeypatch.setattr(BATCHED_ENVS["Pendulum-v1"], "mirror_obs", None)
    plain = train(tmp_path / "plain")
    assert all(torch.equal(a, b) for a, b in zip(mirrored.parameters(), plain.parameters(), strict=True))
    assert metrics(tmp_path / "mirrored")[0]["asymmetry"] > 0
    assert metrics(tmp_path / "plain")[0]["asymmetry"] is None


def test_what_is_privileged_moves_the_critic_alone():
    """Fails with an actor that reads the whole row, and with a critic that does not."""
    _, agent, _, memory = build(env_id=MASKED, frame_stack=2)
    obs = memory.shown.clone()
    other = obs.clone()
    other[:, agent.actor_dim :] += 1.0
    assert obs.shape[1] == 8 and agent.actor_dim == 4
    assert torch.equal(agent.best(obs), agent.best(other)) and torch.equal(
        agent.best(obs), agent.best(obs[:, :4])
    )
    assert not torch.allclose(agent.value(obs), agent.value(other))
    assert build(env_id=MASKED, privileged_critic=False)[1].obs_dim == 2


@pytest.mark.parametrize("actor, expected", [("p", 0.3), ("pd", 0.3 - 0.5), ("pid", 0.3 + 0.1 - 0.5)])
def test_a_controller_begins_with_its_base_gains(actor, expected):
    """Raw errors whatever the statistics, and gains within a factor of ten. Fails with a last layer that is
    not zero, with normalised errors, with integral and rate swapped, and with gains unbounded."""
    args = script.Args(env_id="SetPoint-v0", actor=actor, norm_obs=True, base_gain=2.0)
    agent = script.Agent(make_env("SetPoint-v0"), args)
    agent.norms[0].update(torch.randn(50, 3) + 5.0)
    obs = torch.tensor([[0.3, 0.1, -0.5]])
    assert agent.best(obs).item() == pytest.approx(2 * expected)
    (gains,) = (m.gains for m in agent.modules() if isinstance(m, script.Controller))
    for bias, factor in ((-0.5, 10 ** np.tanh(-0.5)), (-50.0, 0.1), (50.0, 10.0)):  # and none turns negative
        gains[-1].bias.data.fill_(bias)
        assert agent.best(obs).item() == pytest.approx(2 * factor * expected, rel=1e-5)


def test_a_controllers_gains_are_not_set_by_the_integral():
    """In no frame. Fails with a network that reads all that is observed, and one that reads of the newest
    frame alone what it should not."""
    _, agent, _, _ = build(env_id="SetPoint-v0", actor="pid", frame_stack=2, action_history=1)
    row = torch.randn(1, agent.obs_dim)
    seen = row.requires_grad_()
    (controller,) = (m for m in agent.modules() if isinstance(m, script.Controller))
    agent.best(seen).sum().backward()
    used = (seen.grad[0] != 0).tolist()  # 2 frames of error, integral, rate and an action
    assert used == [True, True, True, True, True, False, True, True]
    gain = controller.base * 10 ** torch.tanh(script.through(controller.gains, row * controller.shown))[0, 1]
    assert seen.grad[0, 1].item() == pytest.approx(gain.item(), rel=1e-5)


@each_case
def test_a_captured_run_ends_in_the_bytes_of_an_eager_one(monkeypatch, tmp_path, flags):
    """Every function replayed from its tape. Fails with `shown` or `past` rebound, with an `if` on a lane's
    length, and with diverged rows left out by a mask."""
    train(tmp_path / "eager", cuda_graph=False, **flags)
    captured = []
    monkeypatch.setattr(script, "capture", lambda f, _: captured.append(emulated(f)) or captured[-1])
    train(tmp_path / "captured", **flags)
    assert len(captured) == 6 and json.loads((tmp_path / "captured/summary.json").read_text())["captured"]
    eager, replayed = (tmp_path / name / "checkpoint.pt" for name in ("eager", "captured"))
    assert eager.read_bytes() == replayed.read_bytes()


@each_case
def test_a_cut_run_ends_in_the_same_bytes(monkeypatch, tmp_path, flags):
    """Stopped after three of six iterations and resumed. Fails with what is shown, or the actions executed
    last, left out of the checkpoint."""
    train(tmp_path / "whole", checkpoint_every=3, **flags)
    torch.manual_seed(5)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        interrupt(patch, script, "draw", 3)
        train(tmp_path / "cut", checkpoint_every=3, **flags)
    assert load(tmp_path / "cut")["iteration"] == 3
    args = script.Args(**{**SMALL, **flags, "checkpoint_every": 3, "resume": str(tmp_path / "cut")})
    script.train(args)
    whole, cut = (tmp_path / name / "checkpoint.pt" for name in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


def test_a_diverging_lane_is_ended_and_kept_out_of_the_statistics():
    """Fails with its last observation in the statistics, with its action in the history after the reset, and
    with a cost for the step that diverged."""

    def hurt(env, t):
        if t == 5:
            env.state[2, 1] = torch.nan

    flags = {"norm_obs": True, "action_rate_cost": 1.0, "action_history": 2, "frame_stack": 2}
    args, agent, _, memory, _ = rollout(hurt, **flags)
    assert (~memory.sound).nonzero().tolist() == [[5, 2]] and memory.reward[5, 2] == 0
    assert memory.terminated[5, 2] and torch.isfinite(memory.next_obs).all()
    assert memory.obs[6, 2, 3:5].tolist() == [0.0, 0.0]  # no action yet
    memory.obs[5, 2] = 1e5  # what a lane looks like just before
    script.end_iteration(agent, memory, args)
    others = memory.obs[:-1][memory.sound].double()
    for norm in agent.norms:
        torch.testing.assert_close(norm.mean, others.mean(0)[: len(norm.mean)])
        torch.testing.assert_close(norm.var, others.var(0, unbiased=False)[: len(norm.mean)])
        assert norm.count == 127


def test_an_evaluation_shows_the_same_frames(monkeypatch):
    """What the actor reads over two episodes, against lists. Fails with the last episode's actions in it,
    with unclipped ones, and with a history of the wrong length."""
    flags = {"env_id": MASKED, "frame_stack": 3, "action_history": 2, "eval_episodes": 2}
    args, agent, _, _ = build(**flags)
    shown, best = [], agent.best
    monkeypatch.setattr(agent, "best", lambda obs: shown.append(obs[0].clone()) or 3 * best(obs))
    scores, _ = script.evaluate(agent, args)
    env = make_env(MASKED, stream="eval")
    at = 0
    for score in scores:
        plain = Plain(agent.frames, env.reset()[0])
        for _ in range(int(score)):
            np.testing.assert_allclose(shown[at], plain.row(), rtol=1e-5)
            action = 3 * best(shown[at][None])[0].detach().numpy()
            plain.step(env.step(agent.env_action(torch.tensor(action)))[0], action)
            at += 1
    assert at == len(shown) > 10


@pytest.mark.parametrize(
    "flags, said",
    [
        ({"env_id": "CartPole-v1"}, r"^--env-id CartPole-v1 has Discrete actions: ppo_gpu_batched\.py takes"),
        ({"env_id": "Ant-v5"}, r"^--env-id Ant-v5 has no batched form; choose one of .*Hopper-v5"),
        ({"actor_words": 4}, r"^--actor-words 4 cannot be: Pendulum-v1 has 1 to 3$"),
        ({"actor_words": 0}, r"^--actor-words 0 cannot be: Pendulum-v1 has 1 to 3$"),
        ({"frame_stack": 0}, r"^--frame-stack 0 cannot be"),
        ({"action_history": -1}, r"^--action-history -1 cannot be: it takes 0 or more"),
        ({"action_rate_cost": -1.0}, r"^--action-rate-cost -1\.0 cannot be"),
        ({"action_smoothness_cost": float("nan")}, r"^--action-smoothness-cost nan cannot be"),
        ({"mirror_coef": -1.0}, r"^--mirror-coef -1\.0 cannot be"),
        ({"base_gain": 0.0}, r"^--base-gain 0\.0 cannot be: it takes above 0"),
        ({"actor": "pid"}, r"^--actor pid: the actor of Pendulum-v1 sees no errors to control: give mlp"),
        (
            {"actor": "pd", "env_id": "SetPoint-v0", "actor_words": 2},
            r"^--actor pd: the actor of SetPoint-v0",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, flags, said):
    """Before a folder is made. Fails with any of the checks gone."""
    with pytest.raises(Refusal, match=said):
        train(tmp_path / "run", **flags)
    assert not (tmp_path / "run").exists()


def test_an_environment_without_a_mirror_is_refused(monkeypatch, tmp_path):
    """Fails with the check gone, and with a coefficient of 0 refused."""
    monkeypatch.setattr(BatchedCartPoleContinuous, "mirror_act", None)
    flags = {"env_id": "CartPoleContinuous-v0", "total_timesteps": 128}
    with pytest.raises(Refusal, match=r"^--mirror-coef: CartPoleContinuous-v0 has no mirror of what its"):
        train(tmp_path / "run", mirror_coef=1.0, **flags)
    train(tmp_path / "run", **flags)


@pytest.mark.parametrize("device, extra", [("cpu", "mujoco"), ("cuda", "warp")])
def test_a_missing_package_is_named(monkeypatch, device, extra):
    """Fails with an ImportError's traceback, and with the wrong extra."""
    missing = "mujoco" if extra == "mujoco" else "mujoco_warp"

    def find_spec(name):
        return None if name == missing else types.SimpleNamespace()

    monkeypatch.setattr("importlib.util.find_spec", find_spec)
    with pytest.raises(Refusal, match=rf'needs {missing}: pip install -e "\.\[{extra}\]"'):
        make_batched_env("Hopper-v5", 2, device)


def test_eval_only_plays_the_saved_policy(tmp_path, capsys):
    """Fails with the frames' flags not taken from the checkpoint."""
    train(tmp_path, env_id=MASKED, frame_stack=3, eval_episodes=2)
    summary = json.loads((tmp_path / "summary.json").read_text())
    args = saved_args(script.Args, load(tmp_path), eval_episodes=2, eval_only=str(tmp_path))
    script.evaluate_only(args)
    assert json.loads((tmp_path / "eval.json").read_text())["eval_returns"] == summary["eval_returns"]


MUJOCO = ["HalfCheetah-v5", "Hopper-v5"]


def gymnasiums_states(env_id, scale):
    """100 steps of Gymnasium's environment: state before, action, then what step returned."""
    env = make_env(env_id).unwrapped
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    for _ in range(100):
        before = np.concatenate([env.data.qpos, env.data.qvel])
        action = scale * rng.uniform(-1.5, 1.5, env.action_space.shape).astype(np.float32)
        yield before, action, env.step(action.clip(-1, 1))


@pytest.mark.extras
@pytest.mark.parametrize("engine", ["Threads", "Warp"])
@pytest.mark.parametrize("env_id", MUJOCO)
def test_mujocos_lanes_agree_with_gymnasium(env_id, engine):
    """Each of 100 steps from the same state, under random actions, beyond their bounds too. Fails with the
    frame skip, a weight of the reward, a limit of the healthy states or the actions' clip changed.

    From the same start alone they part within 100 steps of HalfCheetah-v5: contact makes it chaotic."""
    from common.envs import mujoco

    env = make_batched_env(env_id, 2)
    if engine == "Warp":
        env.simulate = mujoco.Warp(env)
    tolerance = 1e-5 if engine == "Threads" else 1e-2
    for before, action, (obs, reward, terminated, _, _) in gymnasiums_states(env_id, 1.0):
        env.state.copy_(torch.tensor(before).expand(2, -1))
        seen, paid, fell, _ = env.advance(torch.tensor(action).expand(2, -1))
        assert np.abs(seen[1].numpy() - obs).max() < tolerance
        assert abs(paid[1].item() - reward) < tolerance and bool(fell[1]) == terminated
    assert seen.dtype == torch.float32 and env.state.dtype == torch.float64


@pytest.mark.extras
def test_a_hopper_falls_where_gymnasiums_does():
    """From heights and angles on both sides of their limits, at speeds beyond what is observed. Fails with
    either limit moved, and with velocities observed unbounded."""
    env, reference = make_batched_env("Hopper-v5", 400), make_env("Hopper-v5").unwrapped
    rng = np.random.default_rng(0)
    low = np.array([0, 0.6, -0.3, -0.1, -0.1, -0.1, -1, -1, -1, -20, -20, -20])
    high = np.array([0, 0.8, 0.3, 0.1, 0.1, 0.1, 1, 1, 1, 20, 20, 20])
    states = rng.uniform(low, high, (400, 12))
    env.state.copy_(torch.tensor(states))
    seen, _, fell, _ = env.advance(torch.zeros(400, 3))
    flags = []
    for lane, state in enumerate(states):
        reference.reset(seed=0)
        reference.set_state(state[:6], state[6:])
        obs, _, terminated, _, _ = reference.step(np.zeros(3, np.float32))
        flags.append(terminated)
        assert np.abs(seen[lane].numpy() - obs).max() < 1e-3
    assert fell.tolist() == flags and 100 < sum(flags) < 350 and seen.abs().max() == 10


@pytest.mark.extras
@pytest.mark.parametrize("env_id", MUJOCO)
def test_mujocos_episodes_begin_as_gymnasiums(env_id):
    """Fails with the noise of positions or velocities scaled otherwise."""
    env, reference = make_batched_env(env_id, 2000), make_env(env_id).unwrapped
    env.reset(torch.rand(2000, env.reset_noise_dim, generator=torch.Generator().manual_seed(0)))
    theirs = []
    for seed in range(500):
        reference.reset(seed=seed)
        theirs.append(np.concatenate([reference.data.qpos, reference.data.qvel]))
    ours, theirs = env.state.numpy(), np.array(theirs)
    spread = theirs.std(0)
    assert (np.abs(ours.mean(0) - theirs.mean(0)) < 0.2 * spread).all()
    np.testing.assert_allclose(ours.std(0), spread, rtol=0.12)
    if env_id == "Hopper-v5":
        assert np.abs(ours - theirs.mean(0)).max() < 5.5e-3


@pytest.mark.extras
@pytest.mark.parametrize("env_id", MUJOCO)
def test_mujoco_trains_and_resumes_to_the_same_bytes(monkeypatch, tmp_path, env_id):
    """Fails with a state kept outside of the environment's, and with lanes that depend on the threads."""
    test_a_cut_run_ends_in_the_same_bytes(monkeypatch, tmp_path, {"env_id": env_id, "norm_obs": True})
    state = load(tmp_path / "cut")["state"]["env"]["state"]
    assert state.dtype == torch.float64 and torch.isfinite(state).all()
