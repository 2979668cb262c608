"""Run a function on several real worker processes and get their results back.

Workers are forked from a server that has torch loaded already, so a world of four starts in a fraction of a
second. They meet in a private file. The first failure ends the others, and its traceback is raised here; of a process
that dies without one, its exit code or signal, and the lines that faulthandler has written. A deadline ends all of
them; whoever is left over at the end is killed and reported.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from shoal.errors import ShoalError
from shoal.world.failure import end_on_mismatch
from shoal.world.launch import Launch
from shoal.world.private_folder import private_folder
from shoal.world.world import World

T = TypeVar("T")

PRELOADED = ["torch", "torch._dynamo", "shoal.train.run", "pytest", "hypothesis"]
"""What workers and the modules of tests import; what is not installed is passed over."""
_END_SECONDS = 5.0
"""How long a process may take to end after its last word."""


class SpawnError(AssertionError):
    """A worker failed, or time ran out."""


def warm() -> ForkServerContext:
    """Processes of this context are forked from one that has imported what most of them need."""
    context = multiprocessing.get_context("forkserver")
    if not set(PRELOADED) <= set(forkserver._forkserver._preload_modules):  # type: ignore[attr-defined]
        context.set_forkserver_preload(PRELOADED)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return context


def preload(*modules: str) -> None:
    """Let processes from now on be forked from one that has imported these too: else each imports them anew."""
    known: list[str] = forkserver._forkserver._preload_modules  # type: ignore[attr-defined]
    if not set(modules) <= set(known):
        wanted = dict.fromkeys([*PRELOADED, *known, *modules])
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(wanted))
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        forkserver.ensure_running()


def spawn(
    function: Callable[..., T],
    workers: int,
    *args: object,
    timeout: float = 120.0,
    hosts: Sequence[str] | None = None,
    backend: str = "auto",
) -> list[T]:
    """`function(world, *args)` on every one of `workers` processes; its results in rank order.

    `hosts` names the host that each rank counts as: ["a", "a", "b", "b"] makes two hosts of two workers.
    `function` must be importable (a module-level function), because workers import it.
    """
    context = warm()
    with private_folder() as private:
        folder = private.path
        launches = [
            Launch(rank, workers, rank, workers, f"file://{folder}/store", hosts[rank] if hosts else "")
            for rank in range(workers)
        ]
        pipes = [context.Pipe(duplex=False) for _ in launches]
        processes = [
            context.Process(
                target=_work, args=(sender, launch, backend, _crash_file(folder, launch.rank), function, args),
                daemon=True,
            )
            for (_, sender), launch in zip(pipes, launches, strict=True)
        ]  # fmt: skip
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            receivers = [receiver for receiver, _ in pipes]
            deadline = time.monotonic() + timeout
            results: list[T] = _collect(
                receivers, deadline, timeout, lambda rank: _last_word(processes[rank], folder, rank)
            )
        except BaseException:
            _kill(processes)
            raise
        left = [process for process in processes if not _ended(process)]
        _kill(left)
        if left:
            raise SpawnError(f"{len(left)} workers answered and did not end: pids {[p.pid for p in left]}")
        return results


def _work(
    sender: Connection,
    launch: Launch,
    backend: str,
    crash_file: str,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    os.environ["SHOAL_HOST"] = launch.host
    faulthandler.enable(open(crash_file, "w"))  # noqa: SIM115 open for as long as the process lives
    end_on_mismatch(partial(_end_now, sender))
    world = None
    try:
        world = World.open(launch, backend)
        result = function(world, *args)
        world.barrier()
        _send(sender, True, result)
    except BaseException:
        _send(sender, False, traceback.format_exc())
    finally:
        if world is not None:
            world.close()


def _end_now(sender: Connection, error: ShoalError) -> None:
    """From another thread, while the function waits for peers that will not come."""
    _send(sender, False, f"{type(error).__name__}: {error}")
    os._exit(error.exit_code)


def _send(sender: Connection, good: bool, value: object) -> None:
    # Plain pickle through a private pipe from our own child; Connection.send would pass tensors as open files,
    # which are gone when the child is.
    sender.send_bytes(pickle.dumps((good, value)))


def _collect(
    receivers: list[Connection], deadline: float, timeout: float, last_word: Callable[[int], str]
) -> list[Any]:
    """The results by rank. `last_word`: of a process that has ended without one through its pipe."""
    results: dict[int, Any] = {}
    pending = dict(enumerate(receivers))
    while pending:
        ready = wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise SpawnError(f"ranks {sorted(pending)} did not answer within {timeout:.0f} s")
        failures = []
        for rank, receiver in list(pending.items()):
            if receiver not in ready:
                continue
            del pending[rank]
            try:
                good, value = pickle.loads(receiver.recv_bytes())
            except EOFError:
                good = False
                value = last_word(rank)
            if good:
                results[rank] = value
            else:
                failures.append(f"rank {rank} failed:\n{value}")
        if failures:
            # A lost peer is a consequence: the cause is what to show.
            failures.sort(key=lambda text: "PeerLost" in text or "Connection" in text)
            raise SpawnError(failures[0])
    return [results[rank] for rank in range(len(receivers))]


def _last_word(process: BaseProcess, folder: str, rank: int) -> str:
    """How a process ended that has sent nothing."""
    process.join(_END_SECONDS)
    code = process.exitcode
    if code is None:
        return f"pid {process.pid} has closed its pipe without a word, and still runs"
    said = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    crash = Path(_crash_file(folder, rank))
    lines = crash.read_text(errors="replace") if crash.exists() else ""
    return f"pid {process.pid} {said} without a word\n{lines}".rstrip()


def _crash_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"crash-{rank}")


def _ended(process: BaseProcess) -> bool:
    process.join(_END_SECONDS)
    return not process.is_alive()


def _kill(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
