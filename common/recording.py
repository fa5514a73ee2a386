"""The recording of a run, which Rerun opens laid out: its curves beside an evaluated episode, playing.

A Rerun viewer shows one timeline at a time and opens it at its beginning. So curves and episode share the
timeline "step" and both count from 0: the curves in environment steps of the run, the episode in steps of its
own. The episode plays in a loop over the timeline's first steps, beside curves that show the whole run.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import sysconfig
import warnings
from collections.abc import Callable
from numbers import Real
from pathlib import Path

import gymnasium as gym

from common.cli import one_line
from common.rerun_io import Stuck, complete, import_rerun, in_time, no_display

TIMELINE = "step"
# Drawn as geometry; other environments as rendered frames.
CARTPOLES = {"CartPoleContinuous-v0", "CartPole-v1", "CartPoleNoVelocity-v0"}
MAX_FRAMES = 300  # rendered frames kept of an episode: a longer one keeps every second, third, ... and where
# no time limit says how long it will be, every second after so many, then every third, ...

BLUE, ORANGE, GREEN, GREY = 0x5AA9E6FF, 0xF4A259FF, 0x6CC17AFF, 0x8A94A0FF
PLOTS = {  # metrics key: (title, colour); the first two stand under the episode, the others in two columns
    "episodic_return": ("episodic return", BLUE),
    "value_at_time_limit": ("value at the time limit", GREEN),
    "approx_kl": ("approximate KL", BLUE),
    "clipfrac": ("clip fraction", BLUE),
    "policy_loss": ("policy loss", ORANGE),
    "value_loss": ("value loss", ORANGE),
    "explained_variance": ("explained variance", GREEN),
    "log_std": ("log std", GREY),
    "entropy": ("entropy", GREY),
    "learned_reward": ("learned reward", GREEN),
    "discriminator_accuracy": ("discriminator accuracy", ORANGE),
    "discriminator_loss": ("discriminator loss", ORANGE),
    "action_rate": ("action rate", BLUE),
    "asymmetry": ("asymmetry", GREEN),
}
BEFORE_THE_FIRST = list(PLOTS)[:9]  # shown of a run that has logged nothing yet: what most have


class Recording:
    """One .rrd file, written while the run goes on and complete once closed. Opened before that, or after a
    run that was killed, it shows the curves so far.

    After construction nothing raises or waits for long: what fails is reported once, in one sentence given to
    `warn`, and then left out. No global random stream is drawn from.
    """

    def __init__(
        self, path: Path, title: str, total_steps: int, warn: Callable[[str], None], watch: bool = False
    ) -> None:
        """Open the file at `path`, overwriting it; with `watch`, open a viewer too and stream to both.

        title: the run's name in the viewer. total_steps: the run's environment steps, the width of its plots.
        Raises ImportError where rerun is not installed, RuntimeError or OSError where the file cannot be
        written.
        """
        rr = import_rerun()
        self.rr, self.title, self.total_steps, self.warn = rr, title, total_steps, warn
        self.failed: set[str] = set()
        self.open = True
        self.logged: set[str] = set()
        self.frames, self.fps, self.bounds = 0, 30.0, None
        # Every flush stores a piece of every curve; many small pieces make a large file that opens slowly.
        batching = rr.ChunkBatcherConfig(flush_tick=0.2 if watch else 10.0)
        application = re.sub(r"[^A-Za-z0-9 _:-]", "-", title)  # else Rerun does it, and warns on stderr
        self.stream = rr.RecordingStream(application, batcher_config=batching)
        self.stream.set_log_time_enabled(False)
        self.stream.set_log_tick_enabled(False)
        viewer = [rr.GrpcSink()] if watch and self._attempt("no viewer opens", self._open_viewer) else []
        in_time(self.stream.set_sinks, rr.FileSink(path), *viewer)
        in_time(self._send_layout)

    def log(self, metrics: dict) -> None:
        """Add an iteration's metrics at metrics["global_step"]; what is not a finite number is left out."""
        self._attempt("the curves stop here", self._log, metrics)

    def film(self, env: gym.Env) -> None:
        """Add the state `env` is in as the evaluated episode's next frame: once after reset and each step."""
        self._attempt("the episode is not filmed", self._film, env)

    def close(self) -> None:
        """Lay out what was recorded and complete the file; nothing is recorded from here on."""
        self._attempt("the layout is not complete", in_time, self._send_layout)
        self._attempt("the file is not complete", in_time, complete, self.stream)
        self.open = False

    def _attempt(self, failure: str, action: Callable[..., None], *args: object) -> bool:
        if failure in self.failed or not self.open:
            return False
        try:
            action(*args)
        except Stuck as error:
            self.open = False
            self.warn(f"recording: {failure} ({error})")
        except Exception as error:
            self.failed.add(failure)
            reason = f"{type(error).__name__}: {error}".splitlines()[0].encode("ascii", "replace").decode()
            self.warn(f"recording: {failure} ({reason})")
        return self.open and failure not in self.failed

    def _log(self, metrics: dict) -> None:
        for key, value in metrics.items():
            if not isinstance(value, Real) or not math.isfinite(value):
                continue
            entity = f"metrics/{key}"
            if key not in self.logged:
                self.logged.add(key)
                title, color = PLOTS.get(key, (key, GREY))
                self.stream.log(entity, self.rr.SeriesLines(names=title, colors=color, widths=2), static=True)
                self.stream.set_time(TIMELINE, sequence=0)
                self.stream.log(entity, self.rr.Scalars(math.nan))  # a plot's ticks count from its first time
            self.stream.set_time(TIMELINE, sequence=metrics["global_step"])
            self.stream.log(entity, self.rr.Scalars(value))

    def _film(self, env: gym.Env) -> None:
        drawn = env.spec is not None and env.spec.id in CARTPOLES
        limit = getattr(env.spec, "max_episode_steps", None)
        every = 1 if drawn else math.ceil(limit / MAX_FRAMES) if limit else 1 + self.frames // MAX_FRAMES
        if self.frames % every == 0 and (drawn or self.frames <= every * MAX_FRAMES):
            self.stream.set_time(TIMELINE, sequence=self.frames)
            (self._draw_cartpole if drawn else self._render)(env)
        self.fps = env.metadata.get("render_fps", self.fps)
        self.frames += 1

    def _draw_cartpole(self, env: gym.Env) -> None:
        rr, limit = self.rr, env.unwrapped.x_threshold
        x, _, theta, _ = (float(value) for value in env.unwrapped.state)
        if self.frames == 0:
            ends = [[[side, -0.1], [side, 0.1]] for side in (-limit, limit)]
            track = rr.LineStrips2D([[[-limit, 0], [limit, 0]], *ends], colors=GREY, radii=0.015)
            self.stream.log("episode/track", track, static=True)
            self.bounds = {"x_range": [-limit - 0.2, limit + 0.2], "y_range": [-1.5, 0.5]}
        # Metres; Rerun's y points down, so the 1 m pole, upright at theta 0, reaches to y = -1.
        cart, pole = [[x - 0.12, 0], [x + 0.12, 0]], [[x, 0], [x + math.sin(theta), -math.cos(theta)]]
        self.stream.log("episode/cart", rr.LineStrips2D([cart], colors=BLUE, radii=0.12))
        self.stream.log("episode/pole", rr.LineStrips2D([pole], colors=ORANGE, radii=0.04, draw_order=30))
        self.stream.log("episode/axle", rr.Points2D([[x, 0]], colors=GREY, radii=0.05, draw_order=40))

    def _render(self, env: gym.Env) -> None:
        if env.render_mode != "rgb_array":
            raise ValueError(getattr(env, "unrendered", 'it was made without render_mode="rgb_array"'))
        # Not tried: where another library has brought OpenGL in, MuJoCo then aborts the process.
        mujoco = "mujoco" in type(env.unwrapped).__module__
        if mujoco and no_display() and not os.environ.get("MUJOCO_GL"):
            raise RuntimeError("without a display set MUJOCO_GL=egl or MUJOCO_GL=osmesa")
        try:
            with warnings.catch_warnings():  # GLFW reports a missing display in warnings of its own
                warnings.simplefilter("ignore")
                image = env.render()
        except Exception as error:
            if not mujoco:
                raise
            raise RuntimeError(f"MUJOCO_GL can be egl, osmesa or glfw; {error}") from error
        self.stream.log("episode/image", self.rr.Image(image).compress(jpeg_quality=80))

    def _open_viewer(self) -> None:
        if no_display():
            raise RuntimeError("there is no display")
        places = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        viewer = shutil.which("rerun", path=places)
        self.rr.spawn(connect=False, executable_path=viewer, recording=self.stream)
        # spawn returns even where the viewer died at once, and a stream to nobody delays the end of the run.
        socket.create_connection(("127.0.0.1", 9876), timeout=1).close()

    def _send_layout(self) -> None:
        """Lay out the plots that have data (at first all) and, once filmed, the episode, playing looped."""
        import rerun.blueprint as rrb

        shown = shown_plots(self.logged or set(BEFORE_THE_FIRST))
        plots = {key: plot(PLOTS[key][0], f"/metrics/{key}", self.total_steps) for key in shown}
        left = [plots.pop(key) for key in list(PLOTS)[:2] if key in plots]
        right = list(plots.values())
        play = {"play_state": "following"}
        if self.frames:
            bounds = rrb.VisualBounds2D(**self.bounds) if self.bounds else None
            name = f"{self.title}: evaluated episode"
            left = [rrb.Spatial2DView(name=name, origin="/episode", visual_bounds=bounds), *left]
            loop = rrb.components.AbsoluteTimeRange(0, self.frames - 1)
            play = {
                "play_state": "playing",
                "fps": self.fps,
                "loop_mode": "selection",
                "time_selection": loop,
            }
        columns = [rrb.Vertical(*views) for views in (left, right[0::2], right[1::2])]
        panel = rrb.TimePanel(timeline=TIMELINE, state="collapsed", **play)
        layout = rrb.Horizontal(*columns, column_shares=[8, 5, 5])
        self.stream.send_blueprint(rrb.Blueprint(layout, panel, collapse_panels=True))


