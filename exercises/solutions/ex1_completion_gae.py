"""Exercise 1: where an advantage ends.

An environment stops for two reasons, and they mean opposite things. In a fall the task is over: there is no
future, so nothing can be expected from it. At a time limit only the clock ran out: the task would have gone
on, and the critic's V(next_obs) stands for the future that was cut off. Much PPO code treats the two alike,
and learns wrong values from it.

You will learn: what GAE adds up, what a fall does to the sum, and what a time limit does to it.
Read first: `Rollout` in ppo_continuous.py for what next_obs, terminated and truncated mean, then the
    docstring of `compute_gae`. Its body is the answer: keep it for when you have your own.
Time: about 15 minutes.

GAE in two formulas, for one environment:

    delta_t = reward_t + gamma * V(next_obs_t) - V(obs_t)           if the episode has a future after step t
    A_t     = delta_t + gamma * gae_lambda * A_{t+1}                if step t + 1 is of the same episode

The "if" at the end of each is the exercise. Before you write code, work out A_5, A_4, A_3 and A_1 of this
rollout on paper, with gamma = 0.5 and gae_lambda = 0.5. You will need them.

    t   reward   V(obs)   V(next_obs)
    0      1        2          4
    1      1        4          6        the pole falls: terminated. The critic has an opinion even of a
                                        fallen pole, and it is 6
    2      1        2          4        the next episode begins
    3      1        4          8        the time limit: truncated
    4      1        2          6        the next episode begins
    5      1        6          4        the rollout ends here; this episode goes on in the next one
"""

import torch
from torch import Tensor


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, gae_lambda: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (advantages, returns). Everything is shaped (num_steps, num_envs); the two flags are bool.

    `values` is V(obs), `next_values` is V(next_obs): the value of what the step itself returned, before any
    reset. A step may have both flags set: then it is a fall.
    """
    advantages = torch.zeros_like(rewards)
    advantage = torch.zeros_like(rewards[0])  # A_{t+1} of each environment; nothing is known past the end
    for t in reversed(range(len(rewards))):
        # Here `advantage` still is A_{t+1}. In place of `raise Blank`, two lines: `delta = ...`, and an
        # `advantage = ...` that makes A_t of it. Times a number, a bool counts as 0 or 1; ~flag is its
        # opposite, flag_1 | flag_2 is "or".
        delta = rewards[t] + gamma * next_values[t] * ~terminated[t] - values[t]
        advantage = delta + gamma * gae_lambda * advantage * ~(terminated[t] | truncated[t])
        advantages[t] = advantage
    return advantages, advantages + values


# Run:    pytest exercises/test_ex1.py
# Stuck:  python -m exercises.hint 1
