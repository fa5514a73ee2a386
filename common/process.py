"""What a run takes of its process and gives back: torch's settings, signal handlers, open environments."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)


class Call:
    """A call of a `restores_process` function that is under way."""

    def __init__(self) -> None:
        self.closing: list[Callable[[], None]] = []
        self.explain: Callable[[Exception], Exception | None] = lambda error: None


CALL: ContextVar[Call | None] = ContextVar("CALL", default=None)


def at_exit(close: Callable[[], None]) -> None:
    """Have `close` called when the `restores_process` function under way returns or raises, the last given
    first. Outside of one nothing happens: what is opened there is the caller's to close."""
    if call := CALL.get():
        call.closing.append(close)


def on_failure(explain: Callable[[Exception], Exception | None]) -> None:
    """Have `explain` asked about an exception that leaves the `restores_process` function under way: what it
    returns is raised in its place, the first as its cause; None lets it pass."""
    if call := CALL.get():
        call.explain = explain


def close_all(closing: list[Callable[[], None]]) -> None:
    """Call each, the last first. One that raises is told in a line, and keeps no other from being called."""
    while closing:
        try:
            closing.pop()()
        except Exception as error:
            print(f"closing an environment raised {type(error).__name__}: {error}", flush=True)


def compiled(function: Function) -> Function:
    """`function` by torch.compile, a backward() in it included: anew for every shape of what it is given."""
    config = torch._dynamo.config
    at_exit(functools.partial(setattr, config, "trace_autograd_ops", config.trace_autograd_ops))
    config.trace_autograd_ops = True
    # Inductor's own tanh: within 1.8e-7, twice as fast.
    return torch.compile(function, dynamic=False, options={"cpp.use_decompose_tanh": True})


def restores_process(function: Function) -> Function:
    """A decorator. Inside, torch is as the scripts need it, whatever the caller has set: gradients on,
    float32, no autocast, tensors on the CPU unless told otherwise. When `function` returns or raises, these,
    torch's thread count and the handlers of SIGINT and SIGTERM are what they were, and every environment that
    `make_env` has made is closed."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        threads, dtype, call = torch.get_num_threads(), torch.get_default_dtype(), Call()
        in_main_thread = threading.current_thread() is threading.main_thread()
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if in_main_thread else {}
        token = CALL.set(call)
        try:
            with ExitStack() as settings:
                for setting in (torch.inference_mode(False), torch.enable_grad()):
                    settings.enter_context(setting)
                settings.enter_context(torch.autocast("cpu", enabled=False))
                if torch.get_default_device().type != "cpu":
                    settings.enter_context(torch.device("cpu"))
                torch.set_default_dtype(torch.float32)
                return function(*args, **kwargs)
        except Exception as error:
            explained = call.explain(error)
            if explained is None:
                raise
            raise explained from error
        finally:
            close_all(call.closing)
            CALL.reset(token)
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            for number, handler in handlers.items():
                if handler is not None:  # None: set by another language, and not Python's to put back
                    signal.signal(number, handler)

    return wrapper
