"""Environments for exercise 5 whose every step is known beforehand."""

from __future__ import annotations

import torch
from torch import Tensor

from exercises.checks import check


class ScriptedEnv:
    """Episodes that end as a script says, at the step it says; the last one goes on for ever.

    An observation is [episode, step], so that every cell of a rollout tells where it comes from. The reward
    of a step is its action. `obs` is where the environment stands. As in Gymnasium, an episode that has
    ended must be reset before the next step; other than there, observations are tensors.
    """

    def __init__(self, *episodes: tuple[int, str]) -> None:
        """episodes: (length, "fall" or "time-out"), in order."""
        self.episodes = episodes
        self.episode, self.step_count, self.ended = -1, 0, True
        self.reset()

    @property
    def obs(self) -> Tensor:
        return torch.tensor([float(self.episode), float(self.step_count)])

    def reset(self) -> tuple[Tensor, dict]:
        where = f"after {self.step_count} steps of episode {self.episode}"
        check(
            self.ended,
            f"reset() was called {where}, which has not ended: it is only for the end of an episode.",
        )
        self.episode, self.step_count, self.ended = self.episode + 1, 0, False
        return self.obs, {}

    def step(self, action: Tensor) -> tuple[Tensor, float, bool, bool, dict]:
        check(
            not self.ended,
            f"step() was called on an environment whose episode {self.episode} had ended: after a fall, "
            "and after a time-out as well, reset() comes first.",
        )
        check(
            tuple(action.shape) == (1,), f"step() was given an action {list(action.shape)}, and takes a [1]."
        )
        self.step_count += 1
        length, ending = self.episodes[self.episode] if self.episode < len(self.episodes) else (None, "")
        self.ended = self.step_count == length
        terminated, truncated = self.ended and ending == "fall", self.ended and ending == "time-out"
        return self.obs, float(action), terminated, truncated, {}


class Probe:
    """A task with a known answer. A reset leads to state 0, which pays nothing and leads to state 1; state 1
    pays `reward(action)` at every step and leads to itself. There is no fall, only a time limit of 10 steps.

    Observations are [1, 0] and [0, 1]. With a constant reward r, V(state 1) is r + gamma r + gamma^2 r + ...
    = r / (1 - gamma), however short the episodes are.
    """

    def __init__(self, reward) -> None:
        self.reward = reward
        self.reset()

    def reset(self) -> tuple[Tensor, dict]:
        self.step_count, self.obs = 0, torch.tensor([1.0, 0.0])
        return self.obs, {}

    def step(self, action: Tensor) -> tuple[Tensor, float, bool, bool, dict]:
        reward = self.reward(float(action)) if self.step_count > 0 else 0.0
        self.step_count, self.obs = self.step_count + 1, torch.tensor([0.0, 1.0])
        return self.obs, reward, False, self.step_count == 10, {}
