"""An environment that is seen: images stay uint8, their channels come first, and the last few are stacked."""

from __future__ import annotations

import contextlib

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box
from gymnasium.wrappers import FrameStackObservation, TransformObservation

from common.cli import Refusal, check
from common.envs.flat import FlatEnv, native


class ImageEnv(FlatEnv):
    """A Gymnasium environment with uint8[channels, height, width] observations. `image_shape` is that shape;
    their numbers go from 0 to `brightest`.

    Where the channels stand is read from the space: at the end, (H, W, C), or in front, (C, H, W), whichever
    axis is shorter; (H, W) is one channel. The last `frame_stack` frames are stacked along the channels, the
    oldest first; before an episode's first frame stands that frame again. Raises Refusal by name for
    observations that are no images of uint8 or bool.

    `lives` is what info["lives"] says, None where it says nothing; `life_lost`, whether the last step cost
    one.
    """

    def __init__(
        self, env: gym.Env, seed: int = 0, index: int = 0, stream: str = "env", frame_stack: int = 1
    ) -> None:
        self.frame_shape = env.observation_space.shape
        if frame_stack > 1:
            # Copied, since the stack keeps what it is given, and some environments write into one array again
            # and again.
            env = TransformObservation(env, native, env.observation_space)
            env = FrameStackObservation(env, frame_stack)
        super().__init__(env, seed, index, stream)
        shape, channels = self.frame_shape, self.channels_at
        height, width = (size for axis, size in enumerate(shape) if axis != channels)
        self.image_shape = (frame_stack * (1 if channels is None else shape[channels]), height, width)
        self.brightest = float(env.observation_space.high.max())
        self.lives, self.life_lost = None, False

    def _check_observation(self, space: gym.Space, where: str) -> None:
        shape = self.frame_shape or ()
        image = isinstance(space, Box) and space.dtype in (np.uint8, bool) and len(shape) in (2, 3)
        kind = f"{space.dtype}{list(shape)}" if isinstance(space, Box) else type(space).__name__
        check(
            image,
            f"--env-id {self.name} observes {kind}, and this script takes images of uint8 or bool, [H, W], "
            "[H, W, C] or [C, H, W]: the scripts at the top take vectors",
        )
        self.channels_at = None if len(shape) == 2 else 2 if shape[2] < shape[0] else 0
        check(
            self.channels_at is None or shape[0] != shape[2],
            f"--env-id {self.name} observes images of {list(shape)}, where the first axis or the last can be "
            "the channels: wrap the environment so that these are fewer than rows and columns",
        )

    def _observe(self, obs) -> None:
        self.raw_obs = native(obs)
        if self.raw_obs.dtype.char not in "B?":  # uint8, bool; check() would make its sentence every time
            raise Refusal(
                f"--env-id {self.name} returned an image of {self.raw_obs.dtype}, and its space says "
                f"{self.observation_space.dtype}: they must agree"
            )
        frames = self.raw_obs.reshape(-1, *self.frame_shape)  # with or without an axis for the stack
        if self.channels_at == 2:
            frames = frames.transpose(0, 3, 1, 2)
        self.obs = np.array(frames, dtype=np.uint8, order="C").reshape(self.image_shape)

    def _begin(self, seed: int) -> tuple[np.ndarray, dict]:
        obs, info = super()._begin(seed)
        self.lives = info.get("lives")
        return obs, info

    def step(self, action) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, reward, terminated, truncated, info = super().step(action)
        lives = info.get("lives")
        self.life_lost = None not in (lives, self.lives) and lives < self.lives
        self.lives = lives
        return obs, reward, terminated, truncated, info

    def render(self) -> np.ndarray:
        """What the environment draws; where it draws nothing that can be shown, the last frame, enlarged,
        each channel a grey of its own."""
        with contextlib.suppress(Exception):  # MinAtar's needs a package for plotting, and returns floats
            image = super().render()
            if image.dtype == np.uint8:
                return image
        channels, height, _ = self.image_shape
        channels //= len(self.raw_obs) if self.raw_obs.ndim > len(self.frame_shape) else 1
        greys = np.linspace(255 / channels, 255, channels)[:, None, None] / self.brightest
        frame = (self.obs[-channels:] * greys).max(0).astype(np.uint8)
        scale = max(1, 200 // height)
        return np.repeat(frame.repeat(scale, 0).repeat(scale, 1)[:, :, None], 3, 2)
