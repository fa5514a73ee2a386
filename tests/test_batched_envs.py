"""The tensor environments: lane by lane against the Gymnasium environments of the same names, and what a CUDA
graph asks of them, checked without one."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils import seeding
from torch.utils._python_dispatch import TorchDispatchMode

from common.envs.batched import (
    BATCHED_ENVS,
    BatchedCartPole,
    BatchedPendulum,
    BatchedSetPoint,
    make_batched_env,
)
from common.envs.cartpole import scripted_balancer

LANES = 8
ANGLES = {"Acrobot-v1": [0, 1], "Pendulum-v1": [0]}  # the state components that wrap
NEVER_TERMINATE = ("Pendulum-v1", "SetPoint-v0")
each_env = pytest.mark.parametrize("env_id", sorted(BATCHED_ENVS))


def uniform(env, rng):
    return torch.as_tensor(rng.random((env.num_envs, env.reset_noise_dim))).to(env.state.dtype)


def make(env_id, rng, num_envs=LANES, dtype=torch.float32):
    env = make_batched_env(env_id, num_envs, "cpu", dtype)
    env.reset(uniform(env, rng))
    return env


def random_action(env, rng):
    """Actions for all lanes; continuous ones reach half as far again as the bounds."""
    if isinstance(env.single_action_space, gym.spaces.Discrete):
        return torch.as_tensor(rng.integers(env.single_action_space.n, size=env.num_envs))
    high = 1.5 * env.single_action_space.high
    return torch.as_tensor(rng.uniform(-high, high, (env.num_envs, len(high)))).to(env.state.dtype)


def mixed_action(env, rng):
    """Random in half of the lanes. In the others, nine times in ten, a policy that gets where randomness does
    not: it balances the cart-pole up to the time limit, and pumps energy into the pendulums."""
    action = random_action(env, rng)
    if isinstance(env, BatchedCartPole):
        push = torch.as_tensor(np.array([scripted_balancer(row) for row in env.state.numpy()]))
        policy = push.to(env.state.dtype) if action.dim() == 2 else (push[:, 0] > 0).long()
    elif isinstance(env, BatchedPendulum):
        policy = 2.0 * env.state[:, 1:].sign()
    elif isinstance(env, BatchedSetPoint):
        policy = 5.0 * env.state[:, :1].sign()  # away from the target, up to the bounds
    else:
        policy = 2 * (env.state[:, 3] > 0).long()
    scripted = torch.as_tensor((np.arange(LANES) >= LANES // 2) & (rng.random(LANES) < 0.9))
    return torch.where(scripted.reshape(-1, *[1] * (action.dim() - 1)), policy, action)


def gymnasium_step(references, state, action):
    """What the Gymnasium environments make of states and actions: new states, then what step returns."""
    for lane, reference in enumerate(references):
        reference.unwrapped.state = state[lane]
    results = [reference.step(a) for reference, a in zip(references, action.numpy(), strict=True)]
    new_state = np.array([reference.unwrapped.state for reference in references], np.float64)
    return new_state, *(np.array(column) for column in list(zip(*results, strict=True))[:4])


def state_error(env_id, state, expected):
    """The largest difference of a state component, angles modulo 2 pi."""
    difference = state - expected
    angles = ANGLES.get(env_id, [])
    difference[:, angles] = (difference[:, angles] + np.pi) % (2 * np.pi) - np.pi
    return np.abs(difference).max()


def distance_to_termination(env_id, state):
    """How far each state lies from where Gymnasium's terminated flag flips."""
    if env_id == "Acrobot-v1":
        return np.abs(-np.cos(state[:, 0]) - np.cos(state[:, 1] + state[:, 0]) - 1.0)
    if env_id in NEVER_TERMINATE:
        return np.full(len(state), np.inf)
    return np.abs(np.abs(state[:, [0, 2]]) - [2.4, 12 * 2 * np.pi / 360]).min(axis=1)


