"""Exercise 3: the clip that binds on one side only.

PPO takes many gradient steps on one rollout. Each step moves the policy away from the one that collected it,
and the ratio

    ratio = pi_new(action | obs) / pi_old(action | obs)

says how far: 1 means not at all. The policy gradient would maximise ratio * advantage; PPO maximises

    surrogate = min(ratio * advantage,  clip(ratio, 1 - clip_coef, 1 + clip_coef) * advantage)

The minimum is the point. Before you write it, fill in this table on paper, with clip_coef = 0.2: the
surrogate, and whether a small change of the ratio changes it (only then is there a gradient).

    ratio   advantage   surrogate   a gradient?
     1.5       +1           ?           ?          a good action, already much likelier than it was
     1.5       -1           ?           ?          a bad action that has become likelier
     0.5       +1           ?           ?          a good action that has become less likely
     0.5       -1           ?           ?          a bad action, already much less likely

You will learn: on which two of the four rows the clip binds, and why not on the others.
Read first: the docstring of `ppo_loss` in ppo_continuous.py. Its body is the answer.
Time: about 15 minutes.
"""

from torch import Tensor


def policy_loss(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """The mean of the surrogate over the rows, negated: an optimizer minimises. All (rows,) -> ().

    log_prob: log pi_new(action | obs), which carries the gradient. old_log_prob: log pi_old(action | obs).
    """
    # In place of `raise Blank`, about four lines: the ratio out of the two logarithms, the two products, the
    # smaller of them row by row, and the mean. x.clamp(low, high) clips, a.minimum(b) compares row by row.
    ratio = (log_prob - old_log_prob).exp()
    clipped_ratio = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    surrogate = (ratio * advantages).minimum(clipped_ratio * advantages)
    return -surrogate.mean()


# Run:    pytest exercises/test_ex3.py
# Stuck:  python -m exercises.hint 3
