"""Exercise 6: statistics are part of the policy.

Observations come in metres, radians and newtons, small and large; networks like numbers around 1. So each one
is shifted by its mean and divided by its standard deviation, both estimated on the way. A policy trained so
understands only observations that were normalised with these very statistics. Scripts that keep them outside
the checkpoint, or let them move during evaluation, have shipped policies that nobody could reproduce.

You will learn: how to merge the statistics of a batch into those of all batches before it, why evaluation
    leaves them alone, and what a policy is worth without them.
Read first: `RunningNorm` in common/envs/normalize.py: the docstrings (`update` is one of the answers), and
    in `Agent` of ppo_continuous.py where it stands. That place is why it is never forgotten there.
Time: about 25 minutes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from common.envs import FlatEnv, make_env


def merge(mean: Tensor, var: Tensor, count: int, batch: Tensor) -> tuple[Tensor, Tensor, int]:
    """The mean, variance and count of everything seen, from those of the past and a new batch.

    mean, var: (dim,), of the `count` rows seen so far (0 at first); batch: (rows, dim), never empty. The
    variance is the plain one, the mean of the squared distances from the mean: x.var(0, unbiased=False).

    The past is gone: only mean, var and count are left of it. They are enough. With n rows in the batch,
        the rows together have the sum      count * mean + n * batch_mean
        and around their new mean the sum of squared distances
                count * var + n * batch_var + (batch_mean - mean)^2 * count * n / (count + n)
    The last term is what people leave out: two heaps far apart spread wide, however narrow each of them is.
    """
    # In place of `raise Blank`: the two sums, each divided by the new count.
    n = len(batch)
    total = count + n
    batch_mean, batch_var = batch.mean(0), batch.var(0, unbiased=False)
    squares = count * var + n * batch_var + (batch_mean - mean) ** 2 * count * n / total
    return (count * mean + n * batch_mean) / total, squares / total, total


@dataclass
class Statistics:
    """Running statistics of observations, float64: a float32 sum over millions of rows loses its last
    digits."""

    mean: Tensor
    var: Tensor
    count: int = 0

    def take_in(self, obs: Tensor) -> None:
        """Count these observations (..., dim) in."""
        batch = obs.reshape(-1, len(self.mean)).to(torch.float64)
        self.mean, self.var, self.count = merge(self.mean, self.var, self.count, batch)

    def normalise(self, obs: Tensor) -> Tensor:
        """Observations (..., dim) as the policy sees them, float32. Changes nothing."""
        return ((obs - self.mean) / (self.var + 1e-8).sqrt()).to(torch.float32)


def training_action(policy: nn.Linear, statistics: Statistics, obs: Tensor) -> Tensor:
    """What acting looks like in a script that updates its statistics at every step of training."""
    statistics.take_in(obs)
    return policy(statistics.normalise(obs))


def evaluation_action(policy: nn.Linear, statistics: Statistics, obs: Tensor) -> Tensor:
    """The same policy's action (1,) for an observation (dim,) when it is evaluated."""
    # In place of `raise Blank`, one line. What must be different here, and why?
    return policy(statistics.normalise(obs))  # no take_in: measuring must not change what it measures


def checkpoint(policy: nn.Linear, statistics: Statistics) -> dict:
    """All that is needed to play this policy again: nested dicts of tensors and numbers, for torch.save."""
    # In place of `raise Blank`, one line. The weights are policy.state_dict().
    kept = {"mean": statistics.mean, "var": statistics.var, "count": statistics.count}
    return {"policy": policy.state_dict(), "statistics": kept}


def restore(saved: dict) -> tuple[nn.Linear, Statistics]:
    """The policy and its statistics, from what `checkpoint` returned. The policy is an nn.Linear(4, 1)."""
    # In place of `raise Blank`, three lines: a fresh policy, policy.load_state_dict(...), and the return.
    policy = nn.Linear(4, 1)
    policy.load_state_dict(saved["policy"])
    return policy, Statistics(**saved["statistics"])


@torch.no_grad()
def evaluate(policy: nn.Linear, statistics: Statistics, episodes: int = 3) -> list[float]:
    """The scores of some episodes of CartPoleContinuous-v0, the same ones each time. 500 is the most."""
    env, scores = make_env("CartPoleContinuous-v0", stream="eval"), []
    for _ in range(episodes):
        obs, _ = env.reset()
        done = False
        while not done:
            action = evaluation_action(policy, statistics, torch.tensor(obs))
            obs, _, terminated, truncated, _ = env.step(action.numpy())
            done = terminated or truncated
        scores.append(env.episodic_return)
    return scores


@torch.no_grad()
def trained() -> tuple[nn.Linear, Statistics]:
    """A policy that balances the pole, and the statistics of the observations it was "trained" with: those of
    20 episodes of random actions. (Its weights are put in by hand, to spare you the wait.)"""
    env: FlatEnv = make_env("CartPoleContinuous-v0")
    statistics = Statistics(torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        episode, done = [torch.tensor(env.reset()[0])], False
        while not done:
            action = 2 * torch.rand(1, generator=generator) - 1
            obs, _, terminated, truncated, _ = env.step(action.numpy())
            episode.append(torch.tensor(obs))
            done = terminated or truncated
        statistics.take_in(torch.stack(episode))
    policy, balance = nn.Linear(4, 1), torch.tensor([0.1, 0.2, 3.0, 0.5])  # push where the pole leans
    policy.weight.copy_(balance * statistics.var.sqrt())
    policy.bias.copy_(balance @ statistics.mean.to(torch.float32))
    return policy, statistics


def lost() -> Statistics:
    """What a fresh `Statistics` holds, and so what is left where only the weights were saved."""
    return Statistics(torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))


if __name__ == "__main__":
    policy, statistics = trained()
    print("the policy with its statistics       ", evaluate(policy, statistics))
    print("saved and restored                   ", evaluate(*restore(checkpoint(policy, statistics))))
    print("the same weights, the statistics lost", evaluate(policy, lost()))


# Run:    pytest exercises/test_ex6.py
# See:    python -m exercises.ex6_normalisation     (when it passes)
# Stuck:  python -m exercises.hint 6
