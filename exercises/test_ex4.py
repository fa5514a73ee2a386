"""Checks of exercise 4: numbers known by hand, then torch.distributions, an integral and a derivative."""

import math

import pytest
import torch

from exercises.checks import check, check_number, check_tensor

gaussian = pytest.mark.about("gaussian_log_prob")
tanh = pytest.mark.about("tanh_log_det")
categorical = pytest.mark.about("categorical_log_prob")


@gaussian
def test_gaussian_of_one_number(ex):
    """The standard normal at its mean and one deviation off, then another deviation."""
    missing = "The normalisation -0.5 * log(2 pi) is missing."
    density = "That is the density, not its logarithm."
    unmoved = "The action does not enter as -0.5 * ((action - mean) / std)^2."
    narrow = "log_std is missing: a wide Gaussian is lower everywhere."
    for action, std, right, mistakes in (
        (0.0, 1.0, -0.918939, {missing: 0.0, density: 0.398942}),
        (1.0, 1.0, -1.418939, {unmoved: -0.918939}),
        (0.0, 2.0, -1.612086, {narrow: -0.918939}),
        (3.0, 2.0, -2.737086, {}),
    ):
        log_std = torch.tensor([math.log(std)])
        value = ex.gaussian_log_prob(torch.zeros(1), log_std, torch.tensor([action]))
        summed = "Add up the components, which are the last axis."
        check_tensor("The log-probability of an action (1,)", value, like=torch.zeros(()), why=summed)
        what = f"log N(action {action:.0f}; mean 0, std {std:.0f})"
        finite = "Here log_std is 0 and std is 1: is log_std used as if it were std?"
        check(torch.isfinite(value) or std > 1, f"{what} is {value.item()}. {finite}")
        why = "The logarithm of the formula has three terms: the square, -log_std, and -0.5 * log(2 pi)."
        check_number(what, value.item(), right, mistakes, why)


@gaussian
def test_gaussian_of_vectors(ex):
    generator = torch.Generator().manual_seed(0)
    mean, action = (torch.randn(5, 7, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    log_std = torch.randn(3, generator=generator, dtype=torch.float64)
    value = ex.gaussian_log_prob(mean, log_std, action)
    right = torch.distributions.Normal(mean, log_std.exp()).log_prob(action).sum(-1)
    check_tensor("The log-probability of actions (5, 7, 3)", value, like=right)
    first, average = (
        right[0, 0].item(),
        "That is the mean over the components; logarithms of densities add up.",
    )
    why = "One number came out right: do log_std and log(2 pi) count once for every component?"
    check_number("The log-probability of a 3-vector", value[0, 0].item(), first, {average: first / 3}, why)
    check(torch.allclose(value, right), "Some log-probabilities of a batch (5, 7, 3) are wrong.")


@tanh
def test_tanh_slope(ex):
    """Against the derivative, taken by autograd."""
    half_range = torch.tensor([0.5, 3.0], dtype=torch.float64)
    u = torch.tensor([[0.0, 0.0], [1.0, -0.5], [-2.0, 2.0]], dtype=torch.float64, requires_grad=True)
    (slopes,) = torch.autograd.grad((half_range * torch.tanh(u)).sum(), u)
    right = slopes.log().sum(-1)
    value = ex.tanh_log_det(u.detach(), half_range)
    check_tensor("tanh_log_det of u (3, 2)", value, like=right)
    without = right - half_range.log().sum()
    for row, (number, expected) in enumerate(zip(value.tolist(), right.tolist(), strict=True)):
        check_number(
            f"tanh_log_det at u = {u[row].tolist()}, half_range [0.5, 3],",
            number,
            expected,
            {
                "half_range is missing: it stretches the actions, too.": without[row].item(),
                "The sign is wrong; squashed_log_prob already subtracts.": -expected,
                "That is the slope, not its logarithm.": slopes[row].prod().item(),
            },
            "It is the sum over the components of log(half_range * (1 - tanh(u)^2)).",
        )


@tanh
def test_tanh_far_out(ex):
    """float32, where tanh(u) is exactly 1."""
    u = torch.tensor([[12.0], [-12.0], [40.0], [-40.0]])
    value = ex.tanh_log_det(u, torch.ones(1))
    check_tensor("tanh_log_det of u (4, 1)", value, like=torch.zeros(4))
    right = 2 * (math.log(2) - u[:, 0].abs())  # log(4 / (e^u + e^-u)^2)
    for number, expected, far in zip(value.tolist(), right.tolist(), u[:, 0].tolist(), strict=True):
        check(
            math.isfinite(number),
            f"tanh_log_det at u = {far:.0f} is {number} in float32: 1 - tanh(u)^2 has become 0 there, or "
            "exp has overflowed. The comment above the blank has a safe form.",
        )
        check_number(f"tanh_log_det at u = {far:.0f}", number, expected, {})


@tanh
def test_squashed_density_integrates_to_one(ex):
    """Needs the Gaussian as well: over all actions between the bounds, the probability is 1."""
    u = torch.linspace(-9, 9, 20001, dtype=torch.float64).unsqueeze(-1)
    half_range = torch.tensor([2.5], dtype=torch.float64)
    mean, log_std = torch.tensor([0.3], dtype=torch.float64), torch.tensor([-0.2], dtype=torch.float64)
    density = ex.squashed_log_prob(mean, log_std, u, half_range).exp()
    total = torch.trapezoid(density, (half_range * torch.tanh(u)).squeeze(-1)).item()
    check(
        abs(total - 1) < 1e-3,
        f"The squashed density integrates to {total:.4f} over the actions, and not to 1.",
    )


@categorical
def test_categorical_of_one_row(ex):
    logits = torch.tensor([[0.0, math.log(2), math.log(5)]])
    value = ex.categorical_log_prob(logits, torch.tensor([1]))
    check_tensor("The log-probability of actions (1,)", value, like=torch.zeros(1))
    check_number(
        "log softmax([0, log 2, log 5])[1], where the probabilities are 1/8, 2/8 and 5/8,",
        value.item(),
        math.log(2 / 8),
        {
            "That is the logit itself: it is not normalised.": math.log(2),
            "That is the probability, not its logarithm.": 2 / 8,
            "That is the logarithm of action 0's probability.": math.log(1 / 8),
        },
    )


@categorical
def test_categorical_of_many_rows(ex):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 7, 4, generator=generator, dtype=torch.float64)
    action = torch.randint(4, (5, 7), generator=generator)
    right = torch.distributions.Categorical(logits=logits).log_prob(action)
    value = ex.categorical_log_prob(logits, action)
    check_tensor("The log-probability of actions (5, 7) under logits (5, 7, 4)", value, like=right)
    check(
        torch.allclose(value, right),
        "Some rows of a batch (5, 7) are wrong: does each row use its own action?",
    )


@categorical
def test_categorical_of_large_logits(ex):
    """softmax does not change when every logit grows by the same amount."""
    value = ex.categorical_log_prob(torch.tensor([[1000.0, 1000.0]]), torch.tensor([0]))
    check(
        torch.isfinite(value).all(),
        f"With the logits [1000, 1000] the log-probability is {value.item()}: exp overflows. log_softmax "
        "does not.",
    )
    check_number("With the logits [1000, 1000], the log-probability", value.item(), math.log(0.5), {})
