"""The recording, read back with Rerun's own reader. Each docstring says what breakage the test catches."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec

pytest.importorskip("rerun", reason="rerun-sdk is not installed")

import common.rerun_io
from common.recording import Recording

ROOT = Path(__file__).resolve().parents[1]
METRICS = [
    {"iteration": 1, "global_step": 512, "episodic_return": None, "approx_kl": 0.01, "entropy": 1.4},
    {"iteration": 2, "global_step": 1024, "episodic_return": 21.5, "approx_kl": 0.02, "entropy": 1.25},
    {"iteration": 3, "global_step": 1536, "episodic_return": 40.0, "approx_kl": math.nan, "entropy": 1.0},
]


class Painted(gym.Env):
    """Renders images of one colour, or raises `error`; `rendered` counts the calls."""

    spec = EnvSpec("Painted-v0", entry_point="none:none", max_episode_steps=900)
    metadata: ClassVar[dict] = {"render_fps": 25}

    def __init__(self, render_mode: str | None = "rgb_array", error: Exception | None = None) -> None:
        self.render_mode, self.error, self.rendered = render_mode, error, 0

    def render(self) -> np.ndarray:
        self.rendered += 1
        if self.error:
            raise self.error
        return np.full((8, 12, 3), 200, dtype=np.uint8)


def record(
    path: Path, env: gym.Env | None = None, frames: int = 0, metrics: list[dict] = METRICS
) -> list[str]:
    """Record `metrics` and then `frames` frames of `env`; return the warnings."""
    warned: list[str] = []
    recording = Recording(path, "a run", 2048, warned.append)
    for line in metrics:
        recording.log(line)
    for _ in range(frames):
        recording.film(env)
    recording.close()
    return warned


def read(path: Path, blueprint: bool = False) -> dict[str, dict[str, list[tuple[Any, Any]]]]:
    """The recording at `path`, or its last layout, as {entity: {component: [(step, value), ...]}}; the step
    is None where the value holds at all times."""
    from rerun.chunk import RrdReader

    reader = RrdReader(path)
    stores = reader.blueprints() if blueprint else reader.recordings()
    chunks = max(  # they are listed in no order, but ids count up with time
        (reader.stream(store=store).to_chunks() for store in stores),
        key=lambda chunks: max(str(chunk.id) for chunk in chunks),
    )
    content: dict[str, dict[str, list[tuple[Any, Any]]]] = {}
    for chunk in chunks:
        batch = chunk.to_record_batch()
        steps = batch["step"].to_pylist() if "step" in batch.schema.names else [None] * batch.num_rows
        for name in batch.schema.names:
            if ":" in name:
                rows = content.setdefault(chunk.entity_path, {}).setdefault(name, [])
                rows += [(step, row) for step, row in zip(steps, batch[name].to_pylist(), strict=True) if row]
    return content


def curve(content: dict, key: str) -> list[tuple[int, float]]:
    return sorted(
        (step, value) for step, (value,) in content[f"/metrics/{key}"]["Scalars:scalars"] if step > 0
    )


def layout(path: Path) -> tuple[set[str], dict[str, Any]]:
    """The names of the views, and what the time panel is set to."""
    content = read(path, blueprint=True)
    views = {
        value[0]
        for components in content.values()
        for name, rows in components.items()
        if name == "ViewBlueprint:display_name"
        for _, value in rows
    }
    panel = {name.split(":")[1]: rows[-1][1][0] for name, rows in content["/time_panel"].items() if rows}
    return views, panel


def test_curves_are_the_metrics(tmp_path: Path) -> None:
    """Catches a curve at the wrong step or of the wrong values, a None or NaN that is drawn as a number, and
    an unknown metric that is dropped (broken: global_step + 1; value * 2; None as 0; only keys of PLOTS)."""
    metrics = [{**line, "new_metric": line["iteration"] ** 2} for line in METRICS]
    assert record(tmp_path / "a.rrd", metrics=metrics) == []
    content = read(tmp_path / "a.rrd")
    assert curve(content, "episodic_return") == [(1024, 21.5), (1536, 40.0)]
    assert curve(content, "approx_kl") == [(512, 0.01), (1024, 0.02)]
    assert curve(content, "entropy") == [(512, 1.4), (1024, 1.25), (1536, 1.0)]
    assert curve(content, "new_metric") == [(512, 1.0), (1024, 4.0), (1536, 9.0)]
    assert {name.split("/")[1] for name in content} == {"metrics", "__properties"}


def test_the_layout_follows_the_data(tmp_path: Path) -> None:
    """Catches a file without a layout, one with plots that have no data, and one whose plots show a part of
    the run (broken: no send_blueprint; every plot kept; no view_range)."""
    record(tmp_path / "a.rrd")
    views, panel = layout(tmp_path / "a.rrd")
    assert views == {"episodic return", "approximate KL", "entropy"}
    assert panel["timeline"] == "step" and panel["play_state"] == 3  # following: at the end of the curves
    ranges = [
        row[0]
        for components in read(tmp_path / "a.rrd", blueprint=True).values()
        for _, row in components.get("TimeAxis:view_range", [])
    ]
    assert len(ranges) == 3 and all("2048" in str(value) for value in ranges)


def test_a_cartpole_is_drawn_and_plays_in_a_loop(tmp_path: Path) -> None:
    """Catches a pole that hangs down or leans to the wrong side, a frame at the wrong step, and an episode
    that does not play (broken: +cos; -sin; frames + 1; no time_selection)."""
    env = gym.make("CartPole-v1")
    env.reset(seed=0)
    warned: list[str] = []
    recording = Recording(tmp_path / "a.rrd", "a run", 2048, warned.append)
    for theta in (0.0, 0.2):
        env.unwrapped.state = np.array([0.5, 0.0, theta, 0.0])
        recording.film(env)
    recording.close()
    assert warned == []

    poles = read(tmp_path / "a.rrd")["/episode/pole"]["LineStrips2D:strips"]
    assert [step for step, _ in poles] == [0, 1]
    (pivot, upright), (_, leaning) = [strips[0] for _, strips in poles]
    assert pivot == pytest.approx([0.5, 0.0])
    assert upright == pytest.approx([0.5, -1.0])  # up is negative in Rerun
    assert leaning[0] > 0.6 and -1.0 < leaning[1] < -0.9

    views, panel = layout(tmp_path / "a.rrd")
    assert "a run: evaluated episode" in views
    assert panel["play_state"] == 2 and panel["loop_mode"] == 2  # playing, within the selection
    assert panel["time_selection"] == {"min": 0, "max": 1} and panel["fps"] == 50.0


def test_other_environments_are_filmed_with_at_most_301_images(tmp_path: Path) -> None:
    """Catches a long episode that fills the disk, uncompressed images, and a playing speed that is not the
    environment's (broken: every = 1; no compress; fps left at 30)."""
    env = Painted()
    assert record(tmp_path / "a.rrd", env, frames=901) == []
    images = read(tmp_path / "a.rrd")["/episode/image"]["EncodedImage:blob"]
    assert [step for step, _ in images] == list(range(0, 901, 3))
    assert bytes(images[0][1][0])[:2] == b"\xff\xd8"  # a JPEG begins so
    assert env.rendered == 301
    assert layout(tmp_path / "a.rrd")[1]["fps"] == 25.0


