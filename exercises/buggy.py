"""Six short functions from training scripts, for exercise 7. Each has one bug, and each bug is famous.

Their docstrings say what they should do. Do not repair them here: exercise 7 asks for tests that catch them.
"""

import torch
from torch import Tensor, nn

from ppo_continuous import Rollout


def advantages(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, gae_lambda: float,
) -> Tensor:  # fmt: skip
    """Generalized advantage estimates of one environment, all (num_steps,), as in exercise 1."""
    result, following = torch.zeros_like(reward), 0.0
    for t in reversed(range(len(reward))):
        going_on = ~(terminated[t] | truncated[t])
        delta = reward[t] + gamma * next_value[t] * going_on - value[t]
        result[t] = following = delta + gamma * gae_lambda * going_on * following
    return result


def value_targets(critic: nn.Module, rollout: Rollout, gamma: float) -> Tensor:
    """One-step targets for the critic: reward plus the discounted value of where the step led, and nothing
    after a fall. critic: (..., obs_dim) -> (...). Returns (num_steps, num_envs), without gradient."""
    with torch.no_grad():
        next_value = critic(rollout.obs[1:])
    return rollout.reward + gamma * next_value * ~rollout.terminated


def policy_epoch(
    logits: nn.Parameter, optimizer: torch.optim.Optimizer,
    action: Tensor, old_log_prob: Tensor, advantage: Tensor, num_minibatches: int, clip_coef: float,
) -> None:  # fmt: skip
    """One epoch of PPO for a policy that sees no observation: softmax(logits), logits (num_actions,).

    action (int64), old_log_prob and advantage are (rows,). old_log_prob is what the policy that collected the
    actions gave to them. Each minibatch is one step of the optimizer on the clipped surrogate.
    """
    for rows in torch.randperm(len(action)).chunk(num_minibatches):
        log_prob = logits.log_softmax(-1)[action[rows]]
        ratio = (log_prob - log_prob.detach()).exp()
        clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
        loss = -torch.min(ratio * advantage[rows], clipped_ratio * advantage[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def surrogate_loss(log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor, clip_coef: float) -> Tensor:
    """The negated clipped surrogate, as in exercise 3, of advantages that are first brought to mean 0 and
    standard deviation 1 in this minibatch. All (rows,) -> ()."""
    deviation = ((advantage - advantage.mean()) ** 2).sqrt()
    advantage = deviation / (advantage.std() + 1e-8)
    ratio = (log_prob - old_log_prob).exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(ratio * advantage, clipped_ratio * advantage).mean()


def clipped_value_loss(value: Tensor, old_value: Tensor, returns: Tensor, clip_coef: float) -> Tensor:
    """Half the mean squared error of the value, which may not profit from moving further than clip_coef from
    old_value: as in the policy's clip, the more pessimistic of the two errors counts, row by row.
    All (rows,) -> ()."""
    error = (value - returns) ** 2
    clipped_value = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
    clipped_error = (clipped_value - returns) ** 2
    return 0.5 * torch.min(error, clipped_error).mean()


def critic_loss(
    critic: nn.Module, obs: Tensor, next_obs: Tensor, reward: Tensor, terminated: Tensor, gamma: float
) -> Tensor:
    """Half the mean squared error between V(obs) and its one-step target, reward plus the discounted value of
    next_obs, and nothing after a fall. The target is a constant: V(obs) moves towards it, not it towards
    V(obs). critic: (rows, obs_dim) -> (rows,); obs and next_obs: (rows, obs_dim), the rest (rows,). Returns
    ()."""
    target = reward + gamma * critic(next_obs) * ~terminated
    return 0.5 * ((critic(obs) - target) ** 2).mean()
