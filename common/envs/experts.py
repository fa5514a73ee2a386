"""Policies written by hand, to learn from: EXPERTS[env_id] takes an observation and returns an action."""

import math

import numpy as np

from common.envs.cartpole import scripted_balancer


def pendulum_swing_up(obs: np.ndarray) -> np.ndarray:
    """Swing Pendulum-v1 up by its energy, then hold it: about -140 an episode.

    Far from upright the torque goes with the motion while there is less energy than at rest upright, and
    against it where there is more (Astrom and Furuta 2000, "Swinging up a pendulum by energy control"); close
    to it the torque is that of a spring and a damper. Takes cosine, sine and angular velocity, float (3,);
    returns a torque, float32 (1,) in [-2, 2].
    """
    cosine, sine, velocity = obs.tolist()
    angle = math.atan2(sine, cosine)
    energy = 0.5 * velocity**2 + 15 * (cosine - 1)  # with 3 g / (2 l) = 15; 0 at rest upright
    torque = -energy * math.copysign(1.0, velocity) if abs(angle) > 0.6 else -12 * angle - 3 * velocity
    return np.array([min(max(torque, -2.0), 2.0)], dtype=np.float32)


def discrete_balancer(obs: np.ndarray) -> np.int64:
    """`scripted_balancer` for CartPole-v1: 1, to the right, where its push is positive, and 0."""
    return np.int64(scripted_balancer(obs)[0] > 0)


EXPERTS = {
    "Pendulum-v1": pendulum_swing_up,
    "CartPoleContinuous-v0": scripted_balancer,
    "CartPole-v1": discrete_balancer,
}
