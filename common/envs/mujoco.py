"""MuJoCo's Hopper-v5 and HalfCheetah-v5 as lanes, from Gymnasium's own model files: on a CPU by MuJoCo's own
threads (extra `mujoco`), on a CUDA device by MuJoCo Warp (extra `warp`).

A lane's state is qpos and qvel, and a step depends on nothing else. For that the solver starts each step
cold, not from the forces of the last one as Gymnasium's does: they come out the same to its tolerance.
"""

import os
from abc import abstractmethod
from pathlib import Path

import gymnasium.envs.mujoco
import mujoco
import mujoco.rollout
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from common.envs.batched import BatchedEnv

ASSETS = Path(gymnasium.envs.mujoco.__file__).parent / "assets"


class BatchedMujoco(BatchedEnv):
    """N lanes of one MuJoCo model. State (N, nq + nv), float64: qpos, then qvel. A subclass names the model's
    file, says how an episode begins, and scores a step.

    Observations are qpos without its first number (how far the robot has run) and qvel."""

    file: str
    frame_skip: int  # steps of the model in one of the environment
    max_episode_steps = 1000
    velocity_bound: float | None = None  # what is observed of a velocity, at most

    @abstractmethod
    def score(self, before: Tensor, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Reward (N,) and terminated, bool (N,), of a step between two states."""

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64
    ) -> None:
        self.model = mujoco.MjModel.from_xml_path(str(ASSETS / self.file))
        # As plain numbers: what is asked of the model itself torch.compile cannot see into.
        self.nq, self.nv = nq, nv = int(self.model.nq), int(self.model.nv)
        nu = self.model.nu
        self.state_dim = self.reset_noise_dim = nq + nv
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (nq - 1 + nv,), np.float64)
        low, high = self.model.actuator_ctrlrange.T.astype(np.float32)
        self.single_action_space = spaces.Box(low, high, (nu,), np.float32)
        self.seconds = self.model.opt.timestep * self.frame_skip
        super().__init__(num_envs, device, dtype)
        self.start = torch.zeros(nq + nv, dtype=dtype, device=device)
        self.start[:nq] = torch.as_tensor(self.model.qpos0)
        self.simulate = (Threads if self.device.type == "cpu" else Warp)(self)

    def dynamics(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        space = self.single_action_space
        action = action.clamp(float(space.low[0]), float(space.high[0]))  # the same bounds for every joint
        new_state = self.simulate(state, action)
        return new_state, *self.score(state, new_state, action)

    def observe(self, state: Tensor) -> Tensor:
        qpos, qvel = state.split([self.nq, self.nv], 1)
        if self.velocity_bound is not None:
            qvel = qvel.clamp(-self.velocity_bound, self.velocity_bound)
        return torch.cat([qpos[:, 1:], qvel], 1).float()

    def velocity(self, before: Tensor, state: Tensor) -> Tensor:
        """How fast the robot ran between two states: (N,), in m/s."""
        return (state[:, 0] - before[:, 0]) / self.seconds


class BatchedHopper(BatchedMujoco):
    """Hopper-v5: one leg of three joints, to hop forward without falling."""

    file = "hopper.xml"
    frame_skip = 4
    velocity_bound = 10.0

    def initial_state(self, noise: Tensor) -> Tensor:
        return self.start + 5e-3 * (2 * noise - 1)

    def score(self, before: Tensor, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        sound = (state[:, 2:].abs() < 100).all(1) & (state[:, 1] > 0.7) & (state[:, 2].abs() < 0.2)
        return self.velocity(before, state) + sound.to(state.dtype) - 1e-3 * action.square().sum(1), ~sound


class BatchedHalfCheetah(BatchedMujoco):
    """HalfCheetah-v5: two legs of three joints on a body that cannot fall, to run forward."""

    file = "half_cheetah.xml"
    frame_skip = 5

    def initial_state(self, noise: Tensor) -> Tensor:
        qpos, qvel = noise.split([self.nq, self.nv], 1)
        normal = torch.special.ndtri(qvel.clamp(1e-7, 1 - 1e-7))  # of uniform numbers
        return self.start + 0.1 * torch.cat([2 * qpos - 1, normal], 1)

    def score(self, before: Tensor, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        reward = self.velocity(before, state) - 0.1 * action.square().sum(1)
        return reward, torch.zeros_like(reward, dtype=torch.bool)


class Threads:
    """MuJoCo on all CPU cores: `mujoco.rollout`, one environment step at a time."""

    def __init__(self, env: BatchedMujoco) -> None:
        self.model, self.frame_skip = env.model, env.frame_skip
        threads = os.cpu_count() or 1
        self.data = [mujoco.MjData(env.model) for _ in range(threads)]
        self.pool = mujoco.rollout.Rollout(nthread=threads)
        self.full = np.zeros((env.num_envs, 1 + env.state_dim))  # the time, which no force depends on, first

    @torch.compiler.disable
    def __call__(self, state: Tensor, action: Tensor) -> Tensor:
        """States (N, nq + nv), `frame_skip` steps of the model after others, under actions (N, nu)."""
        self.full[:, 1:] = state.numpy()
        control, cold = action.double().numpy()[:, None], np.zeros((1, self.model.nv))
        states, _ = self.pool.rollout(
            self.model, self.data, self.full, control, nstep=self.frame_skip, initial_warmstart=cold
        )
        return torch.from_numpy(states[:, -1, 1:].copy()).to(state.dtype)


class Warp:
    """MuJoCo Warp on a CUDA device. Its arrays are seen as tensors without a copy, and its kernels run in
    torch's stream, so that a CUDA graph records them too. Its sums are in no fixed order: the same seed need
    not give the same bytes."""

    def __init__(self, env: BatchedMujoco) -> None:
        import mujoco_warp
        import warp

        warp.config.quiet = True
        self.step, self.warp, self.frame_skip = mujoco_warp.step, warp, env.frame_skip
        self.nq, self.device = env.model.nq, env.device
        with warp.ScopedDevice(str(env.device)):
            self.model = mujoco_warp.put_model(env.model)
            self.model.opt.graph_conditional = False  # a loop that the device ends cannot be recorded here
            self.data = mujoco_warp.put_data(env.model, mujoco.MjData(env.model), nworld=env.num_envs)
        names = ("qpos", "qvel", "ctrl", "qacc_warmstart")
        self.view = {name: warp.to_torch(getattr(self.data, name)) for name in names}
        self(env.start.expand(env.num_envs, -1), self.view["ctrl"])  # loads its kernels: no graph can

    @torch.compiler.disable
    def __call__(self, state: Tensor, action: Tensor) -> Tensor:
        """As `Threads.__call__`."""
        qpos, qvel = self.view["qpos"], self.view["qvel"]
        qpos.copy_(state[:, : self.nq])
        qvel.copy_(state[:, self.nq :])
        self.view["ctrl"].copy_(action)
        self.view["qacc_warmstart"].zero_()
        cuda = self.device.type == "cuda"
        stream = self.warp.stream_from_torch(torch.cuda.current_stream(self.device)) if cuda else None
        with self.warp.ScopedStream(stream):
            for _ in range(self.frame_skip):
                self.step(self.model, self.data)
        return torch.cat([qpos, qvel], 1).to(state.dtype)


MUJOCO_ENVS: dict[str, type[BatchedMujoco]] = {
    "HalfCheetah-v5": BatchedHalfCheetah,
    "Hopper-v5": BatchedHopper,
}
