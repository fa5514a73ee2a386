"""Holding a mass at a target under a force that nothing tells: `SetPoint-v0`, registered by importing
`common.envs`. The task that the integral in a PID controller is there for."""

from typing import Any, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from torch import Tensor

MASS = 1.0  # kg
TIME_STEP = 0.05  # s
FORCE_LIMIT = 5.0  # N, either way; the unknown force is at most 1 N
ERROR_MAX, INTEGRAL_MAX, VELOCITY_MAX = 10.0, 10.0, 10.0  # m, m s, m/s: all three are bounded
START_MAX = 0.1  # m
MAX_EPISODE_STEPS = 200

Value = TypeVar("Value", float, Tensor)


def set_point_step(
    error: Value, integral: Value, velocity: Value, disturbance: Value, force: Value
) -> tuple[Value, Value, Value, Value]:
    """One semi-implicit Euler step of a mass without friction, TIME_STEP seconds long.

    Takes how far the target is ahead (m), that error's integral (m s), the mass's velocity (m/s), the unknown
    force and the policy's (N): floats, or tensors of one shape. Returns the first three a step later, and the
    reward, which is minus the absolute error before the step.
    """
    velocity = velocity + TIME_STEP * (force + disturbance) / MASS
    return error - TIME_STEP * velocity, integral + TIME_STEP * error, velocity, -abs(error)


class SetPoint(gym.Env):
    """A mass of 1 kg starts up to 0.1 m from its target, at rest. A force of up to 1 N, drawn anew for every
    episode and constant in it, pushes it away.

    Observation: float32 (3,): the error (m), its integral since the start (m s), its rate (m/s), each bounded
    at 10. Action: float32 (1,), a force in N; beyond 5 N it is clipped. Reward: minus the absolute error.
    Nothing terminates; `gymnasium.make` truncates after 200 steps, 10 seconds.
    """

    def __init__(self) -> None:
        bounds = np.array((ERROR_MAX, INTEGRAL_MAX, VELOCITY_MAX), np.float32)
        self.observation_space = spaces.Box(-bounds, bounds)
        self.action_space = spaces.Box(-FORCE_LIMIT, FORCE_LIMIT, (1,), np.float32)

    def observe(self) -> np.ndarray:
        error, integral, velocity, _ = self.state
        return np.array((error, integral, -velocity), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        error, disturbance = 2.0 * self.np_random.random(2) - 1.0
        self.state = np.array((START_MAX * error, 0.0, 0.0, disturbance))
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        force = min(max(float(action[0]), -FORCE_LIMIT), FORCE_LIMIT)
        error, integral, velocity, disturbance = map(float, self.state)
        error, integral, velocity, reward = set_point_step(error, integral, velocity, disturbance, force)
        bounds = ERROR_MAX, INTEGRAL_MAX, VELOCITY_MAX
        seen = [min(max(x, -b), b) for x, b in zip((error, integral, velocity), bounds, strict=True)]
        self.state = np.array((*seen, disturbance))
        return self.observe(), reward, False, False, {}
