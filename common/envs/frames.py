"""What a robot's policy is shown of an environment: frames, with actions in them, and what critics see."""

from typing import Any

import torch
from gymnasium.spaces import Box
from torch import Tensor, nn

from common.cli import check
from common.envs.batched import BatchedEnv


class Frames(nn.Module):
    """What actor and critic are shown, as one row of `obs_dim` numbers; the actor reads `actor_dim` of them.

    A frame is the actor's words of an observation and the last H executed actions, newest first, 0 before an
    episode's first: F = E + H A numbers. The row holds K frames, then the words that are privileged, K times,
    newest first in both; where an episode begins, its first frame fills every place. K, H and E are the flags
    frame_stack, action_history and actor_words. Nothing here remembers: `first` and `after` are pure.
    """

    def __init__(self, env: BatchedEnv, args: Any) -> None:
        """Raises Refusal for an environment without continuous actions or without so many words."""
        super().__init__()
        continuous = isinstance(env.single_action_space, Box)
        check(continuous, f"--env-id {args.env_id} has Discrete actions: ppo_gpu_batched.py takes them")
        named = env.actor_words if args.actor_words is None else args.actor_words
        self.words = env.obs_dim if named is None else named
        fits = 1 <= self.words <= env.obs_dim
        check(fits, f"--actor-words {self.words} cannot be: {args.env_id} has 1 to {env.obs_dim}")
        self.stack, self.history = args.frame_stack, args.action_history
        self.action_dim = env.single_action_space.shape[0]
        self.frame = self.words + self.history * self.action_dim
        self.privileged = env.obs_dim - self.words if args.privileged_critic else 0
        self.actor_dim = self.stack * self.frame
        self.obs_dim = self.actor_dim + self.stack * self.privileged
        self.keep(low=env.single_action_space.low, high=env.single_action_space.high)
        self.mirrors = env.mirror_obs is not None and env.mirror_act is not None
        if self.mirrors:
            self.spell_out_mirror(env)

    def keep(self, **values: Any) -> None:
        """Tensors that move with the module and are in no checkpoint."""
        for name, value in values.items():
            self.register_buffer(name, torch.as_tensor(value), persistent=False)

    def spell_out_mirror(self, env: BatchedEnv) -> None:
        """The environment's mirror for a whole row; none where it trades what the actor sees for what it does
        not. Raises Refusal where mirroring twice does not lead back."""
        (words, word_signs), (actions, action_signs) = env.mirror_obs, env.mirror_act
        for index, signs in (env.mirror_obs, env.mirror_act):
            back = [(index[i], sign * signs[i]) for i, sign in zip(index, signs, strict=True)]
            own = back == [(i, 1) for i in range(len(index))]
            check(own, f"the mirror {index}, {signs} of {type(env).__name__}, applied twice, is not back")
        E, F, K, A, P = self.words, self.frame, self.stack, self.action_dim, self.privileged
        self.mirrors = all((i < E) == (word < E) for i, word in enumerate(words))
        frame = [*words[:E], *(E + h * A + a for h in range(self.history) for a in actions)]
        row = [k * F + i for k in range(K) for i in frame]
        row += [K * F + k * P + i - E for k in range(K) for i in words[E : E + P]]
        signs = K * (word_signs[:E] + self.history * action_signs) + K * word_signs[E : E + P]
        self.keep(obs_index=row, obs_signs=signs, act_index=actions, act_signs=action_signs)

    def mirrored_obs(self, obs: Tensor) -> Tensor:
        """Rows (..., obs_dim), seen in the mirror."""
        return obs.index_select(-1, self.obs_index) * self.obs_signs

    def mirrored_act(self, action: Tensor) -> Tensor:
        """Actions (..., action_dim), seen in the mirror."""
        return action.index_select(-1, self.act_index) * self.act_signs

    def first(self, seen: Tensor) -> Tensor:
        """Rows (N, obs_dim) of episodes that begin with the environment's observations (N, env.obs_dim)."""
        no_action = seen.new_zeros(len(seen), self.history * self.action_dim)
        frame = torch.cat([seen[:, : self.words], no_action], 1)
        told = seen[:, self.words : self.words + self.privileged]
        return torch.cat([frame.repeat(1, self.stack), told.repeat(1, self.stack)], 1)

    def after(self, row: Tensor, seen: Tensor, past: Tensor) -> Tensor:
        """The rows that follow `row` (N, obs_dim) where the environment's observations are `seen` and the
        executed actions `past` (N, H or more, action_dim), newest first."""
        actor, told = row[:, : self.actor_dim], row[:, self.actor_dim :]
        frame = [seen[:, : self.words], past[:, : self.history].flatten(1)]
        told_now = seen[:, self.words : self.words + self.privileged]
        older = [actor[:, : self.actor_dim - self.frame], told[:, : (self.stack - 1) * self.privileged]]
        return torch.cat([*frame, older[0], told_now, older[1]], 1)
