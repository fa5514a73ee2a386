"""What a run changes of the process it runs in, put back; and what it says when it fails."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

Function = TypeVar("Function", bound=Callable)
under_way = threading.local()  # .explain: of the run in hand, or None


def on_failure(explain: Callable[[Exception], Exception | None]) -> None:
    """Where an exception leaves the `restores_process` function under way, call `explain` with it first; what
    that returns is raised from it."""
    under_way.explain = explain


def restores_process(function: Function) -> Function:
    """A decorator: when `function` returns or raises, torch's thread count and the handlers of SIGINT and
    SIGTERM are what they were before the call."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        threads = torch.get_num_threads()
        in_main_thread = threading.current_thread() is threading.main_thread()
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if in_main_thread else {}
        under_way.explain = None
        try:
            return function(*args, **kwargs)
        except Exception as error:
            explained = under_way.explain(error) if under_way.explain else None
            if explained is None:
                raise
            raise explained from error
        finally:
            under_way.explain = None
            torch.set_num_threads(threads)
            for number, handler in handlers.items():
                if handler is not None:  # None: set by another language, and not Python's to put back
                    signal.signal(number, handler)

    return wrapper
