"""The cart-pole with a continuous force: `CartPoleContinuous-v0`, registered by importing `common.envs`.

A pole stands on a cart and falls unless the cart is pushed under it (Barto, Sutton and Anderson, 1983,
"Neuronlike adaptive elements that can solve difficult learning control problems"). Physics, start,
observation and limits are those of Gymnasium's CartPole-v1; only the action differs: a force of any size up
to 10 N instead of always 10 N, left or right.
"""

import math
from typing import Any, TypeVar

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from torch import Tensor

GRAVITY = 9.8  # m/s^2
POLE_MASS = 0.1  # kg
TOTAL_MASS = POLE_MASS + 1.0  # kg, pole and cart
HALF_LENGTH = 0.5  # m, from the pivot to the pole's centre of mass
POLE_MASS_LENGTH = POLE_MASS * HALF_LENGTH  # kg m
FORCE_MAX = 10.0  # N
TIME_STEP = 0.02  # s
X_LIMIT = 2.4  # m, an episode ends beyond it
THETA_LIMIT = 12 * 2 * math.pi / 360  # rad, likewise

# Mean return over 1,000 episodes of uniformly random actions and of `scripted_balancer`: floor and ceiling.
REFERENCE_RETURNS: dict[str, dict[str, float]] = {
    "CartPoleContinuous-v0": {"random": 28.0, "scripted": 500.0},
    "CartPole-v1": {"random": 22.0, "scripted": 500.0},
}

Value = TypeVar("Value", float, Tensor)


def cartpole_step(
    x: Value, x_dot: Value, theta: Value, theta_dot: Value, force: Value, cos_theta: Value, sin_theta: Value
) -> tuple[Value, Value, Value, Value]:
    """One explicit Euler step of the frictionless cart-pole (Florian, 2007, "Correct equations for the
    dynamics of the cart-pole system", as in Gymnasium's CartPole-v1).

    Takes the cart's position (m) and velocity (m/s), the pole's angle from upright (rad, positive to the
    right) and angular velocity (rad/s), the force on the cart (N, positive to the right), and the angle's
    cosine and sine: seven floats, or seven tensors of one shape. Returns the four state components
    TIME_STEP seconds later.
    """
    # Gymnasium's order of operations: any other rounds differently, and the same actions lead apart.
    push = (force + POLE_MASS_LENGTH * (theta_dot * theta_dot) * sin_theta) / TOTAL_MASS
    theta_acc = (GRAVITY * sin_theta - cos_theta * push) / (
        HALF_LENGTH * (4.0 / 3.0 - POLE_MASS * (cos_theta * cos_theta) / TOTAL_MASS)
    )
    x_acc = push - POLE_MASS_LENGTH * theta_acc * cos_theta / TOTAL_MASS
    return (
        x + TIME_STEP * x_dot,
        x_dot + TIME_STEP * x_acc,
        theta + TIME_STEP * theta_dot,
        theta_dot + TIME_STEP * theta_acc,
    )


class CartPoleContinuous(CartPoleEnv):
    """CartPole-v1 with a continuous action; reset, rendering and closing are inherited.

    Observation: float32 (4,): position (m), velocity (m/s), angle (rad), angular velocity (rad/s).
    Action: float32 (1,) in [-1, 1], in units of 10 N; a larger one is clipped.
    Reward: 1 a step. Terminated beyond 2.4 m or 12 degrees. The time limit of 500 steps comes with
    `gymnasium.make`; an instance of the bare class never truncates.
    """

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        assert self.state is not None, "call reset() before step()"
        # Plain floats are cheaper than NumPy scalars and round the same.
        x, x_dot, theta, theta_dot = self.state.tolist()
        force = FORCE_MAX * min(max(float(action[0]), -1.0), 1.0)
        x, x_dot, theta, theta_dot = cartpole_step(
            x, x_dot, theta, theta_dot, force, math.cos(theta), math.sin(theta)
        )
        self.state = np.array((x, x_dot, theta, theta_dot))
        terminated = abs(x) > X_LIMIT or abs(theta) > THETA_LIMIT
        if self.render_mode == "human":
            self.render()
        return self.state.astype(np.float32), 1.0, terminated, False, {}


def scripted_balancer(obs: np.ndarray) -> np.ndarray:
    """A policy that never drops the pole: push the cart to the side the pole falls to, and a little further
    when the cart is off centre, which tips the pole towards the centre so that the cart can follow it there.

    Takes an observation, float (4,); returns an action for CartPoleContinuous-v0, float32 (1,) in [-1, 1].
    Its sign is a policy for CartPole-v1 (push right where it is positive), which scores 500 there as well.
    """
    x, x_dot, theta, theta_dot = obs.tolist()
    push = 0.1 * x + 0.2 * x_dot + 3.0 * theta + 0.5 * theta_dot
    return np.array([min(max(push, -1.0), 1.0)], dtype=np.float32)