def open_recording(
    path: Path, title: str, total_steps: int, lines: list[dict], warn: Callable[[str], None], watch: bool
) -> Recording | None:
    """A Recording that begins with the metrics `lines`; None, and a line to `warn`, where none can be."""
    try:
        recording = Recording(path, title, total_steps, warn, watch)
    except ImportError:
        warn("no recording: rerun is not installed (pip install rerun-sdk); the run goes on without")
        return None
    except Exception as error:
        warn(f"no recording, the run goes on without: {one_line(error)}")
        return None
    for line in lines:
        recording.log(line)
    return recording


def shown_plots(keys: set[str]) -> list[str]:
    """The plots to show of metrics that were logged. A Gaussian's entropy is its log std in other numbers."""
    return [key for key in PLOTS if key in keys and not (key == "entropy" and "log_std" in keys)]


def plot(title: str, origin: str, total_steps: int, legend: bool = False) -> object:
    """A plot of the series under `origin` over the whole of `total_steps` environment steps."""
    import rerun as rr
    import rerun.blueprint as rrb

    # Left alone, a long plot shows only the 1,000 steps before and after the cursor.
    start, end = (rrb.TimeRangeBoundary.absolute(seq=step) for step in (0, total_steps))
    return rrb.TimeSeriesView(
        name=title,
        origin=origin,
        axis_x=rrb.TimeAxis(view_range=rr.TimeRange(start=start, end=end)),
        plot_legend=rrb.PlotLegend(visible=legend, corner=rrb.Corner2D.RightBottom),
    )
