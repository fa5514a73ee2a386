"""variants/ppo_memory.py: when a memory is reset, from where a chunk is replayed, and what a time limit is
worth; and the environments that need a memory."""

import copy
import json

import gymnasium as gym
import numpy as np
import pytest
import torch

import variants.ppo_memory as script
from common.cli import Refusal
from common.envs import make_env
from common.seeding import RandomStream
from tests.conftest import load, metrics, tiny_args
from tests.test_rollout import ENDS, watch
from tests.test_run import cut, resumed

NAMES = ["none", "gru", "lstm", "transformer", "mamba"]
SIZE, ROLLOUTS = 8, 3  # numbers in a state, iterations of a run
each_memory = pytest.mark.parametrize("name", NAMES)
each_that_remembers = pytest.mark.parametrize("name", NAMES[1:])


def make_memory(name):
    """A memory with random weights, large enough that what it forgets or keeps shows."""
    torch.manual_seed(0)
    memory = script.MEMORIES[name](SIZE)
    for p in memory.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return memory


def full_state(memory, lanes, steps=40):
    """A state in which nothing is empty any more."""
    xs, no_starts = torch.randn(steps, lanes, SIZE), torch.zeros(steps, lanes, dtype=torch.bool)
    with torch.no_grad():
        return memory.sequence(memory.initial(lanes), xs, no_starts)[1]


def inputs_and_starts(steps=50, lanes=6, seed=1):
    """Random inputs, and starts in the middle, at the first step and the last, and twice in a row."""
    generator = torch.Generator().manual_seed(seed)
    xs = torch.randn(steps, lanes, SIZE, generator=generator)
    starts = torch.rand(steps, lanes, generator=generator) < 0.1
    starts[0, 0] = starts[-1, 1] = starts[7, 2] = starts[8, 2] = True
    starts[:, 3] = False
    return xs, starts


# The memories themselves


