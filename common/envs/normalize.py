"""Running normalisation of observations and of rewards. The statistics are part of the policy: both classes
have a `state_dict`, and neither changes unless it is told to."""

from __future__ import annotations

import torch
from torch import nn

CLIP = 10.0


class RunningNorm(nn.Module):
    """(x - mean) / std per feature, clipped to +-10; before the first `update`, only the clip.

    As the first layer of a network its statistics travel in the network's own `state_dict`, and a forward
    pass, in training or in evaluation, never changes them.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("var", torch.ones(dim, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """float[..., dim] -> float[..., dim] in the dtype of x."""
        std = (self.var + 1e-8).sqrt()
        return ((x - self.mean.to(x.dtype)) / std.to(x.dtype)).clamp(-CLIP, CLIP)

    @torch.no_grad()
    def update(self, x: torch.Tensor, taken: torch.Tensor | None = None) -> None:
        """Take in a batch float[..., dim], or of it the rows where `taken`, bool[...], is set: the mean and
        variance become those of everything seen so far (Chan, Golub, LeVeque 1979, "Updating formulae and a
        pairwise algorithm", eq. 2.1)."""
        x = x.reshape(-1, self.mean.shape[0]).to(torch.float64)
        if taken is None:
            n, mean, var = x.shape[0], x.mean(0), x.var(0, unbiased=False)
        else:  # by weights, not by a mask: a CUDA graph has fixed shapes
            weight = taken.reshape(-1, 1).to(torch.float64)
            n = weight.sum().clamp(min=1)
            mean = (weight * x).sum(0) / n
            var = (weight * (x - mean) ** 2).sum(0) / n
        total = self.count + n
        delta = mean - self.mean
        squares = self.var * self.count + var * n + delta**2 * self.count * n / total
        self.mean.copy_(self.mean + delta * n / total)
        self.var.copy_(squares / total)
        self.count.copy_(total)


class RewardScaling(nn.Module):
    """Divide rewards by the spread of the discounted return, clipped to +-10; never centred, since a shift of
    the reward changes which policy is best wherever episodes differ in length.

    The return of each of `num_envs` environments runs on from rollout to rollout and restarts where an
    episode ends, at a time limit as at a fall.
    """

    def __init__(self, num_envs: int, gamma: float) -> None:
        super().__init__()
        self.gamma = gamma
        self.register_buffer("running_return", torch.zeros(num_envs, dtype=torch.float64))
        self.spread = RunningNorm(1)

    @torch.no_grad()
    def forward(self, rewards: torch.Tensor, done: torch.Tensor) -> torch.Tensor:
        """Take in a rollout, then scale it: float[num_steps, num_envs] and bool of that shape -> float."""
        returns = []
        for reward, ended in zip(rewards.to(torch.float64), done, strict=True):
            returns.append(self.gamma * self.running_return + reward)
            self.running_return.copy_(returns[-1] * ~ended)
        self.spread.update(torch.stack(returns).reshape(-1, 1))
        std = (self.spread.var + 1e-8).sqrt().to(rewards.dtype)
        return (rewards / std).clamp(-CLIP, CLIP)
