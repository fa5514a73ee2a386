"""CUDA graph capture and replay, emulated on a CPU.

A CUDA graph remembers kernels and the addresses that they read and write; a replay runs the same kernels on
the same addresses, and no Python. `capture` does the same with aten operations and tensors: it calls a
function once, records every operation with its very tensors, and undoes what the call wrote, since a capture
executes nothing. `Tape.replay` runs the operations again and writes each result into the memory of the
recorded one.

    tape = capture(update, state=[weight, learning_rate, minibatch])
    minibatch.copy_(...)           # inputs change in place
    tape.replay()                  # what update() would have done, to the bit, if it is capturable

What a graph cannot hold is refused with a CaptureError when it is met: waiting for the device (`.item()`,
`if` on a tensor), shapes that depend on numbers (indexing with a mask), random draws, `torch.tensor(...)`,
and memory that the function neither made nor was given as `state`. Two mistakes leave no trace in what is
recorded, and show only when bytes after some replays are compared with those of an eager run: a changing
Python number, which the tape keeps as it was (see `snapshot`), and state outside of `state` that is rebound,
not written in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from common.envs.batched import BatchedEnv

# Python-level calls that leave no aten operation behind, or one that does not tell what was called.
LEAVES_THE_DEVICE = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__array__}
MAKES_A_CONSTANT = {torch.tensor, torch.as_tensor, torch.asarray}
# On a CUDA tensor the kernel of these waits for the device; their names do not say so.
WAITS_INSIDE = {"masked_fill.Tensor": "torch.where", "masked_fill_.Tensor": "torch.where"}


class CaptureError(RuntimeError):
    """The function cannot be captured: one sentence that says what it does and what to do instead."""


def named_tensors(state: Any, name: str = "state") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in `state` with the expression that reaches it: tensors, modules (parameters and buffers),
    optimizers (what they step and what they keep), dataclasses, mappings and sequences of these."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, torch.nn.Module):
        for key, tensor in (*state.named_parameters(), *state.named_buffers()):
            yield f"{name}.{key}", tensor
    elif isinstance(state, torch.optim.Optimizer):
        yield from named_tensors(state.param_groups, f"{name}.param_groups")
        for i, kept in enumerate(state.state.values()):
            yield from named_tensors(kept, f"{name}.state[{i}]")
    elif dataclasses.is_dataclass(state):
        for field in dataclasses.fields(state):
            yield from named_tensors(getattr(state, field.name), f"{name}.{field.name}")
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from named_tensors(value, f"{name}[{key!r}]")
    elif isinstance(state, (list, tuple)):
        for i, value in enumerate(state):
            yield from named_tensors(value, f"{name}[{i}]")


def snapshot(state: Any) -> dict[str, bytes]:
    """The bytes of every tensor in `state`, by name. Equal dicts: equal to the bit, NaN included."""
    return {
        name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in named_tensors(state)
    }


def storage_of(tensor: Tensor) -> int:
    """The identity of the memory behind a tensor; views of one tensor share it."""
    return tensor.untyped_storage()._cdata


class Tape:
    """A recorded function. `result` is what it returned: tensors that every replay writes anew, and that
    hold NaN until the first one."""

    def __init__(self, function: Callable, inputs: tuple, state: Any) -> None:
        self._given = {"input": inputs, "state": state}
        self._calls: list[tuple[Callable, tuple, dict, list[Tensor | None]]] = []
        self._made: list[Tensor] = []  # what the operations returned: kept alive, as a graph keeps its memory
        self._addresses = self._find()

        given = [tensor for _, tensor in self._tensors()]
        given += [tensor.grad for tensor in given if tensor.is_leaf and tensor.grad is not None]
        self._kept = [tensor.detach() for tensor in given]  # the memory stays ours, even if a name is rebound
        self._known = {storage_of(tensor) for tensor in self._kept}
        storages = {storage_of(tensor): tensor.untyped_storage() for tensor in self._kept}
        before = {key: storage.clone() for key, storage in storages.items()}
        try:
            with RefusePythonCalls() as python, Recorder(self, python):
                self.result = function(*inputs)
            self._refuse_moved("the function")
            if new := [name for name in self._find() if name not in self._addresses]:
                raise CaptureError(
                    f"{new[0]} did not exist before the function ran, and every replay would make it anew: "
                    "call the function once before the capture, as a warm-up"
                )
        finally:
            for key, storage in storages.items():
                storage.copy_(before[key])
        with torch.no_grad():
            for tensor in self._made:
                if tensor.is_floating_point():
                    tensor.fill_(torch.nan)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self._given.items():
            yield from named_tensors(value, name)

    def _find(self) -> dict[str, int]:
        return {name: storage_of(tensor) for name, tensor in self._tensors()}

    def _refuse_moved(self, who: str) -> None:
        now = self._find()
        for name, address in self._addresses.items():
            if now.get(name) != address:
                raise CaptureError(
                    f"{who} put another tensor in the place of {name}, and a graph goes on using the old "
                    "one: write into it, with copy_ or another in-place operation"
                )

    def replay(self) -> None:
        """Run the recorded operations again, on the memory they were recorded with."""
        self._refuse_moved("since the capture something")
        with torch.no_grad():
            for func, args, kwargs, outputs in self._calls:
                for recorded, new in zip(outputs, tree_iter(func(*args, **kwargs)), strict=True):
                    if recorded is not None:
                        recorded.copy_(new)

    def record(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run one operation and keep it, unless it only makes a view."""
        result = func(*args, **kwargs)
        inputs = {storage_of(x) for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)}
        is_new = [isinstance(x, Tensor) and storage_of(x) not in inputs for x in tree_iter(result)]
        outputs = [x if new else None for x, new in zip(tree_iter(result), is_new, strict=True)]
        self._made += [x for x in outputs if x is not None]
        self._known.update(storage_of(x) for x in outputs if x is not None)
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if writes or any(is_new):
            self._calls.append((func, args, kwargs, outputs))
        return result


