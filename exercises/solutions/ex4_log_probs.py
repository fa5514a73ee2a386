"""Exercise 4: how likely was that action?

The ratio of exercise 3 needs the logarithm of the probability of an action, for each kind of policy.
Libraries hide it in an object; written out it is a line or two, several times faster, and no longer a
mystery.

You will learn: the density of a Gaussian over vectors, how a change of variable changes a density, and how to
pick one probability out of a softmax.
Read first: `Agent` in ppo_continuous.py, for what mean, log_std and the action before the tanh are, and in
    ppo_discrete.py for the logits. `gaussian_log_prob`, `tanh_log_det` and `categorical_log_prob` beside
    them are the answers.
Time: about 25 minutes for the three. They do not need each other: begin with any.
"""

import math

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow where x is large. A tool you may use below."""
    return torch.nn.functional.softplus(x)


def gaussian_log_prob(mean: Tensor, log_std: Tensor, action: Tensor) -> Tensor:
    """log N(action; mean, std) of vector actions whose components are independent of each other.

    mean, action: (..., action_dim); log_std, the logarithm of std: (action_dim,). Returns (...).

    The density of one component is  1 / (std * sqrt(2 pi)) * exp(-0.5 * ((action - mean) / std)^2).
    The components are independent: their densities multiply, so the logarithms of their densities add up.
    """
    # In place of `raise Blank`: take the logarithm of the formula on paper first. Neither exp nor log of the
    # density is computed: only std = exp(log_std) is. LOG_2PI is above.
    z = (action - mean) * torch.exp(-log_std)
    return (-0.5 * z**2 - log_std - 0.5 * LOG_2PI).sum(-1)


def tanh_log_det(pre_tanh: Tensor, half_range: Tensor) -> Tensor:
    """log |d action / d u| of action = middle + half_range * tanh(u), summed over the components.

    pre_tanh, u: (..., action_dim); half_range, half the width of the action's bounds: (action_dim,).
    Returns (...).

    A policy that squashes draws u from the Gaussian and hands `action` to the environment. Where the
    squashing crowds many u into few actions, near the bounds, the density of the actions is higher than that
    of the u. How much higher is the slope of the map: d action / d u = half_range * (1 - tanh(u)^2),
    component by component, and the components multiply again.
    """
    # In place of `raise Blank`: the logarithm of the slope, summed. Careful: in float32, tanh(10) is exactly
    # 1, and log(1 - 1) is minus infinity. This is the same and safe, and softplus is above: log(1 -
    # tanh(u)^2) = 2 * (log(2) - u - log(1 + exp(-2 u)))
    log_slope = 2 * (math.log(2) - pre_tanh - softplus(-2 * pre_tanh))
    return (log_slope + half_range.log()).sum(-1)


def squashed_log_prob(mean: Tensor, log_std: Tensor, pre_tanh: Tensor, half_range: Tensor) -> Tensor:
    """The log-density of the squashed action, from the u that led to it. Yours as soon as the two above
    are."""
    return gaussian_log_prob(mean, log_std, pre_tanh) - tanh_log_det(pre_tanh, half_range)


def categorical_log_prob(logits: Tensor, action: Tensor) -> Tensor:
    """log softmax(logits)[action], for each row its own action.

    logits: (..., num_actions); action: int64 (...). Returns (...).

    softmax(logits)_k = exp(logits_k) / (exp(logits_1) + exp(logits_2) + ...)
    """
    # In place of `raise Blank`: x.log_softmax(-1) is the logarithm of the softmax, safe for large logits.
    # x.gather(-1, index) picks by index along the last axis; index needs as many axes as x, so give the
    # action a last axis of size 1 (unsqueeze) and take it off the result again (squeeze).
    return logits.log_softmax(-1).gather(-1, action.unsqueeze(-1)).squeeze(-1)


# Run:    pytest exercises/test_ex4.py
# Stuck:  python -m exercises.hint 4
