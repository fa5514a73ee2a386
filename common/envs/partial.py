"""Environments that a policy without memory cannot solve: no observation says all that matters. Importing
`common.envs` registers them as `CartPoleNoVelocity-v0`, `CartPoleContinuousNoVelocity-v0`,
`PendulumNoVelocity-v0` and `RepeatFirst-v0`."""

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.pendulum import PendulumEnv

from common.envs.cartpole import CartPoleContinuous

APART = [0, 2, 1, 3]  # position and angle first, then their velocities

class CartPoleNoVelocity(CartPoleContinuous):
    """CartPole-v1 seen without its velocities. Which way the pole falls shows in two observations, not in
    one.

    Observation: float32 (2,): position (m), angle (rad). Action: 0 pushes left, 1 right, with 10 N.
    Reward: 1 a step. Terminated beyond 2.4 m or 12 degrees; `gymnasium.make` truncates after 500 steps.
    """

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.action_space = spaces.Discrete(2)
        bounds = self.observation_space
        self.observation_space = spaces.Box(bounds.low[::2], bounds.high[::2], dtype=np.float32)

    def reset(self, **kwargs) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = super().reset(**kwargs)
        return obs[::2], info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step((2.0 * action - 1.0,))
        return obs[::2], reward, terminated, truncated, info


class CartPoleContinuousNoVelocity(CartPoleContinuous):
    """CartPoleContinuous-v0 with what only a simulator knows set apart: an actor is to read the first two
    words of an observation, a critic may read all.

    Observation: float32 (4,): position (m), angle (rad), then their velocities.
    """

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        bounds = self.observation_space
        self.observation_space = spaces.Box(bounds.low[APART], bounds.high[APART], dtype=np.float32)

    def reset(self, **kwargs) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = super().reset(**kwargs)
        return obs[APART], info

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return obs[APART], reward, terminated, truncated, info


class PendulumNoVelocity(PendulumEnv):
    """Pendulum-v1 seen without its velocity: swing up a pendulum by where it is alone.

    Observation: float32 (2,): cosine and sine of the angle from upright. Action, reward and the time limit of
    200 steps are Pendulum-v1's.
    """

    def __init__(self, render_mode: str | None = None, g: float = 10.0) -> None:
        super().__init__(render_mode=render_mode, g=g)
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def _get_obs(self) -> np.ndarray:
        return super()._get_obs()[:2]


class RepeatFirst(gym.Env):
    """Name at the end what was shown at the start: a cue, -1, 0 or 1, then `length` blank observations.

    Observation: float32 (2,): (cue, 1) at the first step, (0, 0) at every later one. Actions 0, 1, 2 name -1,
    0, 1. Only the action on the last blank counts: 1 if it names the cue, and the episode, of `length` + 1
    steps, terminates. Who guesses is right every third time.
    """

    def __init__(self, length: int = 8) -> None:
        if length < 1:
            raise ValueError(f"length is {length}, and has to be 1 or more")
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self.length = length

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.cue, self.steps = int(self.np_random.integers(-1, 2)), 0
        return np.array([self.cue, 1.0], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        over = self.steps > self.length
        return np.zeros(2, np.float32), float(over and action - 1 == self.cue), over, False, {}