@each_env
def test_spaces_and_time_limit_are_gymnasiums(env_id):
    """Seen to fail with the pendulum's observation bounded at 1 instead of 8 rad/s, with a wrong limit."""
    env, reference = make_batched_env(env_id, LANES, "cpu"), gym.make(env_id)
    assert env.single_observation_space == reference.observation_space
    assert env.single_action_space == reference.action_space
    assert env.max_episode_steps == reference.spec.max_episode_steps
    assert env.num_envs == LANES and env.device == torch.device("cpu")
    assert env.obs().shape == (LANES, env.obs_dim) and env.obs().dtype == torch.float32


@each_env
def test_a_reset_makes_of_the_same_noise_what_gymnasium_makes(env_id):
    """Seen to fail with 0.1 * noise, and with the pendulum's angle drawn from [-1, 1].
    Acrobot-v1 rounds its first state to float32."""
    reference = gym.make(env_id)
    for seed in range(10):
        expected, _ = reference.reset(seed=seed)
        env = make_batched_env(env_id, 1, "cpu", torch.float64)
        env.reset(torch.as_tensor(seeding.np_random(seed)[0].random((1, env.reset_noise_dim))))
        np.testing.assert_allclose(env.state[0].numpy(), reference.unwrapped.state, rtol=1e-7, atol=1e-12)
        np.testing.assert_allclose(env.obs()[0].numpy(), expected, atol=1e-7)


@each_env
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_every_lane_agrees_with_gymnasium(env_id, dtype):
    """Each step starts from equal states, and Gymnasium's own TimeLimit counts along. The flags must
    be equal, but for a float32 state so near the limit that rounding decides: those are counted, and rare.

    Seen to fail with the gravity, the angle's limit or a time limit changed, without either action's clip,
    with Pendulum-v1's reward taken from the new state, with Acrobot-v1's torque one too high or its term in
    omega1 missing, and with step counts that survive a reset.
    """
    rng = np.random.default_rng(0)
    env = make(env_id, rng, dtype=dtype)
    references = [gym.make(env_id, disable_env_checker=True) for _ in range(LANES)]
    for reference in references:
        reference.reset(seed=0)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    undecided, num_terminated, num_truncated = 0, 0, 0
    for _ in range(520):
        state, action = env.state.numpy().astype(np.float64), mixed_action(env, rng)
        next_obs, reward, terminated, truncated = env.advance(action)
        expected = gymnasium_step(references, state, action)
        assert state_error(env_id, env.state.numpy(), expected[0]) < tolerance
        assert np.abs(next_obs.numpy() - expected[1]).max() < 1e-5
        assert np.array_equal(truncated, expected[4])
        decided = distance_to_termination(env_id, expected[0]) > (1e-5 if dtype == torch.float32 else 0.0)
        assert np.array_equal(terminated[decided], expected[3][decided])
        assert np.abs(reward.numpy() - expected[2])[decided].max() < 1e-5
        done = terminated | truncated
        for lane in done.nonzero()[:, 0].tolist():
            references[lane].reset()
        env.reset_lanes(done, uniform(env, rng))
        undecided += np.sum(~decided)
        num_terminated += int(terminated.sum())
        num_truncated += int(truncated.sum())
    assert undecided <= 2
    assert num_truncated >= 4
    assert num_terminated >= 10 or env_id in NEVER_TERMINATE


