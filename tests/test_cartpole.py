"""The continuous cart-pole against Gymnasium's CartPole-v1, and the two scores that frame a policy on it."""

import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.utils.env_checker import check_env

from common.envs.cartpole import REFERENCE_RETURNS, CartPoleContinuous, scripted_balancer

LEFT, RIGHT = np.array([-1.0], np.float32), np.array([1.0], np.float32)


def play(env, policy, seed):
    """One episode: return, terminated and truncated of its last step."""
    obs, _ = env.reset(seed=seed)
    episodic_return, terminated, truncated = 0.0, False, False
    while not (terminated or truncated):
        obs, reward, terminated, truncated, _ = env.step(policy(obs))
        episodic_return += reward
    return episodic_return, terminated, truncated


def test_gymnasium_accepts_the_environment():
    """Seen to fail when step returned float64 observations, and when the reset ignored its seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*Box observation space.*infinity.*")  # CartPole-v1's velocities
        check_env(gym.make("CartPoleContinuous-v0", render_mode="rgb_array").unwrapped)


def test_spaces_are_those_of_cartpole_but_for_the_action():
    """Seen to fail with an observation space bounded at the limits (2.4 m) instead of at twice them."""
    env = CartPoleContinuous()
    assert env.observation_space == CartPoleEnv().observation_space
    assert env.action_space == gym.spaces.Box(-1.0, 1.0, (1,), np.float32)


@pytest.mark.parametrize("options", [None, {"low": -0.2, "high": 0.1}])
def test_first_observations_are_those_of_cartpole(options):
    """Seen to fail with a reset that drew from [-0.06, 0.06], and with one that dropped the options."""
    env, reference = gym.make("CartPoleContinuous-v0"), gym.make("CartPole-v1")
    for seed in range(20):
        obs, _ = env.reset(seed=seed, options=options)
        expected, _ = reference.reset(seed=seed, options=options)
        assert obs.dtype == np.float32 and np.array_equal(obs, expected)


def test_full_force_follows_cartpole_bit_for_bit():
    """From states all over the space, since little turns near the start.
    Seen to fail with push written as a sum of two quotients (equal but for rounding), with the position
    advanced by the new velocity, and with the pole's whole length for its half."""
    env, reference = CartPoleContinuous(), CartPoleEnv()
    rng = np.random.default_rng(0)
    for seed in range(200):
        env.reset(seed=seed)
        reference.reset(seed=seed)
        env.state = reference.state = rng.uniform(-1.0, 1.0, 4) * [2.0, 3.0, 0.2, 3.0]
        terminated = False
        while not terminated:
            right = int(rng.random() < 0.5)
            obs, reward, terminated, truncated, _ = env.step(RIGHT if right else LEFT)
            expected = reference.step(right)
            assert env.state.tobytes() == np.asarray(reference.state, np.float64).tobytes()
            assert np.array_equal(obs, expected[0])
            assert (reward, terminated, truncated) == expected[1:4]


def test_force_is_proportional_and_clipped():
    """Seen to fail without the clip, with the sign of the action as the force, and with a clip written as
    max(-1.0, ...), which turns a NaN into a push where the caller should get to see it."""

    def velocity_after(action):
        env = CartPoleContinuous()
        env.reset(seed=3)
        env.step(np.array([action], np.float32))
        return env.state[1]

    none, half, full = velocity_after(0.0), velocity_after(0.5), velocity_after(1.0)
    assert full > none
    assert half == pytest.approx((none + full) / 2, abs=1e-12)
    assert velocity_after(7.0) == full
    assert velocity_after(-7.0) == velocity_after(-1.0)
    assert math.isnan(velocity_after(math.nan))


