"""Environments that users have and that every script must run: a noisy point on a line, observation (x, v,
clock), each odd in one legal way. Importing this registers them with Gymnasium."""

import random
import threading
from typing import ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

OPEN: list["Point"] = []  # the instances that were made and not closed


class Point(gym.Env):
    """The plain one: those in ALIKE must train to the same weights as this."""

    metadata: ClassVar[dict] = {"render_modes": []}

    def __init__(self, discrete=False):
        self.observation_space = Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = Discrete(2) if discrete else Box(-1.0, 1.0, (1,), np.float32)
        OPEN.append(self)

    def close(self):
        OPEN.remove(self)  # a second close is an error

    def seed_all(self, seed):
        gym.Env.reset(self, seed=seed)

    def reset(self, *, seed=None, options=None):
        self.seed_all(seed)
        self.x, self.v, self.t = float(self.np_random.normal()), 0.0, 0
        return self.obs(), {}

    def obs(self):
        return np.array([self.x, self.v, self.t / 20], np.float32)

    def step(self, action):
        push = 2.0 * action - 1.0 if isinstance(self.action_space, Discrete) else float(action[0])
        self.v += 0.1 * push
        self.x += 0.1 * self.v
        self.t += 1
        return self.obs(), -abs(self.x), abs(self.x) > 3, self.t >= 20, {}


SHARED = np.zeros(3, np.float32)


class SharedBuffer(Point):
    """All instances return one and the same array."""

    def obs(self):
        SHARED[:] = super().obs()
        return SHARED


class OtherBytes(Point):
    """The other byte order, as files of another machine hold it."""

    def obs(self):
        return super().obs().astype(">f4")


class Backwards(Point):
    """A view with a negative stride."""

    def obs(self):
        return super().obs()[::-1].copy()[::-1]


class Listed(Point):
    """A list of Python floats that float32 holds."""

    def obs(self):
        return super().obs().tolist()


class Column(Point):
    """A column where the space has a row: the same numbers in the same order."""

    def obs(self):
        return super().obs()[:, None]


class OldSeed(Point):
    """Seeds the older generators too; NumPy's takes 0 to 2**32 - 1, many simulators a signed 32-bit int."""

    def seed_all(self, seed):
        super().seed_all(seed)
        state = np.random.get_state()
        np.random.seed(seed)
        np.random.set_state(state)
        random.Random(seed)
        np.int32(seed)


class Arrays(Point):
    """Reward and flags are arrays of one element."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, np.array([reward]), np.array([terminated]), np.array([[truncated]]), info


class NumPyScalars(Point):
    """Reward and flags are NumPy's own scalars, flags as integers."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, np.float64(reward), np.int64(terminated), np.bool_(truncated), info


class KeepsItsActions(Point):
    """Writes into the action that it was given."""

    def step(self, action):
        result = super().step(action)
        if isinstance(action, np.ndarray):
            action[:] = np.nan
        return result


class NeedsClose(Point):
    """A worker thread that only close() ends: without it the process never exits."""

    def __init__(self, discrete=False):
        super().__init__(discrete)
        self.stop = threading.Event()
        self.worker = threading.Thread(target=self.stop.wait)
        self.worker.start()

    def close(self):
        super().close()
        self.stop.set()


class CloseRaises(Point):
    """Cannot be closed without an error."""

    def close(self):
        super().close()
        raise OSError("the port is gone")


class NoRenderArgument(Point):
    """Says that it renders, and takes no render_mode."""

    metadata: ClassVar[dict] = {"render_modes": ["rgb_array"], "render_fps": 30}


class NoMetadata(Point):
    """Says nothing of itself."""

    metadata: ClassVar[dict] = {}


ALIKE = (
    SharedBuffer, OtherBytes, Backwards, Listed, Column, OldSeed, Arrays, NumPyScalars, KeepsItsActions,
    NeedsClose, NoRenderArgument, NoMetadata,
)  # fmt: skip


class OneAtATime(Point):
    """Only one instance may be open (a simulator's port)."""

    def __init__(self, discrete=False):
        if OPEN:
            raise RuntimeError("port 5005 is in use")
        super().__init__(discrete)


class TwoRewards(Point):
    """A reward of two numbers, as with two objectives."""

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, np.array([reward, 0.0]), *rest


class TooFew(Point):
    """Two numbers where the space has three."""

    def obs(self):
        return super().obs()[:2]


class Raises(Point):
    """Raises in the `step`-th step of an episode, or at step 0 in reset, from the `episode`-th reset on."""

    resets = 0

    def __init__(self, discrete=False, step=0, episode=0):
        super().__init__(discrete)
        self.at_step, self.at_episode = step, episode

    def reset(self, **kwargs):
        Raises.resets += 1
        if Raises.resets > self.at_episode and not self.at_step:
            raise OSError("the simulator is gone")
        return super().reset(**kwargs)

    def step(self, action):
        if Raises.resets > self.at_episode and self.t + 1 == self.at_step:
            raise OSError("the simulator is gone")
        return super().step(action)


class StrictBounds(Point):
    """Refuses an action outside its own space, with bounds that binary fractions do not hit."""

    def __init__(self, dtype="float64", discrete=False):
        super().__init__()
        low, high = np.array([-0.1, -0.3, 0.1]), np.array([0.1, 1 / 3, 0.7])
        self.action_space = Box(low.astype(dtype), high.astype(dtype), dtype=np.dtype(dtype).type)

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        return super().step(action)


for cls in (Point, *ALIKE, OneAtATime, CloseRaises, TwoRewards, TooFew, Raises, StrictBounds):
    if f"Odd{cls.__name__}-v0" not in gym.registry:
        gym.register(id=f"Odd{cls.__name__}-v0", entry_point=cls)
