"""How pytest runs the exercises: a blank is waiting, a wrong attempt is its message, and a summary ends the
run."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from exercises import Blank
from exercises.checks import exercises, explain, load, shown

COURSE = 5  # exercises 1 to 5 are the course, the others are for going on
STATUS = {"waiting": ("waiting", "w", "WAITING"), "not reached": ("not reached", "-", "NOT REACHED")}

outcomes = pytest.StashKey[dict]()


def pytest_addoption(parser):
    parser.addoption(
        "--solutions", action="store_true", help="exercises: check the references in exercises/solutions/"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "about(name): the name in the exercise's file that a check is about")
    config.stash[outcomes] = defaultdict(list)
    if config.option.reportchars == "fE":  # pytest's own list of failures would only say everything twice
        config.option.reportchars = ""


def package(config) -> str:
    return "exercises.solutions" if config.option.solutions else "exercises"


def number_of(item) -> int | None:
    """The exercise that a check belongs to: 3, of test_ex3.py."""
    found = re.fullmatch(r"test_ex(\d+)", item.path.stem)
    return int(found.group(1)) if found else None


@pytest.fixture
def attempt(request):
    """`attempt(3)`: the module of exercise 3, the learner's or, with --solutions, the reference."""
    return lambda number: load(number, package(request.config))


@pytest.fixture
def ex(request, attempt):
    """The module of the exercise that the check belongs to."""
    return attempt(number_of(request.node))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report, number = (yield), number_of(item)
    if number is None:
        return report
    seen = item.config.stash[outcomes][number]
    if call.excinfo is None:
        if report.when == "call":
            seen.append(("passed", ""))
        return report
    error = call.excinfo.value
    if isinstance(error, Blank):
        report.outcome, report.exercise = "skipped", "waiting"
        report.longrepr = (str(item.path), 0, str(error))
        seen.append(("waiting", str(error)))
    elif isinstance(error, NotReached):
        report.exercise = "not reached"
    elif report.failed:
        marker = item.get_closest_marker("about")
        module = getattr(item, "funcargs", {}).get("ex")
        message = explain(error, module, marker.args[0] if marker else None)
        if message is None and not item.config.option.solutions:
            what = f"{shown(exercises()[number].path)}, {marker.args[0] if marker else item.name}"
            reason = f"{type(error).__name__}: {error}"
            message = f"{what}:\nThe check could not go on with what this gave it. {reason}"
        if message is not None:
            report.longrepr = message
        seen.append(("failed", ""))
    return report


class NotReached(pytest.skip.Exception):
    """An earlier check of the same exercise has failed: its message is the one to read."""


def pytest_runtest_setup(item):
    if any(outcome == "failed" for outcome, _ in item.config.stash[outcomes].get(number_of(item), [])):
        raise NotReached("an earlier check of this exercise failed")


def pytest_report_teststatus(report):
    return STATUS.get(getattr(report, "exercise", None))


def pytest_terminal_summary(terminalreporter, config):
    """One line an exercise, and what is next."""
    seen = config.stash[outcomes]
    if not seen:
        return
    write, all_exercises = terminalreporter.write_line, exercises()
    terminalreporter.ensure_newline()
    terminalreporter.section("exercises")
    todo = []
    for number in sorted(seen):
        exercise, results = all_exercises[number], seen[number]
        kinds = [kind for kind, _ in results]
        if "failed" in kinds:
            state, detail, color = "failed", f"python -m exercises.hint {number}", {"red": True}
            what = f"Read its message above and change {shown(exercise.path)}, then"
        elif "waiting" in kinds:
            passed, note = kinds.count("passed"), next(note for kind, note in results if kind == "waiting")
            detail = f"{shown(exercise.path)}  {exercise.minutes} min"
            if passed:
                detail = f"{passed} of {len(results)} checks pass; {note or detail}"
            state, color = "waiting", {"yellow": True}
            what = f"{note[:1].upper()}{note[1:]}, then" if note else start(exercise)
        else:
            state, detail, color = "passed", "", {"green": True}
        write(f"  {number}  {exercise.name:<22}{state:<9}{detail}".rstrip(), **color)
        if state != "passed":
            todo.append((number, what))
    if config.option.solutions:
        return
    if not todo:
        todo = [(n, start(exercise)) for n, exercise in all_exercises.items() if n > max(seen)]
    write("")
    if not todo:
        write("All pass. Compare your lines with those in exercises/solutions/.")
        return
    number, what = todo[0]
    write(f"next: exercise {number}. {what}")
    write(f"      pytest exercises/test_ex{number}.py")
    if len(seen) == len(all_exercises):
        last = max(all_exercises)
        write(f"Exercises 1 to {COURSE} are the course; {COURSE + 1} to {last} are for going on.")


def start(exercise) -> str:
    return f"Open {shown(exercise.path)}, read it from the top, fill in the blank, then"
