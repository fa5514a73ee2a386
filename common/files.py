"""The folder of a new run, files that are whole at every moment, checkpoints of the same content as the same
bytes."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

from common.cli import Refusal, check, seed_name


def write_atomically(path: Path, content: bytes) -> None:
    """Write a temporary file beside `path`, then rename it: a reader, or a process killed at any moment,
    finds the old content or the new, never a part. Raises OSError, with the old content still there."""
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # where the folder is gone, that is no second failure
            temporary.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON, atomically; NaN becomes null."""
    write_atomically(path, (json.dumps(finite_or_none(content), indent=1) + "\n").encode())


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write what `torch.load(path, weights_only=True)` reads, atomically."""
    archive = io.BytesIO()  # given the file, torch reports a full disk as an error about positions in it
    torch.save(canonical(content), archive)
    write_atomically(path, archive.getvalue())


def canonical(value: Any) -> Any:
    """A copy of `value` whose pickled bytes depend on its content alone.

    Pickle writes an object met twice as a reference, so that equal content gives other bytes when identities
    differ, as they do after loading: containers are rebuilt, strings interned, tensors cloned to the CPU.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, dict):
        return {canonical(k): canonical(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [canonical(v) for v in value]
    if isinstance(value, str):
        return sys.intern(str(value))
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise TypeError(f"a checkpoint holds tensors, numbers, strings and containers, no {type(value).__name__}")


def finite_or_none(value: Any) -> Any:
    """`value` with None for every float in it that JSON cannot hold."""
    if isinstance(value, dict):
        return {k: finite_or_none(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite_or_none(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def new_folder(script: str, args: Any) -> Path:
    """Make the folder of a run that starts: --out, or a fresh one under runs/. Raises Refusal."""
    if args.out is not None:
        folder = Path(args.out)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # What else a start that failed may have left, with no checkpoint, is no run and is written over.
            taken = any((folder / name).exists() for name in ("checkpoint.pt", "summary.json"))
        except OSError as error:
            raise Refusal(f"--out {folder} cannot be made into a folder ({error.strerror})") from None
        other = f"--resume {folder} goes on with it, or name another"
        check(not taken, f"--out {folder} holds a run already: {other}")
        return folder
    env = re.sub(r"[^\w.-]+", "-", args.env_id)
    name = f"{script}_{env}_{seed_name(args).replace(' ', '')}_{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ["", *(f"-{n}" for n in range(2, 1000))]:
        folder = Path("runs") / (name + suffix)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            continue
        except OSError as error:
            raise Refusal(f"runs/ cannot be written ({error.strerror}): give --out a folder") from None
    raise Refusal(f"runs/{name} and a thousand numbers after it are taken: give --out a folder")


class Kept:
    """A value that goes on from iteration to iteration, as a part of the checkpoint: tensors, in tuples."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.value = saved["value"]
