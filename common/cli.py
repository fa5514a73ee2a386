"""The command line: flags from a dataclass, and refusals that are one sentence."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("PYTHON_TYRO_UTF8_BOXES", "False")  # tyro reads it when imported: plain ASCII help
import tyro

flag = tyro.conf.arg
ROOT = Path(__file__).parent.parent

# The flags that do not shape training: a checkpoint does not hold them, and a resumed run may change them.
NOT_TRAINING = (
    "out", "resume", "eval_only", "eval_episodes", "eval_max_steps", "checkpoint_every", "rerun", "watch",
    "cuda_graph", "log_every", "record", "episodes", "timeout",
)  # fmt: skip


class Refusal(ValueError):
    """What was asked for cannot be done: one sentence that names the flag and what would work."""


class NonFinite(FloatingPointError):
    """A number that training depends on is no longer finite."""


class EnvironmentFailed(RuntimeError):
    """The environment's own code raised."""


class RankFailed(RuntimeError):
    """Another process of the run has raised, is gone, or did not answer: which, and what stays of the run."""


class CannotWrite(OSError):
    """A file of the run cannot be written: one sentence that says which, why and what stays; where the run
    can be resumed, the line that does it follows."""


def check(condition: bool, sentence: str) -> None:
    """Raise Refusal(sentence) unless `condition` holds."""
    if not condition:
        raise Refusal(sentence)


def training_args(args: Any) -> dict[str, Any]:
    """The flags that shape training, by field name."""
    return {k: v for k, v in dataclasses.asdict(args).items() if k not in NOT_TRAINING}


def one_line(error: BaseException) -> str:
    """The first line of what `error` says, in ASCII and not too long to read."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return textwrap.shorten(text.encode("ascii", "replace").decode(), 240, placeholder=" ...")


def cannot_write(path: Path, error: OSError, stays: str) -> CannotWrite:
    """The CannotWrite that says why `path` cannot be written and what `stays`."""
    return CannotWrite(f"{path} cannot be written ({error.strerror or one_line(error)}): {stays}")


def flag_name(field: str) -> str:
    """The flag of a field: "gae_lambda" -> "--gae-lambda", "break_" -> "--break"."""
    return "--" + field.rstrip("_").replace("_", "-")


def script_file(script: str) -> str:
    """Where a script lies: "a2c" -> "a2c.py", and one of the variants -> "variants/NAME.py"."""
    variant = f"variants/{script}.py"
    return variant if (ROOT / variant).is_file() else f"{script}.py"


def start(script: str) -> list[str]:
    """The words that start a script; one of the variants is started as a module, so that it finds common/. In
    a process that torchrun has started they are torchrun's."""
    file = script_file(script)
    if "/" not in file:
        return ["python", file]
    many = os.environ.get("LOCAL_WORLD_SIZE")
    return [*(["torchrun", "--nproc-per-node", many] if many else ["python"]), "-m", f"variants.{script}"]


def seed_name(args: Any) -> str:
    """What a run trains, in words: one seed, as "seed 3", or several, as "4 seeds"."""
    seeds = getattr(args, "seeds", None)
    return f"seed {args.seed}" if seeds is None else f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"


def command(script: str, args: Any, **changes: Any) -> str:
    """The command line of `args` with `changes`: its seeds, and every training flag off its default."""
    defaults, seeds = training_args(type(args)()), getattr(args, "seeds", None)
    words = start(script) + (["--seed", str(args.seed)] if seeds is None else ["--seeds", *map(str, seeds)])
    for name, value in {**training_args(args), **changes}.items():
        if name in ("seed", "seeds") or value == defaults[name]:
            continue
        if isinstance(value, bool):
            words.append(flag_name(name) if value else flag_name(name).replace("--", "--no-", 1))
        else:
            words += [flag_name(name), str(value)]
    return shlex.join(words)