@pytest.mark.parametrize("component, limit", [(0, 2.4), (2, 12 * 2 * math.pi / 360)])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_terminates_just_beyond_each_limit(component, limit, sign):
    """Seen to fail with >= for >, with 12 degrees rounded to 0.2095, and without abs(). The velocities are 0,
    so that the step leaves position and angle where they are."""
    for value, expected in ((limit, False), (math.nextafter(limit, math.inf), True)):
        env, reference = CartPoleContinuous(), CartPoleEnv()
        env.reset(seed=0)
        reference.reset(seed=0)
        env.state, reference.state = np.zeros(4), np.zeros(4)
        env.state[component] = reference.state[component] = sign * value
        terminated = env.step(RIGHT)[2]
        assert terminated is expected
        assert terminated == reference.step(1)[2]


def test_same_seed_same_episode():
    """Seen to fail with 1e-9 of unseeded noise on the force."""

    def states(seed):
        env = CartPoleContinuous()
        env.reset(seed=seed)
        actions = np.random.default_rng(5).uniform(-1, 1, (50, 1)).astype(np.float32)
        return b"".join((env.step(action), env.state.tobytes())[1] for action in actions)

    assert states(1) == states(1)
    assert states(1) != states(2)


def test_the_registered_time_limit_truncates_at_500():
    """Seen to fail with max_episode_steps=499 in the registration, and with a class that truncates itself."""
    env, bare = gym.make("CartPoleContinuous-v0"), CartPoleContinuous()
    obs, _ = env.reset(seed=0)
    bare.reset(seed=0)
    for step in range(1, 501):
        action = scripted_balancer(obs)
        obs, _, terminated, truncated, _ = env.step(action)
        assert (terminated, truncated) == (False, step == 500)
        assert bare.step(action)[2:4] == (False, False)


def test_render_shows_the_cart_where_it_is():
    """Seen to fail when step kept the state to itself, so that the cart was drawn where the reset left it.
    The frame is 600 pixels for 4.8 m; cart and track are black, the pole is not."""
    env = gym.make("CartPoleContinuous-v0", render_mode="rgb_array")
    env.reset(seed=0)
    env.unwrapped.state = np.array([1.0, 10.0, 0.1, 0.0])
    env.step(RIGHT)
    frame = env.render()
    assert frame.shape == (400, 600, 3) and frame.dtype == np.uint8
    assert (frame == 255).all(axis=2).mean() > 0.9
    cart_columns = np.flatnonzero((frame == 0).all(axis=2).sum(axis=0) > 10)
    assert cart_columns.mean() == pytest.approx(300 + 1.2 * 600 / 4.8, abs=2)
    pole_columns = np.flatnonzero((frame[:280] != 255).any(axis=2).any(axis=0))
    assert pole_columns.mean() > cart_columns.mean() + 5, "an angle of 0.1 leans to the right"
    env.close()


@pytest.mark.parametrize("env_id", ["CartPoleContinuous-v0", "CartPole-v1"])
def test_reference_returns_are_what_the_policies_score(env_id):
    """Seen to fail with each random score swapped for the other's, and with the gain on theta_dot at 0. The
    random mean of 500 episodes has a standard error of 0.6 at most."""
    env = gym.make(env_id)
    env.action_space.seed(1)
    random_returns = [play(env, lambda obs: env.action_space.sample(), seed)[0] for seed in range(500)]
    assert np.mean(random_returns) == pytest.approx(REFERENCE_RETURNS[env_id]["random"], abs=2.0)

    def scripted(obs):
        action = scripted_balancer(obs)
        return action if env_id == "CartPoleContinuous-v0" else int(action[0] > 0)

    for seed in range(20):
        assert play(env, scripted, seed) == (REFERENCE_RETURNS[env_id]["scripted"], False, True)


def test_balancer_gives_an_action_of_the_space():
    """Seen to fail without the clip, and with a float64 action."""
    space = CartPoleContinuous().action_space
    for theta in (-0.2, 0.01, 0.2):
        assert space.contains(scripted_balancer(np.array([2.0 * theta, 0.0, theta, 5.0 * theta], np.float32)))
