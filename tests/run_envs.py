"""An environment that can be awkward in every way a run must bear, and small runs on it."""

import dataclasses
import json

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from common.cli import NOT_TRAINING
from tests.conftest import tiny_args

ACTIONS = {
    "box": spaces.Box(-1.0, 1.0, (1,), np.float64),
    "discrete": spaces.Discrete(3, start=-1),
    "integers": spaces.Box(-2, 2, (2, 1), np.int64),
    "unbounded": spaces.Box(-np.inf, np.inf, (1,), np.float32),
    "half bounded": spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, np.inf]), dtype=np.float64),
    "multibinary": spaces.MultiBinary([2, 3]),
    "multidiscrete": spaces.MultiDiscrete([2, 3]),
    "dict": spaces.Dict({"push": spaces.Box(-1.0, 1.0, (1,))}),
}
VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float64)
OBSERVATIONS = {
    "vector": VECTOR,
    "matrix": spaces.Box(-1000, 1000, (3, 1), np.int16),
    "cell": spaces.Discrete(2001, start=-1000),
    "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
    "dict": spaces.Dict({"position": VECTOR}),
    "tuple": spaces.Tuple((VECTOR, VECTOR)),
    "multibinary": spaces.MultiBinary(3),
    "text": spaces.Text(3),
}


class Walk(gym.Env):
    """A noisy walk on a line: the task is over beyond +-`edge`, the clock runs out after `steps` steps (0:
    never), and a step after the end is an error.

    With `remembers` it keeps a count across resets, which no seed brings back: the count moves the start,
    and from the second episode on the clock runs out after two steps. At step `nan_at` of an episode the
    observation is not a number. With `fails` it cannot be made, for that reason. Of three choices it forbids
    one, to those who look.
    """

    def __init__(
        self, actions="box", observes="vector", steps=7, edge=1.0, remembers=False, nan_at=0, fails=""
    ):
        if fails:
            raise RuntimeError(fails)
        self.action_space, self.observation_space = ACTIONS[actions], OBSERVATIONS[observes]
        self.observes, self.steps, self.edge, self.nan_at = observes, steps, edge, nan_at
        self.remembers, self.resets, self.masks = remembers, 0, isinstance(self.action_space, spaces.Discrete)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets += 1
        self.position, self.time, self.ended = self.np_random.normal(0, 0.1), 0, False
        if self.remembers:
            self.position += 0.01 * self.resets
        return self.observation(), self.info()

    def info(self):
        return {"action_mask": np.arange(3) != self.time % 3} if self.masks else {}

    def observation(self):
        if self.observes in ("matrix", "cell"):
            grid = int(np.clip(self.position * 100, -1000, 1000))
            return np.array([[grid], [self.time], [1]], np.int16) if self.observes == "matrix" else grid
        position = np.nan if self.nan_at and self.time == self.nan_at else self.position
        return np.array([position, self.time / 10, self.np_random.normal()])

    def step(self, action):
        if self.ended:
            raise RuntimeError("this episode is over")
        assert self.action_space.contains(action) or np.isnan(action).any(), action
        self.position += 0.1 * float(np.sum(action)) + 0.1 * self.np_random.normal()
        self.time += 1
        clock = 2 if self.remembers and self.resets > 1 else self.steps
        terminated, truncated = abs(self.position) > self.edge, self.time == clock
        self.ended = terminated or truncated
        return self.observation(), 1.0 - self.position**2, bool(terminated), bool(truncated), self.info()


for name in ("Walk-v0", "Stroll-v0"):  # twice the same, so that two runs can differ in the name alone
    if name not in gym.registry:
        gym.register(name, entry_point="tests.run_envs:Walk")


def fields(script):
    return [field.name for field in dataclasses.fields(script.Args)]


def actions_of(script):
    """The kind of action `script` is about, or None where it steps no Gymnasium environment."""
    if "env_kwargs" not in fields(script):
        return None
    space = script.make_env(script.Args().env_id).action_space
    return "discrete" if isinstance(space, spaces.Discrete) else "box"


def walk(script, **kwargs):
    """The settings that put `script` on the walk."""
    if actions_of(script) is None:
        return {}
    kwargs = {"actions": actions_of(script), **kwargs}
    return {"env_id": "tests.run_envs:Walk-v0", "env_kwargs": json.dumps(kwargs)}


SMALL = {"num_steps": 16, "total_timesteps": 6 * 2 * 16, "hidden_dim": 8, "num_minibatches": 2,
         "update_epochs": 2, "learning_rate": 0.05, "eval_episodes": 1, "threads": 1,
         "log_every": 1}  # fmt: skip


def small(script, out, **changes):
    """Args of six iterations of 2 x 16 steps on the walk: a tenth of a second, in which episodes end both
    ways and the ratio leaves the clip range. Of `changes`, what the script has no flag for is left out."""
    settings = {**SMALL, **walk(script), **changes}
    return tiny_args(script, out, **{k: v for k, v in settings.items() if k in fields(script)})


def training_changes(script):
    """For every flag that shapes training: a value that works and is not that of `small`."""
    base = small(script, None)
    other = {
        "seed": 1, "env_id": "tests.run_envs:Stroll-v0",
        "env_kwargs": walk(script, steps=5).get("env_kwargs"),
        "total_timesteps": 8 * 2 * 16, "num_envs": 4, "num_steps": 32, "learning_rate": 0.01, "gamma": 0.9,
        "gae_lambda": 0.5, "num_minibatches": 4, "update_epochs": 3, "clip_coef": 0.01, "ent_coef": 0.1,
        "vf_coef": 1.0, "max_grad_norm": 0.01, "target_kl": 1e-6, "hidden_dim": 4, "log_std_init": -1.0,
        "optimizer": {"adam": "rmsprop", "rmsprop": "adam"}.get(getattr(base, "optimizer", None)),
        "device": "cpu:0",
    }  # fmt: skip
    shaping = [name for name in fields(script) if name not in NOT_TRAINING]
    flips = {name: not getattr(base, name) for name in shaping if isinstance(getattr(base, name), bool)}
    return {name: {**other, **flips}[name] for name in shaping}