@each_env
def test_the_whole_state_space_agrees_with_gymnasium(env_id):
    """Also where short runs do not get to: full speed, a whole turn in a step, beyond the cart-pole's limits.
    In float64, since at full speed one Runge-Kutta step magnifies the rounding of float32 up to 5e-4.

    Seen to fail with a position limit of 2.3 m, without Acrobot-v1's bound on omega2 or the pendulum's on its
    speed, and with angles left unwrapped.
    """
    high = {
        "Acrobot-v1": [np.pi, np.pi, 4 * np.pi, 9 * np.pi],
        "Pendulum-v1": [np.pi, 8.0],
        "SetPoint-v0": [10.0, 10.0, 10.0, 1.0],
    }
    rng = np.random.default_rng(0)
    env = make(env_id, rng, num_envs=1000, dtype=torch.float64)
    corner = np.array(high.get(env_id, [3.0, 5.0, 0.3, 5.0]))
    env.state.copy_(torch.as_tensor(rng.uniform(-corner, corner, env.state.shape)))
    state, action = env.state.numpy().copy(), random_action(env, rng)
    next_obs, reward, terminated, _ = env.advance(action)
    bare = type(gym.make(env_id).unwrapped)
    references = [bare() for _ in range(env.num_envs)]
    expected = gymnasium_step(references, state, action)
    assert state_error(env_id, env.state.numpy(), expected[0]) < 1e-10
    assert (env.state[:, ANGLES.get(env_id, [])].abs() <= np.pi).all()
    assert np.abs(next_obs.numpy() - expected[1]).max() < 1e-5
    assert np.abs(reward.numpy() - expected[2]).max() < 1e-10
    assert np.array_equal(terminated, expected[3])


def test_both_flags_are_set_when_an_episode_terminates_at_its_time_limit():
    """Seen to fail with truncated = (steps >= limit) & ~terminated, which Gymnasium does not do either."""
    env, reference = make("CartPole-v1", np.random.default_rng(0)), gym.make("CartPole-v1")
    reference.reset(seed=0)
    for _ in range(499):
        reference.unwrapped.state = np.zeros(4)
        reference.step(0)
    reference.unwrapped.state = np.array([3.0, 0.0, 0.0, 0.0])
    env.state.copy_(torch.tensor([3.0, 0.0, 0.0, 0.0]))
    env.episode_steps.fill_(499)
    terminated, truncated = env.advance(torch.zeros(LANES, dtype=torch.int64))[2:]
    assert reference.step(0)[2:4] == (True, True)
    assert terminated.all() and truncated.all()


@each_env
def test_only_finished_lanes_restart_each_from_its_own_noise(env_id):
    """Seen to fail with `initial_state(noise[:1])`, with a reset of all lanes as soon as one is done, with
    truncated lanes left running, with step counts that survive a reset, and with next_obs taken after it."""
    rng = np.random.default_rng(1)
    env, unreset = make(env_id, rng), make(env_id, rng)
    for _ in range(3):
        env.step(random_action(env, rng), uniform(env, rng))
    env.episode_steps[[2, 5]] = env.max_episode_steps - 1
    unreset.load_state_dict(env.state_dict())
    action, noise = random_action(env, rng), uniform(env, rng)
    results, expected = env.step(action, noise), unreset.advance(action)
    assert all(torch.equal(result, value) for result, value in zip(results, expected, strict=True))
    finished = torch.zeros(LANES, dtype=torch.bool)
    finished[[2, 5]] = True
    assert torch.equal(results[3], finished)
    assert torch.equal(env.state[finished], env.initial_state(noise)[finished])
    assert torch.equal(env.state[~finished], unreset.state[~finished])
    assert env.episode_steps.tolist() == [4, 4, 0, 4, 4, 0, 4, 4]


@each_env
def test_a_diverged_lane_restarts_and_leaves_the_others_alone(env_id):
    """Seen to fail with a reset written as arithmetic, done * new + (1 - done) * old: 0 * NaN is NaN."""
    rng = np.random.default_rng(2)
    env, healthy = make(env_id, rng), make(env_id, rng)
    healthy.load_state_dict(env.state_dict())
    env.state[1], env.state[6] = torch.nan, torch.inf
    action, noise = random_action(env, rng), uniform(env, rng)
    next_obs, expected = env.advance(action)[0], healthy.advance(action)[0]
    diverged = ~next_obs.isfinite().all(1)
    assert diverged.nonzero()[:, 0].tolist() == [1, 6]
    env.reset_lanes(diverged, noise)
    healthy.reset_lanes(diverged, noise)
    assert torch.equal(next_obs[~diverged], expected[~diverged])
    assert torch.equal(env.state, healthy.state) and torch.equal(env.episode_steps, healthy.episode_steps)


