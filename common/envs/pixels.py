"""Environments that show images and need no package. Importing `common.envs` registers them as `Catch-v0` and
`CartPolePixels-v0`."""

import math
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from common.envs.cartpole import X_LIMIT, CartPoleContinuous

SCREEN = (40, 60)  # rows and columns in which the cart-pole is drawn


class Catch(gym.Env):
    """A ball falls, one row a step; be under it (Mnih et al. 2014, arXiv:1406.6247, section 4.2).

    Observation: uint8 (rows, columns), 255 where the ball is and where the paddle is, in the last row.
    Actions: 0 left, 1 stay, 2 right, by one column. Reward: 1 where the ball is caught, -1 where not, at the
    last of `rows` - 1 steps, which terminates. Both start in a random column.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, rows: int = 10, columns: int = 5, render_mode: str | None = None) -> None:
        if rows < 2 or columns < 1:
            raise ValueError(f"rows is {rows} and columns {columns}: 2 or more, and 1 or more")
        self.rows, self.columns, self.render_mode = rows, columns, render_mode
        self.observation_space = spaces.Box(0, 255, (rows, columns), np.uint8)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.row, (self.ball, self.paddle) = 0, self.np_random.integers(self.columns, size=2).tolist()
        return self._image(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.row += 1
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.columns - 1)
        landed = self.row == self.rows - 1
        reward = (1.0 if self.ball == self.paddle else -1.0) if landed else 0.0
        return self._image(), reward, landed, False, {}

    def render(self) -> np.ndarray:
        """uint8 (20 rows, 20 columns, 3)."""
        return np.repeat(self._image().repeat(20, 0).repeat(20, 1)[:, :, None], 3, 2)

    def _image(self) -> np.ndarray:
        image = np.zeros((self.rows, self.columns), np.uint8)
        image[self.row, self.ball] = image[-1, self.paddle] = 255
        return image


class CartPolePixels(CartPoleContinuous):
    """CartPole-v1 seen as a picture of 40 x 60 pixels: where cart and pole are, and not where they go.

    Observation: uint8 (40, 60): the cart 8 pixels wide, where 12 are a metre, the pole 33 pixels high and 3
    wide; edges are soft, so that less than a pixel of movement shows. Action: 0 pushes left, 1 right, with
    10 N. Reward: 1 a step. Terminated beyond 2.4 m or 12 degrees; `gymnasium.make` truncates after 500 steps.
    """

    COLUMNS, HEIGHTS = np.arange(SCREEN[1]), np.arange(33, 0, -1)[:, None]  # of pixels; of the pole's rows

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__(render_mode=render_mode)
        self.action_space = spaces.Discrete(2)
        self.observation_space = spaces.Box(0, 255, SCREEN, np.uint8)

    def reset(self, **kwargs) -> tuple[np.ndarray, dict[str, Any]]:
        _, info = super().reset(**kwargs)
        return self._image(), info

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        _, reward, terminated, truncated, info = super().step((2.0 * action - 1.0,))
        return self._image(), reward, terminated, truncated, info

    def _image(self) -> np.ndarray:
        x, _, theta, _ = self.state.tolist()
        centre = (SCREEN[1] - 1) / 2 * (1 + x / (X_LIMIT + 0.1))
        pole = centre + math.sin(theta) * self.HEIGHTS
        image = np.zeros(SCREEN, np.uint8)
        image[:33] = 255 * np.clip(2 - np.abs(self.COLUMNS - pole), 0, 1)
        image[33:38] = 255 * np.clip(4.5 - np.abs(self.COLUMNS - centre), 0, 1)
        return image
