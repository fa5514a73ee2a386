"""Several processes that train one agent, started by torchrun: they start, fail and stop together, and rank 0
alone has the run's folder. What they compute together is on the script's page."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # what imports it later, as torch.optim does, has it keep the group alive

from common import cli
from common.console import say
from common.process import on_failure
from common.run_folder import Interrupted, Run

T = TypeVar("T")
STATUS = {"Refusal": 2}  # of a process that ends because another has raised it; else 1
TOLD = (cli.Refusal, cli.NonFinite, cli.CannotWrite)  # one sentence, which rank 0 says for all


@contextlib.contextmanager
def process_group(timeout: float = 20.0) -> Iterator[None]:
    """Inside, torch.distributed's group of all processes: those that torchrun has started, or this one alone.
    Within another such block it is that one's. Tensors on the CPU go by gloo, on CUDA by NCCL, and there each
    process of a machine has a device of its own."""
    if dist.is_initialized():
        yield
        return
    patience = timedelta(seconds=timeout)
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        dist.init_process_group(timeout=patience)
    else:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, timeout=patience)
    try:
        yield
    finally:
        dist.destroy_process_group()


def everyone(value: T) -> list[T]:
    """Every rank's `value`, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def all_envs(x: torch.Tensor) -> torch.Tensor:
    """The columns of every rank, one an environment, in their order, on every rank: (T, n, ...) ->
    (T, N, ...)."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def own_share(args: Any) -> slice:
    """This rank's environments among `args.num_envs`. Raises Refusal where they do not divide into equal
    shares, and for a device that the processes cannot use together."""
    rank, world, total = dist.get_rank(), dist.get_world_size(), args.num_envs
    more = f"give --num-envs {-(-total // world) * world}, or start {math.gcd(total, world)}"
    cli.check(total % world == 0, f"--num-envs {total} does not divide among {world} processes: {more}")
    device = torch.device(args.device)
    known = f"--device {args.device} has no backend in torch.distributed: give --device cpu or cuda"
    cli.check(device.type in ("cpu", "cuda"), known)
    if device.type == "cuda":
        here, devices = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
        fits = here == 1 or (device.index is None and here <= devices)
        one_each = f"give --device cuda and torchrun --nproc-per-node {devices} or fewer"
        cli.check(fits, f"--device {args.device}: {here} processes of a machine need a GPU each: {one_each}")
    share = total // world
    return slice(rank * share, (rank + 1) * share)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What raises inside on one rank ends all: none waits for one that is gone. An environment's error is
    raised where it was, with its traceback, and on rank 0 as RankFailed; what one sentence says is raised on
    rank 0 alone, naming the rank. The others leave in silence."""
    failure: BaseException | None = None
    try:
        yield
    except Interrupted:  # asked to stop at once
        raise
    except (Exception, SystemExit) as error:
        failure = error
    failed = torch.tensor(float(failure is not None))
    dist.all_reduce(failed)
    if not failed:
        return
    me, told = dist.get_rank(), everyone(failure and (type(failure).__name__, str(failure)))
    first, (kind, text) = next((rank, words) for rank, words in enumerate(told) if words)
    if isinstance(failure, cli.EnvironmentFailed) and len(told) > 1:
        raise cli.EnvironmentFailed(f"rank {me}: {failure}") from failure
    if failure is not None and (me == 0 or not isinstance(failure, (*TOLD, SystemExit))):
        raise failure
    if me > 0:
        raise SystemExit(int(text) if kind == "SystemExit" else STATUS.get(kind, 1)) from failure
    known = {error.__name__: error for error in TOLD}
    text = text if kind in (*known, "EnvironmentFailed") else f"{kind}: {text}"
    raise known.get(kind, cli.RankFailed)(f"rank {first}: {text}")


def from_rank_0(make: Callable[[], T]) -> T:
    """What `make()` returns on rank 0, where alone it is called, on every rank."""
    if dist.get_world_size() == 1:
        return make()
    values: list[Any] = [None]
    with together():
        if dist.get_rank() == 0:
            values = [make()]
    dist.broadcast_object_list(values)
    return values[0]


