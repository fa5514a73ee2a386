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

from ppo_continuous import Rollout


def test_advantages(advantages):
    """See exercises.buggy.advantages. One or two steps are enough, if one of them is the right one."""
    no, yes = torch.tensor([False]), torch.tensor([True])
    one, value, next_value = torch.tensor([1.0]), torch.tensor([4.0]), torch.tensor([8.0])
    timed_out = advantages(one, value, next_value, no, yes, 0.5, 0.5).item()
    assert abs(timed_out - 1) < 1e-5, (
        f"after a time limit the future counts: 1 + 0.5 * 8 - 4, not {timed_out}"
    )


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
    rollout = a_rollout()
    rollout.truncated[0] = True
    rollout.next_obs[0] = 8.0  # the episode's own last state
    rollout.obs[1] = 2.0  # the next episode's first
    targets = value_targets(lambda obs: obs.squeeze(-1), rollout, 0.5)
    assert abs(targets[0].item() - 4) < 1e-5, f"0.5 * V(next_obs) is 4, not {targets[0].item()}"


def a_policy() -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Two logits, which give each of two actions probability 1/2, and an optimizer for them."""
    logits = nn.Parameter(torch.zeros(2))
    return logits, torch.optim.SGD([logits], lr=0.1)


def test_policy_epoch(policy_epoch):
    """See exercises.buggy.policy_epoch. Where the clip binds, a step leaves the logits as they are."""
    logits, optimizer = a_policy()
    action, advantage = torch.tensor([0, 0]), torch.ones(2)
    old_log_prob = torch.tensor([0.25, 0.25]).log()  # action 0 has gone from 1/4 to 1/2: the ratio is 2
    policy_epoch(logits, optimizer, action, old_log_prob, advantage, 1, 0.2)
    assert torch.equal(logits.detach(), torch.zeros(2)), f"the clip binds, but the logits moved to {logits}"


def test_surrogate_loss(surrogate_loss):
    """See exercises.buggy.surrogate_loss. The gradient with respect to log_prob tells which way each row
    goes."""
    log_prob = torch.full((2,), -1.0, requires_grad=True)
    surrogate_loss(log_prob, torch.full((2,), -1.0), torch.tensor([3.0, -3.0]), 0.2).backward()
    good, bad = log_prob.grad.tolist()
    assert good < 0 < bad, f"the good action should become likelier, the bad one less likely: {good}, {bad}"


def test_clipped_value_loss(clipped_value_loss):
    """See exercises.buggy.clipped_value_loss. Choose a row where its two errors differ."""
    value, old_value, returns = torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])
    loss = clipped_value_loss(value, old_value, returns, 0.2).item()  # the errors are 0 and 0.8^2
    assert abs(loss - 0.5 * 0.8**2) < 1e-5, f"the larger error counts, 0.5 * 0.64, not {loss}"


def test_critic_loss(critic_loss):
    """See exercises.buggy.critic_loss. `nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))` is a critic with two
    parameters: after loss.backward() they have a `.grad`."""
    critic = nn.Sequential(nn.Linear(1, 1), nn.Flatten(0))
    nn.init.ones_(critic[0].weight)
    nn.init.zeros_(critic[0].bias)
    obs, next_obs, reward = torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1)
    critic_loss(critic, obs, next_obs, reward, torch.tensor([False]), 0.5).backward()
    # V(obs) = weight * obs + bias = 0, the target is 0.5: only the bias of V(obs) is pulled, by -0.5.
    gradient = critic[0].weight.grad.item(), critic[0].bias.grad.item()
    assert gradient == (0.0, -0.5), f"the target is a constant, but the gradient is {gradient}"


# Run:    pytest exercises/test_ex7.py
# Stuck:  python -m exercises.hint 7