@pytest.mark.parametrize(
    ("env", "says"),
    [
        (Painted(error=RuntimeError("no \N{GREEK SMALL LETTER PI} here\nand a second line")), "no ? here"),
        (Painted(render_mode=None), "render_mode"),
    ],
)
def test_what_cannot_be_rendered_is_said_once(tmp_path: Path, env: Painted, says: str) -> None:
    """Catches an exception in the caller, a warning for each frame, one of several lines or not in ASCII, and
    curves that end with the film (broken: no try; no `failed`; the whole of str(error); one flag for all)."""
    warned: list[str] = []
    recording = Recording(tmp_path / "a.rrd", "a run", 2048, warned.append)
    for line in METRICS:
        recording.film(env)
        recording.log(line)
    recording.close()
    assert (
        len(warned) == 1
        and warned[0].startswith("recording: the episode is not filmed")
        and says in warned[0]
    )
    assert "\n" not in warned[0] and warned[0].isascii()
    assert env.rendered <= 1
    assert len(curve(read(tmp_path / "a.rrd"), "entropy")) == 3
    assert not any("episode:" in name or "evaluated" in name for name in layout(tmp_path / "a.rrd")[0])


def test_a_mujoco_failure_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a message that leaves the reader without the variable to set (broken: the hint removed)."""
    monkeypatch.setattr(Painted, "__module__", "gymnasium.envs.mujoco.painted")
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    (warning,) = record(tmp_path / "a.rrd", Painted(error=RuntimeError("no OpenGL context")), frames=2)
    assert "MUJOCO_GL can be egl" in warning and "no OpenGL context" in warning


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is a display")
def test_mujoco_is_not_rendered_without_a_display(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With OpenGL in the process, as after LunarLander, it would abort (broken: no check before render)."""
    monkeypatch.setattr(Painted, "__module__", "gymnasium.envs.mujoco.painted")
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    env = Painted()
    (warning,) = record(tmp_path / "a.rrd", env, frames=2)
    assert warning.endswith("(RuntimeError: without a display set MUJOCO_GL=egl or MUJOCO_GL=osmesa)")
    assert env.rendered == 0