def lost(error: BaseException | None) -> bool:
    """Whether `error` came out of torch.distributed: another process is gone, or did not answer in time."""
    inside, trace = str(Path(dist.__file__).parent), error and error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename.startswith(inside):
            return True
        trace = trace.tb_next
    return False


class Saved:
    """The state of a part of the checkpoint, wherever the part itself is."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


class SharedRun(Run):
    """The `Run` of all processes. Rank 0 alone has the folder, the console and the recording; the others hear
    from it what a checkpoint holds, and give it their environments, "env_4" and so on, to save. A signal that
    reaches one of them stops all after the same iteration.

    Every process calls `restore`, and `save` after each iteration; what is written or printed in `log`,
    `stop_if_asked`, `finish` and `report` is rank 0's.
    """

    def __init__(self, script: str, args: Any, num_parameters: int) -> None:
        self.rank, world = dist.get_rank(), dist.get_world_size()
        dist.group.WORLD.set_timeout(timedelta(seconds=args.timeout))
        with together():
            if self.rank == 0:
                super().__init__(script, args, num_parameters)
                if world > 1:
                    say(f"{world} processes, {args.num_envs // world} of the environments in each")
        if self.rank > 0:
            self.args, self.num_iterations = args, args.total_timesteps // (args.num_envs * args.num_steps)
            self.checkpoint, self.recording, self.training = None, None, True
            self.signal, self.stopping = 0, 0
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, self._on_signal)
                signal.signal(signal.SIGTERM, self._on_signal)
        self.checkpoint = from_rank_0(lambda: self.checkpoint)
        self.iteration = self.checkpoint["iteration"] if self.checkpoint else 0
        on_failure(self.explain)

    def restore(self, state: dict[str, Any]) -> int:
        with together():  # a replay may raise
            if self.checkpoint is not None:
                return super().restore(state)
        return super().restore(state)

    def due(self, iteration: int) -> bool:
        """As Run's, and the signals that have come are agreed on."""
        if iteration != self.iteration:
            asked = torch.tensor(self.signal)
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            self.iteration, self.signal = iteration, int(asked)
            self.stopping = self.signal
        return super().due(iteration)

    def save(self, iteration: int, state: dict[str, Any]) -> None:
        if not self.due(iteration):
            return
        with together():
            own = {name: part.state_dict() for name, part in state.items()}
        envs = everyone({name: content for name, content in own.items() if name.startswith("env_")})
        with together():
            if self.rank == 0:
                whole = {name: content for part in (own, *envs) for name, content in part.items()}
                super().save(iteration, {name: Saved(content) for name, content in whole.items()})
            else:
                self.end_training(iteration)

    def log(self, *metrics: dict[str, Any]) -> None:
        if self.rank == 0:
            super().log(*metrics)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.rank == 0:
            super()._on_signal(number, frame)
        elif self.signal or not self.training:
            raise Interrupted(128 + number)
        self.signal = number

    def stop_if_asked(self) -> None:
        if self.rank == 0:
            super().stop_if_asked()
        elif self.stopping:
            raise Interrupted(128 + self.stopping)

    def explain(self, error: Exception) -> Exception | None:
        if lost(error):
            reason = re.sub(r"^\[\S+\] |\. .*", "", cli.one_line(error))
            what = f"another rank is gone, or did not answer within --timeout {self.args.timeout:g}"
            error = cli.RankFailed(f"rank {self.rank}: {what}; torchrun's report names it ({reason})")
        if self.rank > 0:
            return error if isinstance(error, cli.RankFailed) else None
        if isinstance(error, cli.RankFailed):
            with contextlib.suppress(OSError):
                self.close()
            return cli.RankFailed(f"iteration {self.iteration + 1}: {error}\n{self._what_stays()}")
        return super().explain(error)

    def close(self) -> None:
        if self.rank == 0:
            super().close()
