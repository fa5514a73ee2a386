"""Checks of exercise 8: the numbers first, then the capture, then replays against an eager run, to the
bit."""

import numpy as np
import pytest
import torch

from exercises.checks import Wrong, check
from tests.capture_emulator import CaptureError, capture, snapshot

pytestmark = pytest.mark.about("update")

STEPS = 20
WHAT = {
    "loss": "an update leaves its loss there, with copy_.",
    "momentum": "it is 0.9 times the old one plus the clipped gradient.",
    "weight": "it loses learning_rate times the new momentum.",
}


def prepare(state, step):
    """What happens between two updates: another minibatch, and a learning rate that falls."""
    generator = torch.Generator().manual_seed(step)
    state.index.copy_(torch.randperm(64, generator=generator)[:16])
    state.learning_rate.fill_(0.5 * (1 - step / STEPS))


def test_the_numbers(ex):
    """Against eager_update, within rounding: another order of operations is allowed."""
    state, right = ex.example(), ex.example()
    for step in range(STEPS):
        prepare(state, step)
        prepare(right, step)
        ex.update(state)
        loss = ex.eager_update(right, 0.5 * (1 - step / STEPS))
        wanted = {"loss": torch.tensor(loss), "momentum": right.momentum, "weight": right.weight}
        for name, value in wanted.items():
            now = getattr(state, name)
            check(
                isinstance(now, torch.Tensor),
                f"state.{name} has become a {type(now).__name__}: keep it a tensor.",
            )
            check(
                now.shape == value.shape,
                f"state.{name} has become {tuple(now.shape)} in shape: keep it as it was.",
            )
            check(
                torch.allclose(now, value, rtol=1e-3, atol=1e-5),
                f"After update {step + 1} state.{name} is {rounded(now)}, and should be "
                f"{rounded(value)}, as eager_update has it: {WHAT[name]}",
            )


def rounded(tensor):
    return np.round(tensor.tolist(), 4).tolist()


def recorded(ex, state):
    """The tape of the learner's update. Its line and the emulator's sentence where it cannot be captured."""
    prepare(state, 0)
    try:
        return capture(lambda: ex.update(state), state=state)
    except CaptureError as error:
        raise Wrong(f"This cannot be captured: {error}.").with_traceback(error.__traceback__) from None


def test_it_can_be_captured(ex):
    recorded(ex, ex.example())


def test_replays_are_the_same_to_the_bit(ex):
    state, eager = ex.example(), ex.example()
    tape = recorded(ex, state)
    for step in range(STEPS):
        for one in (state, eager):
            prepare(one, step)
        tape.replay()
        ex.update(eager)
        ours, right = snapshot(state), snapshot(eager)
        differ = [name for name in right if ours[name] != right[name]]
        check(
            not differ,
            f"After replay {step + 1}, {' and '.join(differ)} is not what update(state) itself leaves "
            "there. A graph replays operations and no Python: a number or a choice made in Python stays "
            "as it was when captured.",
        )
