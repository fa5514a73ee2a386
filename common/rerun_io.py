"""Rerun kept at arm's length: imported late, silent on the console, and never waited for without an end."""

from __future__ import annotations

import os
import shlex
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

PATIENCE = 5.0  # seconds that opening, laying out or completing a file may take


def no_display() -> bool:
    """Whether there is no screen to draw on."""
    screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.platform not in ("darwin", "win32") and not screen


def watch_command(path: Path) -> str:
    """The command line that opens a recording; in the browser where there is no display."""
    return f"python -m rerun {shlex.quote(str(path))}{' --web-viewer' * no_display()}"


def import_rerun() -> ModuleType:
    """The module rerun, which a run without a recording does not pay for. Its own log lines, in colour on
    stderr, are off unless RUST_LOG asks for them: what fails is said by the run. Raises ImportError."""
    asked = "RUST_LOG" in os.environ
    os.environ.setdefault("RUST_LOG", "off")  # read once, at the first import
    try:
        import rerun
    finally:
        if not asked:
            del os.environ["RUST_LOG"]
    return rerun


class Stuck(TimeoutError):
    """Rerun has not answered, and its stream stays locked: whoever asks it for anything waits too."""


def in_time(action: Callable[..., None], *args: object) -> None:
    """Call `action(*args)`. Raises what it raises, and Stuck where it has not returned by PATIENCE.

    Rerun writes a file in a thread of its own. Where that thread stops, as on a full disk, a call that waits
    for it may wait for ever, and so may Rerun's own closing when Python ends, which is then called off.
    """
    raised: list[Exception] = []

    def attempt() -> None:
        try:
            action(*args)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=attempt, daemon=True)  # one that Python does not wait for at its end
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        import_rerun().unregister_shutdown()
        raise Stuck(f"not written within {PATIENCE:g} s: is the disk full?")
    if raised:
        raise raised[0]


def complete(stream: object) -> None:
    """Write to the end what `stream` holds, and close its files. Raises RuntimeError where that failed."""
    try:
        stream.flush(timeout_sec=PATIENCE)  # disconnect alone would not tell
    except RuntimeError as error:
        raise RuntimeError(f"is the disk full? {error}") from None
    finally:
        stream.disconnect()
