"""What the exercises' checks share: saying what is wrong, and finding the learner's files."""

from __future__ import annotations

import importlib
import re
import textwrap
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

HERE = Path(__file__).parent
WIDTH = 100


class Wrong(AssertionError):
    """An attempt does not do what the exercise asks: sentences for the learner, who sees them and no
    traceback."""


def check(condition: Any, sentences: str) -> None:
    """Raise Wrong(sentences) unless `condition` holds."""
    if not condition:
        raise Wrong(sentences)


def check_tensor(what: str, value: Any, like: Tensor, why: str = "") -> None:
    """Refuse anything but a tensor with the shape and the dtype of `like`; `why` explains the shape."""
    if value is None:
        raise Wrong(f"{what} is None: is there a `return`?")
    if not isinstance(value, Tensor):
        raise Wrong(f"{what} is a {type(value).__name__}, and should be a tensor.")
    shape, wanted = tuple(value.shape), tuple(like.shape)
    check(shape == wanted, f"{what} has shape {shape}, and should have shape {wanted}. {why}".strip())
    check(value.dtype == like.dtype, f"{what} has dtype {value.dtype}, and should have {like.dtype}.")


def check_number(what: str, value: float, right: float, mistakes: dict[str, float], why: str = "") -> None:
    """Refuse a wrong number. `mistakes` (sentence: number) knows which mistake leads to which, and else `why`
    says what is right."""
    if abs(value - right) <= 1e-4 * max(1.0, abs(right)):
        return
    known = [sentence for sentence, number in mistakes.items() if abs(value - number) < 1e-4]
    reason = known[0] if known else why
    raise Wrong(f"{what} is {value:.6g}, and should be {right:.6g}.\n{reason}".strip())


class Exercise(NamedTuple):
    """One exercise: its number, and its file where the learner edits it."""

    number: int
    path: Path

    @property
    def name(self) -> str:
        """Of exercises/ex1_completion_gae.py: completion_gae."""
        return self.path.stem.partition("_")[2]

    @property
    def minutes(self) -> int:
        """What the file says it takes."""
        found = re.search(r"^Time: about (\d+) minutes", self.path.read_text(encoding="utf-8"), re.MULTILINE)
        return int(found.group(1)) if found else 0


def exercises() -> dict[int, Exercise]:
    """Every exercise by its number. Those that have a reference: copies that a learner keeps do not count."""
    names = sorted(path.name for path in (HERE / "solutions").glob("ex[0-9]*.py"))
    return {n: Exercise(n, HERE / name) for name in names for n in [int(re.match(r"ex(\d+)", name).group(1))]}


def load(number: int, package: str = "exercises.solutions") -> ModuleType:
    """The module of an exercise: the learner's in package "exercises", the reference in
    "exercises.solutions"."""
    return importlib.import_module(f"{package}.{exercises()[number].path.stem}")


def shown(path: str | Path) -> str:
    """A file's path as the learner types it, from the folder above exercises/."""
    path = Path(path)
    return path.relative_to(HERE.parent).as_posix() if path.is_relative_to(HERE.parent) else str(path)


def is_exercise_file(path: str) -> bool:
    return Path(path).is_relative_to(HERE) and re.match(r"ex\d+_", Path(path).name) is not None


def explain(error: BaseException, module: ModuleType | None, function: str | None) -> str | None:
    """What the learner reads in place of a traceback, or None where the error is not of the learner's making.

    function: the name, in `module`, of what the check was about.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_exercise_file(f.filename)]
    if isinstance(error, SyntaxError):
        line = (error.text or "").strip()
        where = f"{shown(error.filename)}, line {error.lineno}"
        return f"{where}: Python cannot read this.\n    {line}\n{error.msg}"
    if frames:
        frame = frames[-1]
        where = f"{shown(frame.filename)}, line {frame.lineno}, in {frame.name}:\n    {frame.line}"
    elif isinstance(error, Wrong):
        code = getattr(getattr(module, function or "", None), "__code__", None)
        line = f" (line {code.co_firstlineno})" if code else ""
        where = f"{shown(module.__file__) if module else ''}, {function}{line}:"
    else:
        return None
    text = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
    return where + "\n" + "\n".join(fill(line) for line in text.splitlines())


def fill(line: str) -> str:
    """A line of prose wrapped to WIDTH; a line that starts with spaces (a table, code) as it is."""
    return line if line.startswith(" ") else textwrap.fill(line, WIDTH, break_on_hyphens=False)