def capture(function: Callable, *inputs: Any, state: Any = ()) -> Tape:
    """Record `function(*inputs)`. `inputs` and `state` hold every tensor that outlives a call and that the
    function reads or writes, in whatever nesting `named_tensors` takes; gradients come with their tensors.

    Everything given is as it was when this returns, but for Python's side: a counter, a list that was
    appended to, or an optimizer's first step stays. Raises CaptureError for what a graph cannot hold.
    """
    return Tape(function, inputs, state)


class RefusePythonCalls(TorchFunctionMode):
    """Refuses what can be seen only where Python calls torch."""

    writes_item = False  # inside `tensor[...] = number`, which makes a constant of its own, of fixed content

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if func in LEAVES_THE_DEVICE:
            raise CaptureError(f"Tensor.{name}() waits for the device: keep the number in a tensor")
        if func in MAKES_A_CONSTANT:
            raise CaptureError(
                f"torch.{name}(...) copies a Python number to the device when captured and never again: make "
                "the tensor beforehand, give it as state, and write into it before a replay"
            )
        outer, self.writes_item = self.writes_item, func is torch.Tensor.__setitem__
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.writes_item = outer


class Recorder(TorchDispatchMode):
    """Hands every operation that a graph can hold to the tape, and refuses the others."""

    def __init__(self, tape: Tape, python: RefusePythonCalls) -> None:
        super().__init__()
        self.tape, self.python = tape, python

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = str(func).removeprefix("aten.").removesuffix(".default")
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        if name == "_local_scalar_dense":
            raise CaptureError(
                "a tensor's number is asked for, by .item(), float(), int(), or an `if`, `while`, `and` or "
                "`or` on it, and that waits for the device: keep the number in a tensor, and choose with "
                "torch.where"
            )
        if name.startswith(("index", "_index", "_unsafe_index")):
            if any(x.dtype in (torch.bool, torch.uint8) for x in tree_iter(args[1]) if isinstance(x, Tensor)):
                raise CaptureError(
                    "indexing with a mask waits for the device to count the rows: select with torch.where, "
                    "or multiply by the mask"
                )
        elif torch.Tag.dynamic_output_shape in func.tags:
            raise CaptureError(f"the shape of what {name} returns depends on the numbers: keep shapes fixed")
        if torch.Tag.data_dependent_output in func.tags:
            raise CaptureError(f"{name} returns a Python value, and that waits for the device: keep a tensor")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise CaptureError(
                f"{name} draws random numbers: draw them before the replay, into a tensor given as state"
            )
        if name in WAITS_INSIDE:
            raise CaptureError(f"{name} waits for the device inside its kernel: use {WAITS_INSIDE[name]}")
        if name == "lift_fresh" and self.python.writes_item:
            self.tape._known.add(storage_of(args[0]))
            self.tape._kept.append(args[0])
        for tensor in tensors:
            if storage_of(tensor) not in self.tape._known:
                kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                raise CaptureError(
                    f"{name} reads a tensor {kind} that the function neither made nor was given as state: "
                    "give it as state if it lasts, or make it inside from tensors that do"
                )
        return self.tape.record(func, args, kwargs)


def emulated(function: partial, device: str | None = None) -> Callable[[], None]:
    """A script's `capture`, on a CPU: the tensors of the partial's arguments are the state."""
    state: list[Any] = []
    for value in function.args:
        if isinstance(value, BatchedEnv):
            state += [value.state, value.episode_steps]
        elif isinstance(value, (torch.nn.Module, Tensor)):
            state.append(value)
    return capture(function, state=state).replay