@each_env
def test_addresses_stay_and_observations_are_copies(env_id):
    """Seen to fail with `self.state = torch.where(...)`, with step counts rebound by `+ 1`, and
    with obs() and next_obs made of self.state itself, which later steps overwrite."""
    rng = np.random.default_rng(3)
    env = make(env_id, rng)
    addresses = env.state.data_ptr(), env.episode_steps.data_ptr()
    saved = env.state_dict()
    for _ in range(10):
        obs = env.obs()
        next_obs = env.step(random_action(env, rng), uniform(env, rng))[0]
        kept = obs.clone(), next_obs.clone()
        env.step(random_action(env, rng), uniform(env, rng))
        env.reset(uniform(env, rng))
        env.load_state_dict(saved)
        assert torch.equal(obs, kept[0]) and torch.equal(next_obs, kept[1])
        assert (env.state.data_ptr(), env.episode_steps.data_ptr()) == addresses


@each_env
def test_state_dict_brings_everything_back(env_id):
    """Seen to fail with step counts not restored, with a state_dict that holds the buffers themselves, and
    without the check of the shapes: copy_ broadcasts one lane's state to all."""

    def steps(env, rng):
        return [env.step(random_action(env, rng), uniform(env, rng)) for _ in range(30)]

    env = make(env_id, np.random.default_rng(4))
    steps(env, np.random.default_rng(5))
    env.episode_steps.fill_(env.max_episode_steps - 10)
    saved = env.state_dict()
    expected = steps(env, np.random.default_rng(6))
    resumed = make(env_id, np.random.default_rng(7))
    resumed.load_state_dict(saved)
    for step, expected_step in zip(steps(resumed, np.random.default_rng(6)), expected, strict=True):
        assert all(torch.equal(value, expected) for value, expected in zip(step, expected_step, strict=True))
    assert any(step[3].any() for step in expected)
    with pytest.raises(ValueError, match=r"state has shape \(1, \d\), not \(8, \d\)"):
        resumed.load_state_dict({name: value[:1] for name, value in saved.items()})


class Recorder(TorchDispatchMode):
    """The name of every operation, and the devices of the tensors it returns."""

    def __init__(self):
        super().__init__()
        self.names, self.devices = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.devices.add(value.device.type)
        return result


@each_env
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_step_can_be_captured(env_id, device):
    """No value is read, no random number drawn, no constant made on the host, no mask used as an index.
    "meta" tensors have no values to read, and a device of their own that shows what strays.

    Seen to fail with `if terminated.any()`, `self.state[done] = ...`, `torch.rand_like` for the noise, and
    `torch.tensor([-1.0, 0.0, 1.0])[action]`.
    """
    rng = np.random.default_rng(0)
    env = make_batched_env(env_id, LANES, device)
    noise, action = uniform(env, rng).to(device), random_action(env, rng).to(device)
    random_state = torch.get_rng_state()
    with Recorder() as recorder:
        env.reset(noise)
        env.obs()
        env.step(action, noise)
        env.reset_lanes(torch.zeros(LANES, dtype=torch.bool, device=device), noise)
    assert torch.equal(torch.get_rng_state(), random_state)
    reads = {"_local_scalar_dense", "nonzero", "equal", "index", "index_put_", "_index_put_impl_"}
    constants = {"lift_fresh", "scalar_tensor", "arange"}
    draws = {"rand", "randn", "rand_like", "randn_like", "randint", "uniform_", "normal_", "bernoulli"}
    assert not (reads | constants | draws) & set(recorder.names)
    assert recorder.devices == {device}
    assert len(recorder.names) > 20


def test_an_unknown_environment_is_refused_by_name():
    """Seen to fail with the KeyError of a plain lookup."""
    with pytest.raises(ValueError, match=r"^--env-id Ant-v5 has no batched form; .*CartPole-v1"):
        make_batched_env("Ant-v5", LANES, "cpu")
