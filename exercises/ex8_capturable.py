"""Exercise 8: an update that a CUDA graph can hold.

On a GPU, small networks wait for Python: an operation is done long before Python has asked for the next. A
CUDA graph records the operations of a function once and then replays them all at a single command, without
Python. But it records just that: operations, and the addresses of the memory they read and write. Whatever
Python decided meanwhile stays as it was at the recording, and whatever makes Python wait for a number cannot
be recorded at all. ppo_gpu_batched.py lives by these rules.

You will learn: what a captured function may not do, and what to write in its place.
Read first: the docstring of tests/capture_emulator.py. It plays the graph's part on your CPU, and your update
    is checked with it. Then `eager_update` below.
Time: about 30 minutes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from exercises import Blank


@dataclass
class State:
    """Everything that outlives an update. A graph goes on using this very memory: between two replays,
    whoever wants another minibatch or learning rate writes it into these tensors, and reads the results from
    them."""

    weight: Tensor  # (4,): what is learned
    momentum: Tensor  # (4,)
    learning_rate: Tensor  # ()
    rows: Tensor  # (64, 4): the data
    targets: Tensor  # (64,)
    index: Tensor  # int64 (16,): the rows of this minibatch
    loss: Tensor  # (): where an update leaves its loss


def eager_update(state: State, learning_rate: float) -> float:
    """One step of linear regression with momentum, clipped gradient and outliers left out, as one would write
    it at first. Five of its lines cannot be captured, or do the wrong thing when they are replayed."""
    x, target = state.rows[state.index], state.targets[state.index]
    error = x @ state.weight - target

    near = error.abs() < 2.0
    x, error = x[near], error[near]  # rows that are far off do not count
    loss = 0.5 * (error**2).mean()
    gradient = x.T @ error / len(error)

    norm = gradient.norm()
    if norm > 0.5:
        gradient = gradient * (0.5 / norm)

    state.momentum = 0.9 * state.momentum + gradient
    state.weight = state.weight - learning_rate * state.momentum
    return loss.item()


def update(state: State) -> None:
    """The same step with the same numbers, but capturable: the learning rate is state.learning_rate, and the
    loss is left in state.loss."""
    # In place of `raise Blank`: start from a copy of the body above. Then let the emulator, or the rules in
    # its docstring, find the lines that have to change. New tensors on the way are fine; a graph keeps their
    # memory. Only what outlives the update must be written in place. Useful: torch.where(flag, a, b),
    # flag.sum(), x.clamp(max=1.0), x.copy_(y), x.mul_(y), x.add_(y), x.sub_(y)
    raise Blank


def example() -> State:
    """A regression problem with three outliers."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 4, generator=generator)
    targets = rows @ torch.tensor([0.5, -0.3, 0.2, 0.4])
    targets[:3] += 50.0
    zeros = [torch.zeros(4), torch.zeros(4), torch.zeros(())]
    return State(*zeros, rows, targets, torch.arange(16), torch.zeros(()))


# Run:    pytest exercises/test_ex8.py
# Stuck:  python -m exercises.hint 8
