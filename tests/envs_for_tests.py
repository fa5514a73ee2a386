"""Small environments whose every step is known beforehand. Importing this registers them with Gymnasium."""

from typing import ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

from common.envs import make_env

SPACES = {
    "vector": Box(-1.0, 1.0, (3,), np.float32),
    "float64": Box(-1.0, 1.0, (3,), np.float64),
    "matrix": Box(-1.0, 1.0, (2, 3), np.float32),
    "integer": Box(-5, 5, (2,), np.int32),
    "bytes": Box(0, 255, (128,), np.uint8),  # a vector, such as Atari's memory
    "unbounded": Box(-np.inf, np.inf, (2,), np.float32),
    "uneven": Box(np.array([-2.0, 0.0], np.float32), np.array([3.0, 0.5], np.float32)),
    "discrete": Discrete(3),
    "discrete from 5": Discrete(3, start=5),
    "image": Box(0, 255, (8, 8, 3), np.uint8),
    "text": Text(3),
    "dict with image": Dict({"camera": Dict({"left": Box(0, 255, (4, 4), np.uint8)}), "speed": Discrete(2)}),
    "tuple": Tuple([Discrete(2), Discrete(3)]),
    "dict": Dict({"a": Discrete(2), "b": Box(-1.0, 1.0, (2,))}),
    "multidiscrete": MultiDiscrete([2, 3]),
    "multidiscrete from": MultiDiscrete(np.array([[2, 3], [1, 4]]), start=np.array([[-1, 2], [5, 1]])),
    "multibinary": MultiBinary([2, 3]),
}


def has_discrete_actions(script) -> bool:
    """Whether a script's policy is a categorical: then it needs `discrete` probes."""
    return isinstance(make_env(script.Args().env_id).action_space, Discrete)


class Probe(gym.Env):
    """Actions are Box(-1, 1, (1,)), or with `discrete` Discrete(2). `received` keeps every one of them."""

    def __init__(self, obs_dim: int, discrete: bool = False) -> None:
        self.observation_space = Box(-np.inf, np.inf, (obs_dim,), np.float32)
        self.action_space = Discrete(2) if discrete else Box(-1.0, 1.0, (1,), np.float32)
        self.received = []
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        self.begin()
        return self.observe(), {}

    def step(self, action):
        self.received.append(np.array(action))
        self.steps += 1
        reward, terminated, truncated = self.advance(action)
        return self.observe(), reward, terminated, truncated, {}

    def begin(self) -> None: ...

    def observe(self) -> np.ndarray:
        return np.array([1.0], np.float32)


class Scripted(Probe):
    """Episodes end as `ends` lists, over and over: ["fall", 3] after three steps, terminated; "limit":
    truncated; "both": both. Observes (episode / 8, step, mark), with a mark drawn at the reset; pays
    episode + step / 8."""

    def __init__(self, ends=(("fall", 3), ("limit", 4), ("both", 2)), discrete: bool = False) -> None:
        super().__init__(3, discrete)
        self.ends, self.episode = ends, -1

    def begin(self):
        self.episode += 1
        self.mark = self.np_random.random()

    def observe(self):
        return np.array([self.episode / 8, self.steps, self.mark], np.float32)

    def advance(self, action):
        kind, length = self.ends[self.episode % len(self.ends)]
        over = self.steps == length
        reward = self.episode + self.steps / 8
        return reward, over and kind in ("fall", "both"), over and kind in ("limit", "both")


class Broken(Probe):
    """Episodes of 8 steps; from its `at`-th step on (counted over all of them) something is no number."""

    def __init__(self, what: str, at: int, discrete: bool = False) -> None:
        super().__init__(1, discrete)
        self.what, self.at = what, at

    def observe(self):
        broken = len(self.received) >= self.at and (
            self.what == "observation" or (self.what == "first observation" and self.steps == 0)
        )
        return np.array([np.nan if broken else self.steps / 8], np.float32)

    def advance(self, action):
        reward = {"reward": np.inf, "loss": 1e30}.get(self.what, 1.0)  # 1e30 is a number, its square is none
        return (reward if len(self.received) >= self.at else 1.0), self.steps == 8, False


class Spaces(gym.Env):
    """Observes and takes whatever SPACES names; an episode is four steps."""

    def __init__(self, observation: str = "vector", action: str = "vector") -> None:
        self.observation_space, self.action_space = SPACES[observation], SPACES[action]
        self.received = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.last = self.observation_space.sample()
        return self.last, {}

    def step(self, action):
        self.received.append(action)
        self.last = self.observation_space.sample()
        return self.last, 1.0, len(self.received) % 4 == 0, False, {}