def check_ranges(args: Any) -> None:
    """Refuse a flag outside its range. What depends on more than one flag is each script's own to check."""
    for names, fits, wanted in (
        (("num_envs", "num_steps", "num_minibatches", "update_epochs", "hidden_dim", "eval_max_steps",
          "checkpoint_every", "threads", "log_every", "memory_size", "bptt_length",
          "frame_stack", "demo_episodes", "episodes"),
         lambda x: x >= 1, "1 or more"),
        (("seed", "learning_rate", "ent_coef", "vf_coef", "max_grad_norm", "eval_episodes",
          "pretrain_epochs", "discriminator_updates", "action_history", "action_rate_cost",
          "action_smoothness_cost", "mirror_coef"),
         lambda x: 0 <= x < float("inf"), "0 or more"),
        (("gamma", "gae_lambda"), lambda x: 0 <= x <= 1, "between 0 and 1"),
        (("clip_coef", "target_kl", "adaptive_kl", "divergence_bound", "base_gain", "timeout"),
         lambda x: x is None or 0 < x < float("inf"), "above 0"),
        (("log_std_init",), lambda x: abs(x) < float("inf"), "a finite number"),
    ):  # fmt: skip
        for name in names:
            value = getattr(args, name, None)
            if hasattr(args, name) and not fits(value):
                raise Refusal(f"{flag_name(name)} {value} cannot be: it takes {wanted}")
    compiler = any(map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++", "cl")))
    if getattr(args, "compile", False) and args.eval_only is None and not compiler:
        raise Refusal("--compile needs a C++ compiler: install g++ or leave it out")
    try:
        torch.zeros(1, device=args.device).tolist()
    except Exception as error:  # each kind of device is missing in a way of its own
        raise Refusal(
            f"--device {args.device} cannot be used here ({one_line(error)}): try --device cpu"
        ) from None


def read_checkpoint(folder: str | Path, script: str | None, flag: str) -> dict[str, Any]:
    """The checkpoint in a run's folder. Raises Refusal where there is none, or it is another script's; with
    None it may be any script's."""
    path = Path(folder) / "checkpoint.pt"
    begin = f", or --out {folder} to begin one there" if flag == "--resume" else ""
    check(path.is_file(), f"{flag} {folder} has no checkpoint.pt: give it the folder of a run{begin}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        owner = checkpoint["script"]
    except Exception as error:
        raise Refusal(f"{flag} {folder}: its checkpoint.pt cannot be read ({one_line(error)})") from None
    check(
        script in (owner, None), f"{flag} {folder} is a run of {script_file(owner)}: use that script for it"
    )
    seeds = checkpoint.get("args", {}).get("seeds")
    one = seeds and Path(folder) / f"seed{seeds[0]}"
    check(seeds is None or flag == "--resume", f"{flag} {folder} holds several seeds, each a run: give {one}")
    return checkpoint


def load_checkpoint(args: Any, script: str) -> dict[str, Any]:
    """The checkpoint that --resume or --eval-only names. Raises Refusal where a training flag differs from
    the saved run's; only the length of a resumed run and the device of an evaluation may."""
    both = args.resume is not None and args.eval_only is not None
    check(not both, "--resume and --eval-only: give only one of the two")
    name, free = ("resume", "total_timesteps") if args.resume is not None else ("eval_only", "device")
    checkpoint = read_checkpoint(getattr(args, name), script, flag_name(name))
    for field, value in training_args(args).items():
        saved = checkpoint["args"].get(field, value)
        if field != free and value != saved:
            raise Refusal(
                f"{flag_name(name)} takes {flag_name(field)} from the saved run, where it is {saved}: "
                f"leave {flag_name(field)} out, or start a new run"
            )
    return checkpoint


def saved_args(args_class: type, checkpoint: dict[str, Any], **changes: Any) -> Any:
    """The Args that a checkpoint was trained with; `changes` on top."""
    known = {field.name for field in dataclasses.fields(args_class)}
    return args_class(**{**{k: v for k, v in checkpoint["args"].items() if k in known}, **changes})


def parse_args(args_class: type, script: str, doc: str) -> Any:
    """Read the command line. With --resume or --eval-only, flags that are not given are the saved run's."""
    # Wrapped here, since tyro does not; and indented, since tyro joins lines that begin with a letter.
    doc = textwrap.fill(doc.splitlines()[0], shutil.get_terminal_size().columns, subsequent_indent="  ")
    args = tyro.cli(args_class, description=doc)
    for name in ("resume", "eval_only"):
        folder = getattr(args, name)
        if folder is not None:
            saved = saved_args(args_class, read_checkpoint(folder, script, flag_name(name)), **{name: folder})
            args = tyro.cli(args_class, description=doc, default=saved)
    return args


@contextmanager
def command_line() -> Iterator[None]:
    """Around a script's main: a refusal is its sentence on stderr and exit status 2; a run that stopped at a
    non-finite number or could not write a file, its sentence and 1; Ctrl-C before training has begun, 130; a
    pipe that nobody reads on, 141."""
    try:
        yield
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        sys.exit(2)
    except (NonFinite, CannotWrite, EnvironmentFailed, RankFailed) as stop:
        if isinstance(stop, EnvironmentFailed) and not isinstance(stop.__cause__, Refusal):
            raise  # its own traceback says where
        print(stop, file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # nobody reads on, as after `| head`: what is still to be printed goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