def test_a_failing_log_is_said_once(tmp_path: Path) -> None:
    """Catches an exception in the training loop, and one warning an iteration (broken: _log called bare)."""
    warned = record(tmp_path / "a.rrd", metrics=[{"entropy": 1.0}] * 3)
    assert len(warned) == 1 and warned[0].startswith("recording: the curves stop here (KeyError")


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Catches Rerun's own log lines on the run's console (broken: the title as the application's name)."""
    Recording(tmp_path / "a.rrd", "a.b ALE/Pong-v5 (seed 0)", 2048, print).close()
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_never_completed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a run that hangs at its end, then or when Python ends (broken: disconnect called bare;
    unregister_shutdown not called)."""
    import rerun

    ended: list[str] = []
    gate = threading.Event()
    monkeypatch.setattr(common.rerun_io, "PATIENCE", 0.2)
    monkeypatch.setattr(rerun, "unregister_shutdown", lambda: ended.append("called off"))
    monkeypatch.setattr(rerun.RecordingStream, "disconnect", lambda stream: gate.wait(30))
    warned: list[str] = []
    recording = Recording(tmp_path / "a.rrd", "a run", 2048, warned.append)
    recording.log(METRICS[0])
    began = time.perf_counter()
    recording.close()
    assert time.perf_counter() - began < 5
    assert warned == ["recording: the file is not complete (not written within 0.2 s: is the disk full?)"]
    assert ended == ["called off"]
    monkeypatch.setattr(recording, "_log", lambda line: ended.append("asked for more"))
    recording.log(METRICS[1])
    recording.close()
    assert len(warned) == len(ended) == 1
    gate.set()


FILE_SIZE_LIMIT = """
import os, resource, sys
from pathlib import Path
import common.rerun_io
from common.recording import open_recording
common.rerun_io.PATIENCE = 2.0
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
recording = open_recording(Path(sys.argv[2]), "a run", 2048, [], print, False)
for step in range(300 * bool(recording)):
    recording.log({"global_step": step, "entropy": 1.0})
if recording:
    recording.close()
assert "RUST_LOG" not in os.environ
"""


@pytest.mark.skipif(sys.platform == "win32", reason="a limit of Unix's")
@pytest.mark.parametrize("limit", [100, pytest.param(4000, marks=pytest.mark.slow)])
def test_a_full_disk_costs_one_line(tmp_path: Path, limit: int) -> None:
    """At its beginning, where Rerun waits for ever, and later. Catches Rerun's own coloured lines on stderr,
    a process that does not end, and a file cut short and nothing said (broken: RUST_LOG not set; set_sinks
    called bare; no flush before disconnect)."""
    environ = {name: value for name, value in os.environ.items() if name != "RUST_LOG"}
    words = [sys.executable, "-c", FILE_SIZE_LIMIT, str(limit), str(tmp_path / "a.rrd")]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        r"(no recording|recording: the file is not complete).*is the disk full.*\n", done.stdout
    )


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a viewer would open")
def test_watching_without_a_display_still_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a run that ends, waits or loses its file for want of a display (broken: no check for one, which
    waits 6 s and says another thing; _open_viewer called bare)."""
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    warned: list[str] = []
    recording = Recording(tmp_path / "a.rrd", "a run", 2048, warned.append, watch=True)
    recording.log(METRICS[0])
    recording.close()
    assert warned == ["recording: no viewer opens (RuntimeError: there is no display)"]
    assert curve(read(tmp_path / "a.rrd"), "entropy") == [(512, 1.4)]


def test_recordings_of_one_process_do_not_mix(tmp_path: Path) -> None:
    """Catches global recording state (broken: rr.init and rr.log in place of the stream)."""
    first, second = (Recording(tmp_path / name, name, 2048, print) for name in ("a.rrd", "b.rrd"))
    first.log(METRICS[0])
    second.log(METRICS[1])
    first.close()
    second.close()
    second.close()  # harmless
    assert curve(read(tmp_path / "a.rrd"), "entropy") == [(512, 1.4)]
    assert curve(read(tmp_path / "b.rrd"), "entropy") == [(1024, 1.25)]


def test_no_global_random_stream_is_drawn_from(tmp_path: Path) -> None:
    """Catches a draw that would change training (broken: one of each of the three in _film, then in _log)."""

    def states() -> tuple:
        numpy_state = np.random.get_state()
        return random.getstate(), numpy_state[1].tolist(), numpy_state[2], torch.get_rng_state().tolist()

    before = states()
    record(tmp_path / "a.rrd", Painted(), frames=3)
    assert states() == before


def test_importing_the_module_does_not_import_rerun() -> None:
    """Catches an import at the top, which a run without a recording would pay for (broken: so)."""
    code = "import sys, common.recording; sys.exit('rerun' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