@each_memory
def test_step_by_step_is_the_sequence(name):
    """Fails with: the reset after the input for before it; a tap of the convolution that reaches over a
    start; a window that is one shorter in `sequence`; a state that is not what the next step needs."""
    memory = make_memory(name)
    xs, starts = inputs_and_starts()
    state = before = full_state(memory, 6)
    outputs = []
    for x, start in zip(xs, starts, strict=True):
        output, state = memory.step(script.reset(state, start), x)
        outputs.append(output)
    ys, after = memory.sequence(before, xs, starts)
    torch.testing.assert_close(torch.stack(outputs), ys, rtol=0, atol=1e-5)
    assert len(state) == len(after) == len(memory.row_shapes)
    for one, other in zip(state, after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@each_memory
def test_a_reset_is_a_fresh_start(name):
    """Fails with a start that empties the memory after its input, and with a part of the state that a start
    leaves as it was."""
    memory = make_memory(name)
    xs, _ = inputs_and_starts()
    starts = torch.zeros(50, 6, dtype=torch.bool)
    starts[20] = True
    ys, after = memory.sequence(full_state(memory, 6), xs, starts)
    fresh, fresh_after = memory.sequence(memory.initial(6), xs[20:], torch.zeros(30, 6, dtype=torch.bool))
    torch.testing.assert_close(ys[20:], fresh, rtol=0, atol=1e-5)
    for one, other in zip(after, fresh_after, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@each_that_remembers
def test_the_past_counts_until_a_reset_and_no_gradient_crosses_one(name):
    """Fails with the reset of one part of the state left out, and with 0.999 for an exact reset."""
    memory = make_memory(name)
    for started in (False, True):
        xs, _ = inputs_and_starts()
        xs.requires_grad_()
        state = tuple(x.clone().requires_grad_() for x in full_state(memory, 6))
        starts = torch.zeros(50, 6, dtype=torch.bool)
        starts[3, :3] = started  # lanes 0, 1, 2
        ys, after = memory.sequence(state, xs, starts)
        loss = ys[3:, :3].square().sum() + sum(x[:3].square().sum() for x in after)
        loss.backward()
        reached = [xs.grad[:3, :3], *(x.grad[:3] for x in state if x.grad is not None)]
        for grad in reached:
            assert bool(grad.abs().sum() > 0) != started
        assert xs.grad[3:, :3].abs().min() > 0 or name == "transformer"


@each_that_remembers
def test_one_lane_knows_nothing_of_another(name):
    """Fails with a start that empties every lane, and with lanes and steps swapped."""
    memory = make_memory(name)
    xs, starts = inputs_and_starts()
    state = full_state(memory, 6)
    ys, _ = memory.sequence(state, xs, starts)
    for lane in range(6):
        alone, _ = memory.sequence(
            tuple(x[lane : lane + 1] for x in state), xs[:, lane : lane + 1], starts[:, lane : lane + 1]
        )
        torch.testing.assert_close(alone[:, 0], ys[:, lane], rtol=0, atol=1e-5)


@pytest.mark.parametrize("replayed", [False, True])
def test_inputs_beyond_the_window_change_nothing(replayed):
    """Fails with a window of WINDOW + 1 inputs before this one, or of WINDOW - 1, in `sequence`; in step by
    step that is the length of the state."""
    memory = make_memory("transformer")
    xs = torch.randn(50, 1, SIZE)

    def last_output(xs):
        if replayed:
            return memory.sequence(memory.initial(1), xs, torch.zeros(len(xs), 1, dtype=torch.bool))[0][-1]
        state = memory.initial(1)
        for x in xs:
            output, state = memory.step(state, x)
        return output

    right = last_output(xs)
    for distance, seen in ((0, True), (1, True), (32, True), (33, False), (40, False)):
        changed = xs.clone()
        changed[49 - distance, 0, 0] += 1.0
        assert torch.equal(last_output(changed), right) != seen, distance


def test_the_transformer_can_tell_distances_apart():
    """Fails with the bias left out: attention alone does not know the order of what it sees."""
    memory = make_memory("transformer")
    xs, no_starts = torch.randn(10, 1, SIZE), torch.zeros(10, 1, dtype=torch.bool)
    swapped = xs[[1, 0, *range(2, 10)]]
    one, other = (memory.sequence(memory.initial(1), x, no_starts)[0][-1] for x in (xs, swapped))
    assert (one - other).abs().max() > 1e-3


def test_mamba_is_its_recurrence():
    """h = exp(dt A) h + dt B u, y = C h + D u, in float64 and number by number. Fails with dt left out of B,
    with A of the wrong sign, and with the output gated before the skip."""
    memory = make_memory("mamba").double()
    xs = torch.randn(5, 1, SIZE, dtype=torch.float64)
    with torch.no_grad():
        ys, _ = memory.sequence(
            tuple(x.double() for x in memory.initial(1)), xs, torch.zeros(5, 1, dtype=torch.bool)
        )
        h, seen = np.zeros((2 * SIZE, 16)), np.zeros((3, 2 * SIZE))
        weights = {name: p.numpy() for name, p in memory.named_parameters()}

        def silu(x):
            return x / (1 + np.exp(-x))

        for t in range(5):
            u, gate = np.split(memory.project_in(memory.norm(xs[t, 0])).numpy(), 2)
            seen = np.concatenate([seen, u[None]])[-4:]
            u = silu((seen * weights["conv_weight"]).sum(0) + weights["conv_bias"])
            rank, b, c = np.split(weights["select.weight"] @ u, [memory.rank, memory.rank + 16])
            dt = np.log1p(np.exp(weights["to_dt.weight"] @ rank + weights["to_dt.bias"]))
            for i in range(2 * SIZE):
                h[i] = np.exp(-dt[i] * np.exp(weights["log_decay"][i])) * h[i] + dt[i] * b * u[i]
            y = (h @ c + weights["skip"] * u) * silu(gate)
            expected = xs[t, 0] + memory.project_out(torch.tensor(y))
            torch.testing.assert_close(ys[t, 0], expected, rtol=0, atol=1e-10)
            seen = seen[-3:]


# In a run


def args_for(out, probe=None, env_kwargs=None, **changes):
    """A tiny run with small memories, without an evaluation."""
    if probe:
        kwargs = json.dumps({"discrete": True, **(env_kwargs or {})})
        changes = {"env_id": f"Probe{probe}-v0", "env_kwargs": kwargs, **changes}
    small = {"total_timesteps": ROLLOUTS * 2 * 32, "eval_episodes": 0, "memory_size": SIZE, "bptt_length": 8}
    return tiny_args(script, out, **{**small, **changes})


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


VARIANTS = [{"memory": name} for name in NAMES] + [{"memory": "lstm", "shared_trunk": True}]
each_variant = pytest.mark.parametrize("flags", VARIANTS, ids=[*NAMES, "shared"])


def first_minibatches(monkeypatch, out, **flags):
    """The largest |ratio - 1| in the first minibatch of each iteration, and then in the last of them."""
    calls = watch(monkeypatch, script, "ppo_loss")
    args = args_for(out, "Scripted", {"ends": ENDS}, learning_rate=1e-2, **flags)
    script.train(args)
    steps = args.num_minibatches * args.update_epochs
    assert len(calls) == ROLLOUTS * steps
    ratios = [((x[0] - x[3]).exp() - 1).abs().max().item() for x, _, _ in calls]
    return ratios[::steps], ratios[steps - 1 :: steps]


@each_variant
@pytest.mark.parametrize("more", [{}, slowly({"norm_obs": True}), slowly({"recompute_advantages": True})])
def test_before_the_first_gradient_step_the_policy_is_the_old_one(monkeypatch, tmp_path, flags, more):
    """Fails with chunks replayed from zeros (--break-stale), from the states one step on or from those of
    another chunk, and with starts one step early or late in the replay alone."""
    first, last = first_minibatches(monkeypatch, tmp_path, **flags, **more)
    assert max(first) < 1e-5 and min(last) > 1e-3


@each_that_remembers
def test_a_stale_memory_shows_in_the_first_ratios(monkeypatch, tmp_path, name):
    """Fails with --break-stale without effect."""
    first, _ = first_minibatches(monkeypatch, tmp_path, memory=name, break_stale=True)
    assert min(first[1:]) > 1e-4  # the very first policy hardly looks at anything


def assert_near(one, other):
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def lane(state, i):
    return script.on_each(lambda x: x[i : i + 1], state)


@pytest.mark.parametrize(
    ("flags", "bug"),
    [({"memory": "gru"}, None), *(slowly(flags, None) for flags in VARIANTS if flags["memory"] != "gru")]
    + [({"memory": "gru"}, bug) for bug in ("break_", "break_reset", "break_memory")],
)
def test_states_and_values_are_those_of_lanes_walked_alone(monkeypatch, tmp_path, flags, bug):
    """Every lane again, one observation at a time and one lane at a time, from the state that the run began
    with. Fails with: the reset one step early or late; V(next_obs) at a time limit of the reset state, of the
    next episode's observation, or by a memory that goes on from there; a state that is not carried over to
    the next rollout; chunks that begin one step off."""
    rollouts = watch(monkeypatch, script, "collect_rollout", before=lambda agent, *_: copy.deepcopy(agent))
    gae = watch(monkeypatch, script, "compute_gae")
    updates = watch(monkeypatch, script, "update")
    args = args_for(tmp_path, "Scripted", {"ends": ENDS}, **flags, **({bug: True} if bug else {}))
    script.train(args)
    state, started, at_limit = rollouts[0][2].initial(2), [True, True], []
    for (_, (rollout, *_), agent), (given, _, _), (arguments, _, _) in zip(
        rollouts, gae, updates, strict=True
    ):
        batch = arguments[3]
        _, values, next_values, terminated, truncated, *_ = given
        limit, fall, states = rollout.truncated, rollout.terminated, []
        assert torch.equal(terminated, fall | limit if bug == "break_" else fall)
        assert torch.equal(truncated, limit)
        with torch.no_grad():
            for i in range(2):
                own, begins = lane(state, i), started[i]
                for t in range(32):
                    if begins and bug != "break_memory":
                        own = agent.initial(1)
                    if t % 8 == 0:
                        chunk = lane(batch.state, t // 8 * 2 + i)
                        if begins and bug != "break_memory":  # the replay does this reset itself
                            assert batch.starts[0, t // 8 * 2 + i]
                        else:
                            script.on_each(assert_near, chunk, own)
                    obs, next_obs = rollout.obs[t, i], rollout.next_obs[t, i]
                    value = value_of(agent, own, obs)
                    torch.testing.assert_close(values[t, i], value, rtol=0, atol=1e-5)
                    _, own = agent.step(own, obs[None], torch.zeros(1, dtype=torch.bool))
                    begins = bool(limit[t, i] or fall[t, i])
                    following = value_of(agent, own, next_obs)
                    after_reset = agent.initial(1) if begins and bug != "break_memory" else own
                    after_reset = value_of(agent, after_reset, rollout.obs[t + 1, i])
                    if limit[t, i] and not fall[t, i]:
                        at_limit.append((following - after_reset).abs().item())
                    expected = after_reset if bug == "break_reset" else following
                    if not fall[t, i]:
                        torch.testing.assert_close(next_values[t, i], expected, rtol=0, atol=1e-5)
                states.append(own)
                started[i] = begins
        state = script.on_each(lambda *rows: torch.cat(rows), *states)
    assert max(at_limit) > 1e-3  # or the two could not be told apart


def value_of(agent, state, obs):
    return agent.value(state, obs[None, None], torch.zeros(1, 1, dtype=torch.bool))[0, 0]


@each_variant
def test_chunks_in_any_order_give_the_same_loss(monkeypatch, tmp_path, flags):
    """Fails with the states left in order while the chunks are shuffled."""
    updates = watch(monkeypatch, script, "update", before=lambda agent, *_: copy.deepcopy(agent))
    args = args_for(tmp_path, "Scripted", {"ends": ENDS}, **flags)
    script.train(args)
    batch, agent = updates[-1][0][3], updates[-1][2]
    one_step = copy.copy(args)
    one_step.update_epochs = one_step.num_minibatches = 1
    losses = []
    for seed in range(3):
        own = copy.deepcopy(agent)
        flat = script.flatten_parameters(own)
        optimizer = torch.optim.SGD([flat], lr=0.0)
        losses.append(script.update(own, flat, optimizer, batch, RandomStream(seed, "minibatch"), one_step))
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-4, abs=1e-6)
    assert abs(losses[0]["approx_kl"]) < 1e-9


CUES = {4: [-1, 1, 1], 12: [0, 1, -1]}  # the first three cues of these seeds


@each_that_remembers
@pytest.mark.parametrize("bug", [None, "break_memory"])
def test_an_episode_before_leaves_nothing_behind(tmp_path, name, bug):
    """Two environments show the same cue in their second episode, another in their first. Fails with the
    reset one step late; and --break-memory fails it."""
    flags = {"env_id": "RepeatFirst-v0", "memory": name, "bptt_length": 1}
    args = args_for(tmp_path, **flags, break_memory=bug is not None)
    envs = [make_env("RepeatFirst-v0", '{"length": 3}', seed=seed) for seed in CUES]
    for env in envs:
        env.reset()
    torch.manual_seed(0)
    agent = script.Agent(envs[0], args)
    rollout, _, starts, states = script.collect_rollout(
        agent, envs, torch.zeros(10, 2, 3), agent.initial(2), args
    )
    assert rollout.obs[[0, 4, 8], :, 0].T.tolist() == list(CUES.values())
    assert starts.nonzero()[:, 0].tolist() == ([] if bug else [0, 0, 4, 4, 8, 8])
    same = [
        all(torch.equal(*part) for memory in states[t] for part in memory) for t in range(1, 11)
    ]  # of the two lanes, after step t - 1
    assert same[4:8] == [bug is None] * 4
    assert not any(same[:4] + same[8:])


@each_variant
def test_cut_and_resumed_is_uninterrupted(tmp_path, flags):
    """Fails with the memory not in the checkpoint."""
    args = args_for(tmp_path / "whole", **flags, checkpoint_every=1)
    script.train(args)
    stopped = args_for(tmp_path / "cut", **flags, checkpoint_every=1)
    cut(script, stopped, at=2)
    kept = load(tmp_path / "cut")["state"]["memory"]["value"]
    assert len(kept) == (1 if flags.get("shared_trunk") else 2)
    assert all(x.abs().sum() > 0 for memory in kept for x in memory)
    script.train(resumed(script, tmp_path / "cut"))
    one, other = (tmp_path / folder / "checkpoint.pt" for folder in ("whole", "cut"))
    assert one.read_bytes() == other.read_bytes()


def test_eval_only_repeats_the_evaluation(tmp_path, capsys):
    """And what a run prints starts the variant as a module. Fails with the weights not loaded, and with
    `python ppo_memory.py` in its lines."""
    script.train(args_for(tmp_path, env_id="PendulumNoVelocity-v0", eval_episodes=3, learning_rate=0.01))
    assert "ablate   python -m variants.ppo_memory --seed 0" in capsys.readouterr().out
    saved = load(tmp_path)["args"]
    script.evaluate_only(script.Args(**saved, eval_episodes=3, eval_only=str(tmp_path)))
    files = [json.loads((tmp_path / name).read_text()) for name in ("summary.json", "eval.json")]
    assert files[0]["eval_returns"] == files[1]["eval_returns"] and len(files[0]["eval_returns"]) == 3


@each_that_remembers
def test_evaluation_begins_each_episode_with_an_empty_memory(monkeypatch, tmp_path, name):
    """Every first observation of this probe is the same. Fails with one state for all episodes."""
    args = args_for(tmp_path, "TimeLimited", memory=name, eval_episodes=3)
    torch.manual_seed(0)
    agent = script.Agent(make_env(args.env_id, args.env_kwargs), args)
    for p in agent.parameters():  # so that what is remembered shows: a transformer begins without
        p.data += 0.3 * torch.randn_like(p)
    outputs, best = [], agent.best
    monkeypatch.setattr(agent, "best", lambda output: outputs.append(output) or best(output))
    script.evaluate(agent, args)
    assert len(outputs) == 15 and torch.equal(outputs[0], outputs[5]) and torch.equal(outputs[0], outputs[10])
    assert not torch.equal(outputs[1], outputs[2])  # the same observation, later


def test_a_shared_trunk_has_one_memory(tmp_path):
    """Fails with the flag without effect."""
    env = make_env("CartPoleNoVelocity-v0")
    for shared_trunk, count in ((True, 1), (False, 2)):
        agent = script.Agent(env, script.Args(shared_trunk=shared_trunk))
        assert len(agent.memories) == len(agent.encoders) == len(agent.initial(3)) == count


# Brax's minibatches


@pytest.mark.parametrize("bug", [None, "break_", "break_reset"])
def test_recomputed_advantages_are_those_of_the_critic_as_it_is(monkeypatch, tmp_path, bug):
    """Each minibatch's GAE again, by the critic of that moment and cut at the chunks' ends. Fails with: the
    advantages of the rollout; a gradient through the targets; the last step bootstrapped from its own obs;
    the episode's end within a chunk bootstrapped from the next episode."""
    agents = []
    watch(monkeypatch, script, "flatten_parameters", before=agents.append)
    gae = watch(monkeypatch, script, "compute_gae", before=lambda *_: copy.deepcopy(agents[0]))
    losses = watch(monkeypatch, script, "ppo_loss")
    updates = watch(monkeypatch, script, "update")
    flags = {bug: True} if bug else {}
    args = args_for(tmp_path, "Scripted", {"ends": ENDS}, recompute_advantages=True, **flags)
    script.train(args)
    steps = args.num_minibatches * args.update_epochs
    assert len(gae) == ROLLOUTS * (1 + steps)
    order = RandomStream(args.seed, "minibatch")
    for k, (arguments, _, _) in enumerate(updates):
        batch = arguments[3]
        minibatches = [c.tolist() for _ in range(args.update_epochs) for c in order.permutation(8).chunk(4)]
        own_gae, own_losses = gae[k * (steps + 1) :][1 : steps + 1], losses[k * steps :][:steps]
        for chosen, (given, (advantages, returns), agent), ((*_, used, returns_used, _), _, _) in zip(
            minibatches, own_gae, own_losses, strict=True
        ):
            rewards, values, next_values, terminated, truncated, *_ = given
            assert rewards.shape == (8, 2) and not returns.requires_grad and not advantages.requires_grad
            assert used is advantages and returns_used is returns
            with torch.no_grad():
                for c, chunk in enumerate(chosen):
                    own = lane(batch.state, chunk)
                    for t in range(8):
                        if batch.starts[t, chunk]:
                            own = agent.initial(1)
                        assert values[t, c].item() == pytest.approx(
                            value_of(agent, own, batch.obs[t, chunk]).item(), abs=1e-5
                        )
                        _, own = agent.step(own, batch.obs[t, chunk][None], torch.zeros(1, dtype=torch.bool))
                        expected = value_of(agent, own, batch.next_obs[t, chunk])
                        if bug == "break_reset" and truncated[t, c]:
                            expected = value_of(agent, agent.initial(1), batch.obs[t + 1, chunk])
                        if not batch.terminated[t, chunk]:
                            assert next_values[t, c].item() == pytest.approx(expected.item(), abs=1e-5)
            assert torch.equal(rewards, batch.reward[:, chosen])
            assert torch.equal(terminated, batch.terminated[:, chosen])


# Refusals


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bptt_length": 12}, "--bptt-length 12 does not divide --num-steps 32: 4 does"),
        ({"bptt_length": 64}, "--bptt-length 64 does not divide --num-steps 32: 32 does"),
        ({"bptt_length": 0}, "--bptt-length 0 cannot be: it takes 1 or more"),
        ({"memory_size": 0}, "--memory-size 0 cannot be: it takes 1 or more"),
        ({"num_minibatches": 3}, "--num-minibatches 3 does not divide 8 chunks of --bptt-length: 1 does"),
        ({"num_minibatches": 16}, "--num-minibatches 16 does not divide 8 chunks of --bptt-length: 8 does"),
        (
            {"memory": "transformer", "memory_size": 10},
            "--memory-size 10 cannot be split among the transformer's 4 heads: give 12",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_can(tmp_path, changes, sentence):
    """Fails with each check left out, and with a value named that is refused in its turn."""
    with pytest.raises(Refusal) as refusal:
        script.train(args_for(tmp_path / "run", **changes))
    assert str(refusal.value) == sentence
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("length", [1, 2, 32])
def test_chunks_of_any_length_that_fits(tmp_path, length):
    """Fails with a chunk of one step whose obs is not followed by the next."""
    script.train(args_for(tmp_path, bptt_length=length, num_minibatches=2, recompute_advantages=True))
    assert len(metrics(tmp_path)) == ROLLOUTS


@pytest.mark.parametrize("env_id", ["PendulumNoVelocity-v0", "CartPoleNoVelocity-v0"])
def test_either_kind_of_action(tmp_path, env_id):
    """Fails with Gumbel noise on a Gaussian, and with the Gaussian's entropy asked for a shape."""
    agent = script.train(args_for(tmp_path, env_id=env_id, ent_coef=0.01))
    assert agent.discrete == (env_id == "CartPoleNoVelocity-v0")
    assert all(np.isfinite(line["loss"]) for line in metrics(tmp_path))


# Environments


@pytest.mark.parametrize(
    ("env_id", "full_id", "kept"),
    [
        ("CartPoleNoVelocity-v0", "CartPole-v1", [0, 2]),
        ("PendulumNoVelocity-v0", "Pendulum-v1", [0, 1]),
    ],
)
def test_without_velocity_all_else_is_the_same(env_id, full_id, kept):
    """Fails with the pole's angular velocity kept for its angle, and with another time limit."""
    env, full = gym.make(env_id), gym.make(full_id)
    assert env.spec.max_episode_steps == full.spec.max_episode_steps
    assert env.action_space == full.action_space and env.observation_space.shape == (2,)
    env.action_space.seed(0)
    ended = 0
    for seed in range(3):
        obs, full_obs = env.reset(seed=seed)[0], full.reset(seed=seed)[0]
        done = False
        while not done:
            assert obs.dtype == np.float32 and np.array_equal(obs, full_obs[kept])
            assert env.observation_space.contains(obs)
            action = env.action_space.sample()
            (obs, *rest), (full_obs, *full_rest) = env.step(action), full.step(action)
            assert rest[:3] == full_rest[:3]
            done = rest[1] or rest[2]
        ended += 1
    assert ended == 3


@pytest.mark.parametrize("length", [1, 8, 32])
def test_repeat_first_pays_for_the_cue_at_the_end_alone(length):
    """Fails with `length` steps for `length` blanks, with a reward on the way, and with a cue that the blanks
    still show."""
    env = make_env("RepeatFirst-v0", json.dumps({"length": length}))
    seen, rewards = [], {True: [], False: []}
    for episode in range(60):
        obs, _ = env.reset()
        cue, marked = obs.tolist()
        assert marked == 1 and cue in (-1, 0, 1)
        seen.append(cue)
        right = episode % 2 == 0
        name = int(cue) + 1 if right else (int(cue) + 2) % 3
        for step in range(length + 1):
            action = name if step == length else 2 - int(cue + 1)
            obs, reward, terminated, truncated, _ = env.step(action)
            assert obs.tolist() == [0, 0] and not truncated
            assert terminated == (step == length) and (terminated or reward == 0)
        rewards[right].append(reward)
    assert set(rewards[True]) == {1.0} and set(rewards[False]) == {0.0}
    assert {-1, 0, 1} == set(seen)


def test_repeat_first_refuses_a_length_of_zero():
    """Fails with an episode that has no blank."""
    with pytest.raises(Refusal, match="length is 0, and has to be 1 or more"):
        make_env("RepeatFirst-v0", '{"length": 0}')
