"""Checks of exercise 7: the learner's tests, run against the buggy function and against two correct ones."""

import pytest
import torch

from exercises import buggy
from exercises.checks import Wrong
from exercises.solutions import fixed

NAMES = [
    "advantages", "value_targets", "policy_epoch", "surrogate_loss", "clipped_value_loss", "critic_loss",
]  # fmt: skip


def verdict(test, function):
    """The AssertionError that a learner's test ends in, or None where it passes. Other errors pass
    through."""
    torch.manual_seed(0)
    try:
        test(function)
    except AssertionError as failure:
        return failure
    return None


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.about(f"test_{name}")) for name in NAMES]
)
def test_catches(ex, name):
    test = getattr(ex, f"test_{name}", None)
    if test is None:
        raise Wrong(f"There is no test_{name} any more: each of the six keeps its name.")
    for function in (getattr(fixed, name), getattr(fixed, f"{name}_again")):
        failure = verdict(test, function)
        if failure is not None:
            said = str(failure).splitlines()[0] if str(failure) else "no message"
            raise Wrong(
                f"Your test fails on a correct `{name}`, too ({said}): it asks for something that is not "
                "so. Work the case out by hand, from the docstring in exercises/buggy.py."
            ).with_traceback(failure.__traceback__)
    if verdict(test, getattr(buggy, name)) is None:
        raise Wrong(
            f"Your test passes on the buggy `{name}`, too: on your case the bug makes no difference. "
            "Find the bug in exercises/buggy.py first, then a case in which it shows."
        )
