"""One Gymnasium environment as the scripts step it: flat observations, a seed for every episode, and a state
that a checkpoint can hold without pickling the environment."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, flatdim, flatten

from common.cli import EnvironmentFailed, Refusal, check, one_line
from common.process import close_all
from common.seeding import episode_seed


def native(value: Any) -> np.ndarray:
    """A copy of an array or a number in the machine's own byte order and in C order."""
    array = np.array(value, order="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


class FlatEnv(gym.Wrapper):
    """A Gymnasium environment with float32[obs_dim] observations and flat actions.

    Observations that are no Box are flattened by `gymnasium.spaces.flatten`: a Discrete one becomes one-hot,
    the parts of a Dict or Tuple follow one another. Images, text and other kinds raise Refusal by name. With
    `mask`, info["action_mask"] joins the observation as its last `action_dim` numbers, 1 where an action is
    allowed. What is returned is always a copy: some environments write into one array again and again.

    A Box action arrives flat, within `low` and `high`, and is rounded where the space is an integer one, cast
    and reshaped. The indices of a Discrete, MultiDiscrete or MultiBinary action arrive counted from 0 and are
    shifted to where the space starts; `choices` has the number of options of each.

    `reset()` begins the next episode, whose seed is derived from (seed, stream, index, episode number);
    `episodic_return` and `episodic_length` belong to the episode under way. What the environment raises,
    `reset` and `step` raise as EnvironmentFailed.
    """

    def __init__(
        self, env: gym.Env, seed: int = 0, index: int = 0, stream: str = "env", mask: bool = False
    ) -> None:
        super().__init__(env)
        self.name = env.spec.id if env.spec else type(env.unwrapped).__name__
        self.index, self.mask, self.closed, self.unrendered = index, mask, False, "it was not asked to be"
        self.next_seed: Callable[[int], int] = lambda episode: episode_seed(seed, stream, index, episode)
        self._check_observation(env.observation_space, "")
        self.obs_dim = flatdim(env.observation_space)
        self.boxed = isinstance(env.observation_space, Box)
        self.composed = isinstance(env.observation_space, (Dict, Tuple))
        self.choices, self.action_shape, self.action_dtype = [], (), torch.int64
        self.convert = self._converter(env.action_space)
        # How many numbers a policy puts out, and the shape and dtype of one action as a script stores it.
        self.action_dim = sum(self.choices) or math.prod(self.action_shape)
        self.obs_dim += self.action_dim if mask else 0
        self.episode = -1

    def _check_observation(self, space: gym.Space, where: str) -> None:
        if isinstance(space, (Dict, Tuple)):
            keys = space.spaces if isinstance(space, Dict) else range(len(space.spaces))
            for key in keys:
                self._check_observation(space.spaces[key], f"{where}[{key!r}]")
            return
        image = isinstance(space, Box) and space.dtype == np.uint8 and len(space.shape) > 1
        kind = f"images (uint8{list(space.shape)})" if image else type(space).__name__
        fits = isinstance(space, (Box, Discrete, MultiBinary, MultiDiscrete)) and not image
        check(
            fits,
            f"--env-id {self.name} observes {kind}{' in ' * bool(where)}{where}, and the scripts take Box "
            "vectors, Discrete, MultiDiscrete and MultiBinary, and Dicts and Tuples of these: "
            + ("variants.ppo_pixels takes images alone" if image else "wrap it so that it gives a vector"),
        )

    def _converter(self, space: gym.Space) -> Callable:
        if isinstance(space, Discrete):
            start, self.choices = int(space.start), [int(space.n)]
            return lambda action: int(action) + start
        if isinstance(space, (MultiDiscrete, MultiBinary)):
            shape, dtype, start = space.shape, space.dtype, getattr(space, "start", np.zeros(space.shape))
            options = space.nvec if isinstance(space, MultiDiscrete) else np.full(shape, 2)
            self.choices, self.action_shape = options.reshape(-1).tolist(), (math.prod(shape),)
            return lambda action: (np.reshape(action, shape) + start).astype(dtype)
        if not isinstance(space, Box):  # left for the script to refuse: it knows which kind it needs
            return lambda action: action
        self.action_shape, self.action_dtype = (math.prod(space.shape),), torch.float32
        integers = np.issubdtype(space.dtype, np.integer)
        exact = np.float64 if integers else space.dtype  # float64 holds the integers, and their differences
        self.low, self.high = (bound.reshape(-1).astype(exact) for bound in (space.low, space.high))
        round_ = np.rint if integers else np.array  # both copy
        return lambda action: round_(action).astype(space.dtype).reshape(space.shape)

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        """Begin the next episode. `seed=` is not taken: every episode has its own."""
        self.episode += 1
        return self._begin(self.next_seed(self.episode))

    def _begin(self, seed: int) -> tuple[np.ndarray, dict]:
        self.seed, self.actions = seed, []
        self.episodic_return, self.episodic_length = 0.0, 0
        try:
            obs, info = self.env.reset(seed=seed)
            self._observe(obs)
        except Exception as error:
            raise self._failed("reset", error) from error
        self._check_return(info)
        return self.obs, info

    def step(self, action) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.actions.append(action)
        self.episodic_length += 1
        try:
            obs, reward, terminated, truncated, info = self.env.step(self.convert(action))
            self._observe(obs)
        except Exception as error:
            raise self._failed("step", error) from error
        self._check_return(info)
        reward = self._number(reward, "a reward")
        terminated, truncated = self._number(terminated, "terminated"), self._number(truncated, "truncated")
        self.episodic_return += reward
        return self.obs, reward, terminated, truncated, info

    def _failed(self, call: str, error: Exception) -> EnvironmentFailed:
        where = f"step {self.episodic_length} of " * (call == "step") + f"episode {self.episode}"
        what = f"{type(error).__name__}: {one_line(error)}"
        return EnvironmentFailed(f"environment {self.index} ({self.name}) raised in {call}, {where}: {what}")

    def _number(self, value: Any, name: str) -> Any:
        """The number that `value` is or, as an array of one element, holds."""
        if isinstance(value, (float, bool, int)):
            return value
        if isinstance(value, np.generic):
            return value.item()
        array = np.asarray(value)
        check(
            array.size == 1,
            f"--env-id {self.name} returned {name} of shape {list(array.shape)}, and the scripts take one "
            "number: wrap the environment so that it returns one",
        )
        return array.item()

    def _observe(self, obs: Any) -> None:
        flat = obs if self.boxed else flatten(self.observation_space, obs)
        self.raw_obs = native(flat if self.composed else obs)
        self.obs = np.array(flat, dtype=np.float32).reshape(-1)

    def _check_return(self, info: dict) -> None:
        if self.mask:
            mask = info.get("action_mask")
            check(
                mask is not None,
                f"--mask-actions: {self.name} gives no action_mask in its info: leave --mask-actions out",
            )
            mask = np.hstack(mask).astype(np.float32)  # of several choices: one after the other
            self.obs = np.concatenate([self.obs, mask])
            parts = np.split(mask, np.cumsum(self.choices)[:-1])
            check(all(part.any() for part in parts), f"--mask-actions: {self.name} forbids every action")
        if self.obs.size != self.obs_dim:  # not `check`, which would have the sentence made in every step
            raise Refusal(
                f"--env-id {self.name} returned {self.obs.size} numbers as an observation, where its spaces "
                f"make {self.obs_dim}: they must agree"
            )

    def close(self) -> None:
        """Close the environment, once: some raise the second time. What it raises is told in a line."""
        if not self.closed:
            self.closed = True
            close_all([super().close])

    def state_dict(self) -> dict:
        """The episode under way: its number and seed, the actions since its reset, where they led."""
        return {
            "episode": self.episode,
            "seed": self.seed,
            "actions": torch.as_tensor(np.array(self.actions)),
            "raw_obs": torch.as_tensor(self.raw_obs),
        }

    def load_state_dict(self, state: dict) -> None:
        """Reset with the saved seed and send the saved actions again. Where that does not lead to the saved
        observation, say so and begin a fresh episode."""
        self.episode = state["episode"]
        self._begin(state["seed"])
        actions = state["actions"].numpy()
        ended = False
        for action in actions:
            if not ended:
                _, _, terminated, truncated, _ = self.step(action)
                ended = terminated or truncated
        if ended or not np.array_equal(self.raw_obs, state["raw_obs"].numpy()):
            print(
                f"{self.name} did not come back to where it was when its {len(actions)} saved actions were "
                "sent again, so it starts a fresh episode: the run is valid, but not the same bytes",
                flush=True,
            )
            self.reset()
