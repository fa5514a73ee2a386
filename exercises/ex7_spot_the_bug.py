"""Exercise 7: tests that would have caught it.

PPO with a bug still learns: worse, and on easy tasks not even worse. No crash and no learning curve will tell
you; a test of three lines will. exercises/buggy.py has six short functions, each with one bug that real
code has shipped. For each of them, write a test here: it must fail on the buggy function and pass on a
correct one.

You will learn: six classic bugs by sight, and to test a training step on a case so small that you know the
    answer.
Read first: exercises/buggy.py. Its docstrings say what each function should do. Where you are not sure, look
    at `compute_gae`, `ppo_loss`, `loss_gradient`, `update` and `train` in ppo_continuous.py.
Time: about 45 minutes for the six, in any order.

A test is given a function, calls it on a case of your making and asserts something about what comes out:

    def test_double(double):
        assert double(torch.tensor(3.0)).item() == 6.0, "twice 3 is 6"

The checker calls it three times: with the buggy function, and with two correct ones that are written
differently. So assert what the function should do, not how it does it. Only an `assert` counts as failing: a
test that crashes has found nothing. Compare floats with a tolerance (torch.allclose, or abs(a - b) < 1e-5).
"""

import torch
from torch import nn

from exercises import Blank
from ppo_continuous import Rollout


def test_advantages(advantages):
    """See exercises.buggy.advantages. One or two steps are enough, if one of them is the right one."""
    raise Blank


def a_rollout() -> Rollout:
    """Two steps of one environment, to fill in as you like: observations are single numbers."""
    return Rollout(
        obs=torch.zeros(3, 1, 1),
        next_obs=torch.zeros(2, 1, 1),
        action=torch.zeros(2, 1, 1),
        reward=torch.zeros(2, 1),
        terminated=torch.zeros(2, 1, dtype=torch.bool),
        truncated=torch.zeros(2, 1, dtype=torch.bool),
    )


def test_value_targets(value_targets):
    """See exercises.buggy.value_targets. `lambda obs: obs.squeeze(-1)` is a critic whose opinion you know."""
    raise Blank


def a_policy() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Two logits, which give each of two actions probability 1/2, and an optimizer for them."""
    logits = nn.Parameter(torch.zeros(2))
    return logits, torch.optim.SGD([logits], lr=0.1)


def test_policy_epoch(policy_epoch):
    """See exercises.buggy.policy_epoch. Where the clip binds, a step leaves the logits as they are."""
    raise Blank


def test_surrogate_loss(surrogate_loss):
    """See exercises.buggy.surrogate_loss. The gradient with respect to log_prob tells which way each row
    goes."""
    raise Blank


def test_clipped_value_loss(clipped_value_loss):
    """See exercises.buggy.clipped_value_loss. Choose a row where its two errors differ."""
    raise Blank


def test_critic_loss(critic_loss):
    """See exercises.buggy.critic_loss. `nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))` is a critic with two
    parameters: after loss.backward() they have a `.grad`."""
    raise Blank


# Run:    pytest exercises/test_ex7.py
# Stuck:  python -m exercises.hint 7
