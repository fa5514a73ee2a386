"""Exercise 5: the rollout, the update, and with them all of PPO.

Two loops are left. One steps the environments and writes down what happened; the other learns from it. Both
look harmless, and both have cost people weeks: a transition recorded across a reset, an old log-probability
that was not old.

You will learn: what exactly is written down when an episode ends, and what an epoch of minibatches is.
Read first: `Rollout` and `Batch` in ppo_continuous.py. `collect_rollout`, and `update` with `loss_gradient`,
    are the answers, with more in them. Then read `Agent` and `train` below: they are complete, and short.
Time: about 30 minutes. The last two checks train with your exercises 1, 3 and 4, so do those first.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ppo_continuous import Batch, Rollout

from .ex1_completion_gae import compute_gae
from .ex3_clipped_surrogate import policy_loss
from .ex4_log_probs import gaussian_log_prob


class Agent(nn.Module):
    """A Gaussian policy over one number, and a value. Both are linear in obs: (..., obs_dim)."""

    def __init__(self, obs_dim: int) -> None:
        super().__init__()
        self.actor = nn.Parameter(torch.zeros(obs_dim, 1))
        self.log_std = nn.Parameter(torch.zeros(1))
        self.critic = nn.Parameter(torch.zeros(obs_dim))

    def sample(self, obs: Tensor, noise: Tensor) -> Tensor:
        """An action (..., 1) for each row of obs, out of standard normal noise (..., 1)."""
        return obs @ self.actor + self.log_std.exp() * noise

    def log_prob(self, obs: Tensor, action: Tensor) -> Tensor:
        """The log-probability (...) that the policy, as it is now, gives to these actions (..., 1)."""
        return gaussian_log_prob(obs @ self.actor, self.log_std, action)

    def value(self, obs: Tensor) -> Tensor:
        """V(obs): (...)."""
        return obs @ self.critic


def collect_rollout(agent: Agent, envs: list, noise: Tensor) -> Rollout:
    """Step every environment once for each row of noise (num_steps, num_envs, 1), and write down what
    happened.

    An environment has `obs` (where it stands), `reset() -> (obs, info)` and, as in Gymnasium,
    `step(action) -> (next_obs, reward, terminated, truncated, info)`. The action of environment i at step t
    is rollout.action[t, i].
    """
    num_steps, num_envs, _ = noise.shape
    obs_dim = len(envs[0].obs)
    rollout = Rollout(
        obs=torch.zeros(num_steps + 1, num_envs, obs_dim),
        next_obs=torch.zeros(num_steps, num_envs, obs_dim),
        action=torch.zeros(num_steps, num_envs, 1),
        reward=torch.zeros(num_steps, num_envs),
        terminated=torch.zeros(num_steps, num_envs, dtype=torch.bool),
        truncated=torch.zeros(num_steps, num_envs, dtype=torch.bool),
    )
    for i, env in enumerate(envs):
        rollout.obs[0, i] = env.obs
    for t in range(num_steps):
        with torch.no_grad():
            rollout.action[t] = agent.sample(rollout.obs[t], noise[t])
        for i, env in enumerate(envs):
            # In place of `raise Blank`: step env. Write what the step returned into next_obs, reward,
            # terminated and truncated, at [t, i] of each. Then write into rollout.obs[t + 1, i] where env
            # stands now: the same observation, or, if its episode ended, the one that its reset returns.
            next_obs, reward, terminated, truncated, _ = env.step(rollout.action[t, i])
            rollout.next_obs[t, i], rollout.reward[t, i] = next_obs, reward
            rollout.terminated[t, i], rollout.truncated[t, i] = terminated, truncated
            if terminated or truncated:
                next_obs, _ = env.reset()
            rollout.obs[t + 1, i] = next_obs
    return rollout


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, batch: Batch, permutation: Callable[[int], Tensor],
    update_epochs: int, num_minibatches: int, clip_coef: float,
) -> None:  # fmt: skip
    """Pass over the rows of the batch `update_epochs` times, in minibatches, with a gradient step for each.

    Each field of `batch` has one entry a row. `batch.log_prob` is the log-probability that the policy that
    collected the rollout gave to each action. `permutation(n)` returns 0 .. n-1 in a new random order, int64.
    """
    for _ in range(update_epochs):
        # In place of `raise Blank`, one epoch: draw an order of the rows, cut it into num_minibatches pieces
        # (order.chunk), and for each piece
        # 1. pick these rows of the batch: Batch._make(x[piece] for x in batch) is a batch again;
        # 2. ask the agent, as it is now, for the log-probability of their actions and the value of their obs;
        # 3. loss = policy_loss(new log-probability, old log-probability, advantages, clip_coef)
        #           + 0.5 * mean of (value - returns)^2
        # 4. optimizer.zero_grad(), loss.backward(), optimizer.step().
        order = permutation(len(batch.returns))
        for piece in order.chunk(num_minibatches):
            minibatch = Batch._make(x[piece] for x in batch)
            log_prob = agent.log_prob(minibatch.obs, minibatch.action)
            value = agent.value(minibatch.obs)
            loss = policy_loss(log_prob, minibatch.log_prob, minibatch.advantages, clip_coef)
            loss = loss + 0.5 * ((value - minibatch.returns) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def train(envs: list, iterations: int, gamma: float = 0.9, gae_lambda: float = 0.95) -> Agent:
    """PPO. Whatever matters in it is yours: exercises 1, 3 and 4, and the two functions above."""
    generator = torch.Generator().manual_seed(0)
    agent = Agent(obs_dim=len(envs[0].obs))
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.05)
    for _ in range(iterations):
        noise = torch.randn(32, len(envs), 1, generator=generator)
        rollout = collect_rollout(agent, envs, noise)

        obs = rollout.obs[:-1]
        with torch.no_grad():
            log_prob, value, next_value = (
                agent.log_prob(obs, rollout.action), agent.value(obs), agent.value(rollout.next_obs)
            )  # fmt: skip
        advantages, returns = compute_gae(
            rollout.reward, value, next_value, rollout.terminated, rollout.truncated, gamma, gae_lambda
        )

        rows = (obs, rollout.action, log_prob, value, advantages, returns)
        batch = Batch._make(x.flatten(0, 1) for x in rows)
        shuffle = partial(torch.randperm, generator=generator)
        update(agent, optimizer, batch, shuffle, update_epochs=4, num_minibatches=4, clip_coef=0.2)
    return agent


# Run:    pytest exercises/test_ex5.py
# Stuck:  python -m exercises.hint 5
