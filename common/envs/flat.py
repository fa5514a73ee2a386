"""One Gymnasium environment as the scripts step it: flat observations, a seed for every episode, and a state
that a checkpoint can hold without pickling the environment."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from common.cli import Refusal, check, one_line
from common.seeding import derive_seed

EXAMPLE = """write it like '{"g": 9.81}'"""


class FlatEnv(gym.Wrapper):
    """A Gymnasium environment with float32[obs_dim] observations and float32[action_dim] or integer actions.

    Box observations are flattened, Discrete ones one-hot encoded; any other kind raises Refusal by name.
    A Box action arrives flat and is reshaped, rounded where the space is an integer one, and cast. A Discrete
    action arrives counted from 0 and is shifted to where the space starts.

    `reset()` begins the next episode, whose seed is derived from (seed, stream, index, episode number);
    `episodic_return` and `episodic_length` belong to the episode under way.
    """

    def __init__(self, env: gym.Env, seed: int = 0, index: int = 0, stream: str = "env") -> None:
        super().__init__(env)
        self.name = env.spec.id if env.spec else type(env.unwrapped).__name__
        self.next_seed: Callable[[int], int] = lambda episode: derive_seed(seed, stream, index, episode)
        self.flatten, self.obs_dim = self._flattener(env.observation_space)
        self.convert = self._converter(env.action_space)
        # How many numbers a policy puts out, and the shape and dtype of one action as a script stores it.
        discrete = isinstance(env.action_space, Discrete)
        self.action_dim = int(env.action_space.n if discrete else np.prod(env.action_space.shape or (1,)))
        self.action_shape = () if isinstance(env.action_space, Discrete) else (self.action_dim,)
        self.action_dtype = torch.int64 if isinstance(env.action_space, Discrete) else torch.float32
        self.episode = -1

    def _flattener(self, space: gym.Space) -> tuple[Callable, int]:
        if isinstance(space, Discrete):
            start, one_hot = int(space.start), np.eye(int(space.n), dtype=np.float32)
            return lambda obs: one_hot[int(obs) - start], int(space.n)
        if isinstance(space, Box) and not (space.dtype == np.uint8 and len(space.shape) > 1):
            return lambda obs: np.asarray(obs, dtype=np.float32).reshape(-1), int(np.prod(space.shape))
        kind = f"images (uint8{list(space.shape)})" if isinstance(space, Box) else type(space).__name__
        raise Refusal(
            f"--env-id {self.name} observes {kind}, and the scripts take Box vectors or Discrete ones: "
            "choose another environment, or wrap this one so that it gives a vector"
        )

    def _converter(self, space: gym.Space) -> Callable:
        if isinstance(space, Discrete):
            start = int(space.start)
            return lambda action: int(action) + start
        if not isinstance(space, Box):  # left for the script to refuse: it knows which kind it needs
            return lambda action: action
        if np.issubdtype(space.dtype, np.integer):
            return lambda action: np.rint(action).astype(space.dtype).reshape(space.shape)
        return lambda action: np.array(action, dtype=space.dtype).reshape(space.shape)

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        """Begin the next episode. `seed=` is not taken: every episode has its own."""
        self.episode += 1
        return self._begin(self.next_seed(self.episode))

    def _begin(self, seed: int) -> tuple[np.ndarray, dict]:
        self.seed, self.actions = seed, []
        self.episodic_return, self.episodic_length = 0.0, 0
        self.raw_obs, info = self.env.reset(seed=seed)
        self.obs = self.flatten(self.raw_obs)
        return self.obs, info

    def step(self, action) -> tuple[np.ndarray, float, bool, bool, dict]:
        action = self.convert(action)
        self.actions.append(action)
        self.raw_obs, reward, terminated, truncated, info = self.env.step(action)
        self.obs = self.flatten(self.raw_obs)
        self.episodic_return += float(reward)
        self.episodic_length += 1
        return self.obs, reward, terminated, truncated, info

    def state_dict(self) -> dict:
        """The episode under way: its number and seed, the actions sent since its reset, where they led."""
        return {
            "episode": self.episode,
            "seed": self.seed,
            "actions": torch.as_tensor(np.array(self.actions)),
            "raw_obs": torch.as_tensor(np.array(self.raw_obs)),
        }

    def load_state_dict(self, state: dict) -> None:
        """Reset with the saved seed and send the saved actions again. Where that does not lead to the saved
        observation, say so and begin a fresh episode."""
        self.episode = state["episode"]
        self._begin(state["seed"])
        actions = state["actions"].numpy()
        discrete = isinstance(self.action_space, Discrete)
        start = int(self.action_space.start) if discrete else 0
        ended = False
        for action in actions:
            if not ended:
                _, _, terminated, truncated, _ = self.step(int(action) - start if discrete else action)
                ended = terminated or truncated
        if ended or not np.array_equal(np.asarray(self.raw_obs), state["raw_obs"].numpy()):
            print(
                f"{self.name} did not come back to where it was when its {len(actions)} saved actions were "
                "sent again, so it starts a fresh episode: the run is valid, but not the same bytes",
                flush=True,
            )
            self.reset()


def make_env(
    env_id: str,
    env_kwargs: str = "{}",
    seed: int = 0,
    index: int = 0,
    stream: str = "env",
    render: bool = False,
) -> FlatEnv:
    """`gymnasium.make(env_id, **env_kwargs)` as a FlatEnv; `env_kwargs` is a JSON object.

    With `render`, it is made so that `env.render()` returns an image, where the environment offers that.
    Raises Refusal, in one sentence, for whatever keeps the environment from being made.
    """
    try:
        kwargs = json.loads(env_kwargs)
        check(isinstance(kwargs, dict), f"--env-kwargs {env_kwargs} is no JSON object: {EXAMPLE}")
    except json.JSONDecodeError as error:
        raise Refusal(f"--env-kwargs {env_kwargs} is not JSON ({error}): {EXAMPLE}") from None
    try:
        with warnings.catch_warnings():  # that there is a newer version; where it matters, make raises too
            warnings.simplefilter("ignore", DeprecationWarning)
            env = gym.make(env_id, disable_env_checker=True, **kwargs)
            if render and "rgb_array" in env.metadata.get("render_modes", []):
                env.close()
                env = gym.make(env_id, disable_env_checker=True, **{"render_mode": "rgb_array", **kwargs})
    except gym.error.DependencyNotInstalled as error:
        raise Refusal(f"--env-id {env_id} needs a package that is not installed: {one_line(error)}") from None
    except Exception as error:  # whatever the environment's own code raises
        reason = one_line(error)
        raise Refusal(f"--env-id {env_id} with --env-kwargs {env_kwargs} cannot be made: {reason}") from None
    return FlatEnv(env, seed, index, stream)