class Masked(Probe):
    """Of four actions every second is allowed, the others at the next step; a forbidden one is an error."""

    def __init__(self) -> None:
        super().__init__(1)
        self.action_space = Discrete(4)

    def allowed(self):
        return (np.arange(4) % 2 == self.steps % 2).astype(np.int8)

    def reset(self, **kwargs):
        return super().reset(**kwargs)[0], {"action_mask": self.allowed()}

    def step(self, action):
        assert self.allowed()[action], f"action {action} is forbidden"
        return *super().step(action)[:4], {"action_mask": self.allowed()}

    def advance(self, action):
        return float(action), self.steps == 5, False


class OneStep(Probe):
    """One step, reward 1: V = 1."""

    def __init__(self, discrete: bool = False) -> None:
        super().__init__(1, discrete)

    def advance(self, action):
        return 1.0, True, False


class ByObservation(Probe):
    """One step, the reward is the observation, -1 or 1: V(obs) = obs."""

    def __init__(self, discrete: bool = False) -> None:
        super().__init__(1, discrete)

    def begin(self):
        self.sign = self.np_random.choice([-1.0, 1.0])

    def observe(self):
        return np.array([self.sign], np.float32)

    def advance(self, action):
        return self.sign, True, False


class TwoStep(Probe):
    """Two steps, observed as 0 and 1, the second pays 1: V(0) = gamma, V(1) = 1."""

    def __init__(self, discrete: bool = False) -> None:
        super().__init__(1, discrete)

    def observe(self):
        return np.array([self.steps], np.float32)

    def advance(self, action):
        return float(self.steps == 2), self.steps == 2, False


class ByAction(Probe):
    """One step, pays 1 - action^2, or 1 for the discrete action 1: V of the best policy is 1."""

    def __init__(self, discrete: bool = False) -> None:
        super().__init__(1, discrete)

    def advance(self, action):
        discrete = isinstance(self.action_space, Discrete)
        return float(action) if discrete else 1 - float(action[0]) ** 2, True, False


class TimeLimited(Probe):
    """Ends by its time limit alone, after 5 steps. The reset state (1, 0) pays nothing, every later one
    (0, 1) pays 1: V(0, 1) = 1 / (1 - gamma), and V(1, 0) = gamma / (1 - gamma)."""

    def __init__(self, discrete: bool = False) -> None:
        super().__init__(2, discrete)

    def observe(self):
        return np.array([self.steps == 0, self.steps > 0], np.float32)

    def advance(self, action):
        return float(self.steps > 1), False, False


class Frames(gym.Env):
    """Shows images of 5 x 6 in which every pixel is the number of steps since the environment was made (mod
    100), written into one array again and again, or with `draw` a random picture. A life of three is lost at
    every second step; `length` steps to an episode, at which it terminates, unless a time limit ends it
    before."""

    SHAPES: ClassVar = {"HW": (5, 6), "HWC": (5, 6, 3), "CHW": (3, 5, 6), "36": (36, 37)}

    def __init__(self, layout="HW", dtype="uint8", length=7, draw=False, lives=True, brightest=255) -> None:
        shape, kind = self.SHAPES[layout], {"uint8": np.uint8, "bool": bool, "float": np.float32}[dtype]
        self.observation_space = Box(0, 1 if kind is bool else brightest, shape, kind)
        self.action_space = Discrete(2)
        self.image, self.total, self.length, self.draw = np.zeros(shape, kind), 0, length, draw
        self.has_lives = lives

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.show(), self.info()

    def step(self, action):
        self.steps += 1
        self.total += 1
        return self.show(), 1.0, self.steps == self.length, False, self.info()

    def show(self):
        if self.draw:
            return self.np_random.integers(0, 256, self.image.shape, np.uint8)
        self.image[:] = self.total % 100
        return self.image

    def info(self):
        return {"lives": 3 - self.steps // 2} if self.has_lives else {}


for cls, limit in (
    (Scripted, None), (Broken, None), (Spaces, None), (Masked, None),
    (OneStep, None), (ByObservation, None), (TwoStep, None), (ByAction, None), (TimeLimited, 5),
    (Frames, None),
):  # fmt: skip
    if f"Probe{cls.__name__}-v0" not in gym.registry:
        gym.register(id=f"Probe{cls.__name__}-v0", entry_point=cls, max_episode_steps=limit)
