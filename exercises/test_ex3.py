"""Checks of exercise 3: value and gradient, row by row of the table in its text."""

import math

import pytest
import torch

from exercises.checks import check, check_number, check_tensor, load

pytestmark = pytest.mark.about("policy_loss")

CLIP = 0.2
WHY_BOUND = {
    (
        1.5,
        1.0,
    ): "The action is good and has been made likelier by more than clip_coef: pushing on pays nothing.",
    (
        0.5,
        -1.0,
    ): "The action is bad and has been made less likely by more than clip_coef: pushing on pays nothing.",
}
WHY_FREE = {
    (
        1.5,
        -1.0,
    ): "The action is bad and has become likelier. If the clip held it there, the mistake could not be "
    "undone: the minimum keeps ratio * advantage, which is the smaller one here.",
    (
        0.5,
        1.0,
    ): "The action is good and has become less likely. If the clip held it there, the mistake could not "
    "be undone: the minimum keeps ratio * advantage, which is the smaller one here.",
}


def loss_and_gradient(ex, ratio, advantage, clip_coef=CLIP):
    """The loss of a single row, and its gradient with respect to log_prob."""
    old = torch.tensor([-1.5])
    new = (old + math.log(ratio)).requires_grad_()
    loss = ex.policy_loss(new, old, torch.tensor([advantage]), clip_coef)
    check_tensor("The loss", loss, like=torch.zeros(()))
    if loss.requires_grad:
        loss.backward()
    return loss.item(), 0.0 if new.grad is None else new.grad.item()


def test_an_unmoved_policy(ex):
    """Ratio 1: the surrogate is the advantage, and its gradient the policy gradient."""
    loss, gradient = loss_and_gradient(ex, 1.0, 2.0)
    row = "with ratio 1 and advantage 2"
    check_number(
        f"The loss {row}",
        loss,
        -2.0,
        {
            "Its sign is wrong: an optimizer makes the loss smaller, and the surrogate is to grow.": 2.0,
            "That is the difference of the logarithms times the advantage; the ratio is exp of the "
            "difference.": 0.0,
        },
    )
    check_number(
        f"The gradient of the loss with respect to log_prob {row}",
        gradient,
        -2.0,
        {
            "No gradient arrives at log_prob: is something detached, or computed under no_grad?": 0.0,
            "The ratio is upside down: it is new over old.": 2.0,
        },
        "The derivative of the ratio with respect to log_prob is the ratio itself.",
    )


def test_within_the_clip(ex):
    for ratio, advantage in ((1.1, 1.0), (0.9, 1.0), (1.1, -1.0), (0.9, -1.0)):
        loss, gradient = loss_and_gradient(ex, ratio, advantage)
        row = f"with ratio {ratio} and advantage {advantage:+.0f}"
        upside_down = {"The ratio is upside down: it is new over old.": -advantage / ratio}
        check_number(
            f"The loss {row}", loss, -ratio * advantage, upside_down, "Within 1 +- 0.2 nothing is clipped."
        )
        check_number(f"The gradient {row}", gradient, -ratio * advantage, {}, "Nothing is clipped here.")


@pytest.mark.parametrize("row", WHY_BOUND)
def test_where_the_clip_binds(ex, row):
    ratio, advantage = row
    loss, gradient = loss_and_gradient(ex, ratio, advantage)
    bound = 1 + CLIP if ratio > 1 else 1 - CLIP
    table = f"with ratio {ratio} and advantage {advantage:+.0f}"
    unclipped = {f"Nothing is clipped here, and should be. {WHY_BOUND[row]}": -ratio * advantage}
    check_number(f"The loss {table}", loss, -bound * advantage, unclipped, WHY_BOUND[row])
    check_number(f"The gradient {table}", gradient, 0.0, {}, WHY_BOUND[row])


@pytest.mark.parametrize("row", WHY_FREE)
def test_where_it_must_not(ex, row):
    ratio, advantage = row
    loss, gradient = loss_and_gradient(ex, ratio, advantage)
    bound = 1 + CLIP if ratio > 1 else 1 - CLIP
    table = f"with ratio {ratio} and advantage {advantage:+.0f}"
    clipped = {f"The clip binds here, and must not. {WHY_FREE[row]}": -bound * advantage}
    check_number(f"The loss {table}", loss, -ratio * advantage, clipped, WHY_FREE[row])
    stuck = {f"There is no gradient here, and there must be. {WHY_FREE[row]}": 0.0}
    check_number(f"The gradient {table}", gradient, -ratio * advantage, stuck, WHY_FREE[row])


def test_many_rows(ex):
    """Against the reference, at another clip_coef: the mean over rows, and the gradient of every row."""
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(3))
    results = []
    for policy_loss in (ex.policy_loss, load(3).policy_loss):
        log_prob = new.clone().requires_grad_()
        loss = policy_loss(log_prob, old, advantages, 0.1)
        check_tensor("The loss of 64 rows", loss, like=torch.zeros((), dtype=torch.float64))
        loss.backward()
        results.append((loss.item(), log_prob.grad))
    (loss, gradient), (right, right_gradient) = results
    check_number(
        "The loss of 64 rows, with clip_coef 0.1,",
        loss,
        right,
        {"That is the sum over the rows, and should be their mean.": right * 64},
        "A single row came out right with clip_coef 0.2: is 0.2 written into the function? Is the "
        "smaller product chosen row by row?",
    )
    check(torch.allclose(gradient, right_gradient), "The loss of 64 rows is right, but not its gradient.")
