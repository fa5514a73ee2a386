"""Environments as tensors: N lanes of one environment, stepped together on any device.

A lane is one copy of the environment: one row of the state. `step` is a fixed sequence of tensor operations
on buffers whose addresses never change, with every random number passed in: that is what lets a CUDA graph
replay it. A new environment is one small subclass of `BatchedEnv` and one line in `BATCHED_ENVS`.
"""

import importlib
import importlib.util
import math
from abc import ABC, abstractmethod

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.cli import check
from common.envs.cartpole import FORCE_MAX, THETA_LIMIT, X_LIMIT, cartpole_step
from common.envs.setpoint import (
    ERROR_MAX,
    FORCE_LIMIT,
    INTEGRAL_MAX,
    MAX_EPISODE_STEPS,
    START_MAX,
    VELOCITY_MAX,
    set_point_step,
)


class BatchedEnv(ABC):
    """N lanes of one environment. A subclass sets the attributes and writes the three functions that follow.

    The functions are pure, and a CUDA graph may capture them: tensor operations only, no random draws, no
    `.item()`, no `if` on a tensor's value, no indexing with a mask (use `torch.where`), no
    `torch.tensor(...)`, and no writing into an argument.
    """

    single_observation_space: spaces.Box
    single_action_space: spaces.Discrete | spaces.Box
    max_episode_steps: int
    state_dim: int
    reset_noise_dim: int
    # What a subclass may declare, for scripts that ask for it. Its mirror, (index, signs): word i of a
    # mirrored observation or action is signs[i] times word index[i].
    mirror_obs: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    mirror_act: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    # How many of the observation's first words a robot would have; the others only a simulator knows.
    actor_words: int | None = None
    # For each action, the words of the observation that hold an error, its integral and its rate.
    errors: tuple[tuple[int, int, int], ...] | None = None

    @abstractmethod
    def initial_state(self, noise: Tensor) -> Tensor:
        """First states (N, state_dim) of new episodes, from noise (N, reset_noise_dim), uniform on [0, 1)."""

    @abstractmethod
    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """New states (N, state_dim), rewards (N,) and terminated flags, bool (N,), from states (N, state_dim)
        and actions: int64 (N,) where they are discrete, else float (N, action_dim), to be clipped here."""

    @abstractmethod
    def observe(self, state: Tensor) -> Tensor:
        """Observations (N, obs_dim) of states (N, state_dim)."""

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        self.obs_dim = self.single_observation_space.shape[0]
        # Written in place only, never rebound: a captured graph goes on reading and writing these addresses.
        self.state = torch.zeros(num_envs, self.state_dim, device=self.device, dtype=dtype)
        self.episode_steps = torch.zeros(num_envs, device=self.device, dtype=torch.int64)

    def reset(self, noise: Tensor) -> None:
        """Start a new episode in every lane. noise: (N, reset_noise_dim), uniform on [0, 1)."""
        self.state.copy_(self.initial_state(noise))
        self.episode_steps.zero_()

    def obs(self) -> Tensor:
        """The current observation (N, obs_dim), in memory of its own: later steps do not change it."""
        return self.observe(self.state.clone())

    def advance(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Step every lane and reset none.

        Returns next_obs (N, obs_dim), reward (N,), terminated and truncated, bool (N,). As in Gymnasium, both
        flags are set where an episode terminates on the very step of its time limit.
        """
        new_state, reward, terminated = self.dynamics(self.state, action)
        self.state.copy_(new_state)
        self.episode_steps.add_(1)
        return self.observe(new_state), reward, terminated, self.episode_steps >= self.max_episode_steps

    def reset_lanes(self, done: Tensor, noise: Tensor) -> None:
        """Start a new episode in the lanes where done, bool (N,), is set; the others stay as they are.

        noise: (N, reset_noise_dim), uniform on [0, 1); only the rows of those lanes are used.
        """
        self.state.copy_(torch.where(done.unsqueeze(1), self.initial_state(noise), self.state))
        self.episode_steps.mul_(~done)

    def step(self, action: Tensor, reset_noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`advance`, then `reset_lanes` where an episode ended; next_obs is what was seen before that
        reset."""
        next_obs, reward, terminated, truncated = self.advance(action)
        self.reset_lanes(terminated | truncated, reset_noise)
        return next_obs, reward, terminated, truncated

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of everything that changes while stepping, for a checkpoint."""
        return {"state": self.state.clone(), "episode_steps": self.episode_steps.clone()}

    def load_state_dict(self, saved: dict[str, Tensor]) -> None:
        """Go on from a `state_dict`. Raises ValueError where its shapes are not those of these lanes."""
        for name, buffer in (("state", self.state), ("episode_steps", self.episode_steps)):
            if saved[name].shape != buffer.shape:
                raise ValueError(f"{name} has shape {tuple(saved[name].shape)}, not {tuple(buffer.shape)}")
            buffer.copy_(saved[name])


def symmetric_box(*high: float) -> spaces.Box:
    """The float32 space of vectors between -high and high."""
    return spaces.Box(-np.array(high, np.float32), np.array(high, np.float32))


def wrap_angle(angle: Tensor) -> Tensor:
    """The same angle within [-pi, pi] (radians)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


class BatchedCartPole(BatchedEnv):
    """CartPole-v1 (Barto, Sutton and Anderson, 1983). State: position, velocity, angle, angular velocity."""

    single_observation_space = symmetric_box(2 * X_LIMIT, np.inf, 2 * THETA_LIMIT, np.inf)
    single_action_space: spaces.Discrete | spaces.Box = spaces.Discrete(2)
    max_episode_steps = 500
    state_dim = 4
    reset_noise_dim = 4
    mirror_obs = (0, 1, 2, 3), (-1, -1, -1, -1)

    def initial_state(self, noise: Tensor) -> Tensor:
        return 0.1 * noise - 0.05

    def force(self, action: Tensor) -> Tensor:
        """The force (N,) in newtons: action 0 pushes left, 1 right."""
        return (action * 2 - 1) * FORCE_MAX

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, x_dot, theta, theta_dot = state.unbind(1)
        x, x_dot, theta, theta_dot = cartpole_step(
            x, x_dot, theta, theta_dot, self.force(action), theta.cos(), theta.sin()
        )
        terminated = (x.abs() > X_LIMIT) | (theta.abs() > THETA_LIMIT)
        return torch.stack((x, x_dot, theta, theta_dot), 1), torch.ones_like(x), terminated

    def observe(self, state: Tensor) -> Tensor:
        return state


class BatchedCartPoleContinuous(BatchedCartPole):
    """CartPoleContinuous-v0: the cart-pole under a force of any size up to 10 N."""

    single_action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    mirror_act = (0,), (-1,)

    def force(self, action: Tensor) -> Tensor:
        return action[:, 0].clamp(-1.0, 1.0) * FORCE_MAX


class BatchedCartPoleContinuousNoVelocity(BatchedCartPoleContinuous):
    """CartPoleContinuousNoVelocity-v0: what a robot sees, position and angle, comes first in its
    observations; the velocities, which only a simulator knows, come last. Who reads it whole sees all."""

    single_observation_space = symmetric_box(2 * X_LIMIT, 2 * THETA_LIMIT, np.inf, np.inf)
    actor_words = 2

    def observe(self, state: Tensor) -> Tensor:
        x, x_dot, theta, theta_dot = state.unbind(1)
        return torch.stack((x, theta, x_dot, theta_dot), 1)


class BatchedPendulum(BatchedEnv):
    """Pendulum-v1: swing a pendulum up with a motor too weak to lift it directly (as in
    gymnasium.envs.classic_control.pendulum).

    State: angle from upright and angular velocity. Gymnasium lets the angle grow with every turn; here it is
    wrapped to [-pi, pi], since float32 is coarser further out. A rod of 1 kg and 1 m, gravity 10 m/s^2,
    torque up to 2 N m, speed up to 8 rad/s, 0.05 s a step.
    """

    single_observation_space = symmetric_box(1.0, 1.0, 8.0)
    single_action_space = spaces.Box(-2.0, 2.0, (1,), np.float32)
    max_episode_steps = 200
    state_dim = 2
    reset_noise_dim = 2
    mirror_obs = (0, 1, 2), (1, -1, -1)  # cosine, sine, angular velocity
    mirror_act = (0,), (-1,)

    def initial_state(self, noise: Tensor) -> Tensor:
        theta, theta_dot = (2.0 * noise - 1.0).unbind(1)
        return torch.stack((math.pi * theta, theta_dot), 1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        theta, theta_dot = state.unbind(1)
        torque = action[:, 0].clamp(-2.0, 2.0)
        reward = -(theta.square() + 0.1 * theta_dot.square() + 0.001 * torque.square())
        theta_dot = (theta_dot + (15.0 * theta.sin() + 3.0 * torque) * 0.05).clamp(-8.0, 8.0)
        theta = wrap_angle(theta + theta_dot * 0.05)
        return torch.stack((theta, theta_dot), 1), reward, torch.zeros_like(theta, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        theta, theta_dot = state.unbind(1)
        return torch.stack((theta.cos(), theta.sin(), theta_dot), 1)


class BatchedAcrobot(BatchedEnv):
    """Acrobot-v1: swing the free end of two hanging links above a line, with a motor in the joint between
    them (Sutton, 1996, "Generalization in reinforcement learning"; equations of Sutton and Barto's book, as
    in gymnasium.envs.classic_control.acrobot).

    State: angle of the first link from hanging, of the second from the first, and their angular velocities.
    Actions 0, 1, 2: torque -1, 0, 1 N m. One fourth-order Runge-Kutta step of 0.2 s; then angles wrap to
    [-pi, pi] and velocities are bounded.
    """

    single_observation_space = symmetric_box(1.0, 1.0, 1.0, 1.0, 4 * np.pi, 9 * np.pi)
    single_action_space = spaces.Discrete(3)
    max_episode_steps = 500
    state_dim = 4
    reset_noise_dim = 4

    def initial_state(self, noise: Tensor) -> Tensor:
        return 0.2 * noise - 0.1

    def derivative(self, state: Tensor, torque: Tensor) -> Tensor:
        """Time derivative (N, 4) of the state under a torque (N,) in N m."""
        theta1, theta2, omega1, omega2 = state.unbind(1)
        cos2, sin2 = theta2.cos(), theta2.sin()
        # Both links: mass, length and moment of inertia 1, centre of mass at 1/2; gravity 9.8.
        d1 = cos2 + 3.5
        d2 = 0.5 * cos2 + 1.25
        phi2 = 4.9 * (theta1 + theta2).sin()
        phi1 = 14.7 * theta1.sin() + phi2 - 0.5 * omega2 * (omega2 + 2.0 * omega1) * sin2
        ratio = d2 / d1
        alpha2 = (torque + ratio * phi1 - 0.5 * omega1.square() * sin2 - phi2) / (1.25 - ratio * d2)
        alpha1 = -(d2 * alpha2 + phi1) / d1
        return torch.stack((omega1, omega2, alpha1, alpha2), 1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torque = action - 1
        k1 = self.derivative(state, torque)
        k2 = self.derivative(state + 0.1 * k1, torque)
        k3 = self.derivative(state + 0.1 * k2, torque)
        k4 = self.derivative(state + 0.2 * k3, torque)
        theta1, theta2, omega1, omega2 = (state + 0.2 / 6.0 * (k1 + 2.0 * (k2 + k3) + k4)).unbind(1)
        theta1, theta2 = wrap_angle(theta1), wrap_angle(theta2)
        omega1 = omega1.clamp(-4 * math.pi, 4 * math.pi)
        omega2 = omega2.clamp(-9 * math.pi, 9 * math.pi)
        terminated = -theta1.cos() - (theta1 + theta2).cos() > 1.0
        reward = terminated.to(state.dtype) - 1.0
        return torch.stack((theta1, theta2, omega1, omega2), 1), reward, terminated

    def observe(self, state: Tensor) -> Tensor:
        theta1, theta2, omega1, omega2 = state.unbind(1)
        return torch.stack((theta1.cos(), theta1.sin(), theta2.cos(), theta2.sin(), omega1, omega2), 1)


class BatchedSetPoint(BatchedEnv):
    """SetPoint-v0: hold a mass at a target under a force that no observation tells (see
    `common.envs.setpoint`). State: error, its integral, velocity, and that force."""

    single_observation_space = symmetric_box(ERROR_MAX, INTEGRAL_MAX, VELOCITY_MAX)
    single_action_space = spaces.Box(-FORCE_LIMIT, FORCE_LIMIT, (1,), np.float32)
    max_episode_steps = MAX_EPISODE_STEPS
    state_dim = 4
    reset_noise_dim = 2
    mirror_obs = (0, 1, 2), (-1, -1, -1)
    mirror_act = (0,), (-1,)
    errors = ((0, 1, 2),)

    def initial_state(self, noise: Tensor) -> Tensor:
        error, disturbance = (2.0 * noise - 1.0).unbind(1)
        zero = torch.zeros_like(error)
        return torch.stack((START_MAX * error, zero, zero, disturbance), 1)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        error, integral, velocity, disturbance = state.unbind(1)
        force = action[:, 0].clamp(-FORCE_LIMIT, FORCE_LIMIT)
        error, integral, velocity, reward = set_point_step(error, integral, velocity, disturbance, force)
        bounded = (
            error.clamp(-ERROR_MAX, ERROR_MAX),
            integral.clamp(-INTEGRAL_MAX, INTEGRAL_MAX),
            velocity.clamp(-VELOCITY_MAX, VELOCITY_MAX),
            disturbance,
        )
        return torch.stack(bounded, 1), reward, torch.zeros_like(error, dtype=torch.bool)

    def observe(self, state: Tensor) -> Tensor:
        error, integral, velocity, _ = state.unbind(1)
        return torch.stack((error, integral, -velocity), 1)


BATCHED_ENVS: dict[str, type[BatchedEnv]] = {
    "Acrobot-v1": BatchedAcrobot,
    "CartPole-v1": BatchedCartPole,
    "CartPoleContinuous-v0": BatchedCartPoleContinuous,
    "CartPoleContinuousNoVelocity-v0": BatchedCartPoleContinuousNoVelocity,
    "Pendulum-v1": BatchedPendulum,
    "SetPoint-v0": BatchedSetPoint,
}
MUJOCO_IDS = ("HalfCheetah-v5", "Hopper-v5")  # in common/envs/mujoco.py, since they need a package more


def make_batched_env(
    env_id: str, num_envs: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> BatchedEnv:
    """`num_envs` lanes of the environment `env_id`, all zero until `reset`; MuJoCo's hold their state in
    float64 whatever `dtype` is.

    Raises Refusal (a ValueError), naming the ids that exist, for any other, and where a package is missing.
    """
    if env_id in MUJOCO_IDS:
        on_cuda = torch.device(device).type == "cuda"
        needed = ("mujoco", "mujoco_warp") if on_cuda else ("mujoco",)
        missing = [name for name in needed if importlib.util.find_spec(name) is None]
        extra = "warp" if "mujoco_warp" in missing else "mujoco"
        install = f'pip install -e ".[{extra}]"' + ", or --device cpu" * on_cuda
        check(not missing, f"--env-id {env_id} on {device} needs {' and '.join(missing)}: {install}")
        return importlib.import_module("common.envs.mujoco").MUJOCO_ENVS[env_id](num_envs, device)
    known = ", ".join((*BATCHED_ENVS, *MUJOCO_IDS))
    check(env_id in BATCHED_ENVS, f"--env-id {env_id} has no batched form; choose one of {known}")
    return BATCHED_ENVS[env_id](num_envs, device, dtype)
