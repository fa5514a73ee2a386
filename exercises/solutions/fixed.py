"""The six functions of exercises/buggy.py without their bugs, each written in two ways: a good test passes
on both, since it asks for what the function does and not for how."""

import torch
from torch import nn

from exercises.solutions.ex1_completion_gae import compute_gae
from exercises.solutions.ex3_clipped_surrogate import policy_loss


def advantages(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    result, following = torch.zeros_like(reward), 0.0
    for t in reversed(range(len(reward))):
        delta = reward[t] + gamma * next_value[t] * ~terminated[t] - value[t]
        result[t] = following = delta + gamma * gae_lambda * following * ~(terminated[t] | truncated[t])
    return result


def advantages_again(reward, value, next_value, terminated, truncated, gamma, gae_lambda):
    columns = (x.unsqueeze(1) for x in (reward, value, next_value, terminated, truncated))
    return compute_gae(*columns, gamma, gae_lambda)[0].squeeze(1)


def value_targets(critic, rollout, gamma):
    with torch.no_grad():
        next_value = critic(rollout.next_obs)
    return rollout.reward + gamma * next_value * ~rollout.terminated


@torch.no_grad()
def value_targets_again(critic, rollout, gamma):
    following = torch.where(rollout.terminated, 0.0, critic(rollout.next_obs))
    return gamma * following + rollout.reward


def policy_epoch(logits, optimizer, action, old_log_prob, advantage, num_minibatches, clip_coef):
    for rows in torch.randperm(len(action)).chunk(num_minibatches):
        log_prob = logits.log_softmax(-1)[action[rows]]
        ratio = (log_prob - old_log_prob[rows]).exp()
        clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
        loss = -torch.min(ratio * advantage[rows], clipped_ratio * advantage[rows]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def policy_epoch_again(logits, optimizer, action, old_log_prob, advantage, num_minibatches, clip_coef):
    order = torch.randperm(len(action)).flip(0)
    for rows in order.chunk(num_minibatches):
        optimizer.zero_grad(set_to_none=False)
        log_prob = (logits - logits.logsumexp(-1)).gather(-1, action[rows])
        policy_loss(log_prob, old_log_prob[rows], advantage[rows], clip_coef).backward()
        optimizer.step()


def surrogate_loss(log_prob, old_log_prob, advantage, clip_coef):
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    ratio = (log_prob - old_log_prob).exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(ratio * advantage, clipped_ratio * advantage).mean()


def surrogate_loss_again(log_prob, old_log_prob, advantage, clip_coef):
    std, mean = torch.std_mean(advantage)
    return policy_loss(log_prob, old_log_prob, (advantage - mean) / (std + 1e-8), clip_coef)


def clipped_value_loss(value, old_value, returns, clip_coef):
    error = (value - returns) ** 2
    clipped_value = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max(error, (clipped_value - returns) ** 2).mean()


def clipped_value_loss_again(value, old_value, returns, clip_coef):
    clipped_value = torch.min(torch.max(value, old_value - clip_coef), old_value + clip_coef)
    errors = torch.stack([value - returns, clipped_value - returns])
    return errors.abs().amax(0).square().mean() / 2


def critic_loss(critic, obs, next_obs, reward, terminated, gamma):
    with torch.no_grad():
        target = reward + gamma * critic(next_obs) * ~terminated
    return 0.5 * ((critic(obs) - target) ** 2).mean()


def critic_loss_again(critic, obs, next_obs, reward, terminated, gamma):
    target = (reward + gamma * critic(next_obs) * ~terminated).detach()
    return 0.5 * nn.functional.mse_loss(critic(obs), target)
