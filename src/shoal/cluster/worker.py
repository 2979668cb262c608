"""What runs inside a worker: prepare the process, run the script as `python script.py` would, report a failure.

A worker is either forked from the launcher, so that all workers share one import of torch, or a fresh
interpreter (`python -m shoal.cluster.worker TASK`) where forking would not be safe. Both meet in `run`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import multiprocessing.process
import multiprocessing.util
import os
import runpy
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import NoReturn, TextIO

from shoal.cluster import report, stacks
from shoal.errors import ShoalError
from shoal.world.failure import end_on_mismatch

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
AGAIN_TIMES = 5
AGAIN_SECONDS = 20.0
"""A process that was replaced AGAIN_TIMES within AGAIN_SECONDS is not replaced once more: it fails by itself."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Task:
    """What a worker gets from its launcher."""

    rank: int
    script: str
    """Absolute, so that a change of folder does not lose it."""
    args: tuple[str, ...]
    environment: Mapping[str, str]
    """What is added to the launcher's own environment."""
    folder: str
    """The private folder, for the report of a failure."""
    launcher: int
    """The launcher's process id."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def from_json(text: str) -> Task:
    """Read back what `Task.to_json` wrote."""
    fields = json.loads(text)
    return Task(**{**fields, "args": tuple(fields["args"])})


def run(task: Task) -> NoReturn:
    """Run the task's script in this process and end the process, without any cleanup of the launcher's."""
    code = 1
    try:
        _settle(task)
        end_on_mismatch(partial(_end_now, task))
        code = _run_script(task)
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _run_script(task: Task) -> int:
    try:
        runpy.run_path(task.script, run_name="__main__")
        _end_orderly()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            _end_orderly()
            return 0
        # No exit handlers on this path: they may wait for peers that wait for this worker.
        _flush()
        said = report.describe(error, task.rank, task.script)
        report.write(task.folder, said)
        return said.exit_code
    return 0


def _end_now(task: Task, error: ShoalError) -> None:
    """From another thread, while the script waits for peers that will not come."""
    report.write(task.folder, report.describe(error, task.rank, task.script))
    _flush()
    os._exit(error.exit_code)


def _end_orderly() -> None:
    """What the interpreter does at its end: wait for threads, then call the exit handlers."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what C code has printed: os._exit would drop it


def _settle(task: Task) -> None:
    """Set up signals, environment, streams and arguments. Signals first: until then they are blocked."""
    _take_signals()
    die_with(task.launcher)
    os.environ.update(task.environment)
    sys.stdout = _text(1, sys.__stdout__)
    sys.stderr = _text(2, sys.__stderr__)
    # A crash in C code then shows the Python line it came from.
    faulthandler.enable(file=sys.stderr, all_threads=False)
    stacks.register(task.folder, task.rank)
    # Sockets of multiprocessing, such as those of loader processes, lie where nothing outlives the job.
    multiprocessing.process.current_process()._config["tempdir"] = task.folder  # type: ignore[attr-defined]
    sys.argv = [task.script, *task.args]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(task.script)


def _take_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        if (
            signal.getsignal(number) is not signal.SIG_IGN
        ):  # `nohup` and `&` in a script ignore some: keep that
            signal.signal(number, _interrupt if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    # Ctrl-C reaches a worker twice, from terminal and launcher; the second must not break into cleanup.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


_interrupt.shoal = True  # type: ignore[attr-defined]  # a run may put a handler of its own in its place


def die_with(launcher: int) -> None:
    """Let the kernel kill this worker when the launcher ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != launcher:  # it ended before the line above
        os._exit(128 + signal.SIGKILL)


def _text(descriptor: int, before: TextIO | None) -> TextIO:
    """A fresh text stream: line by line, so that a worker that is killed has shown what it printed."""
    encoding = before.encoding if before is not None else None
    errors = before.errors if before is not None else None
    return open(descriptor, "w", buffering=1, encoding=encoding, errors=errors, closefd=False)


def leave_parent(threads: str) -> None:
    """In a forked worker, undo what it has inherited from the launcher and a fresh interpreter would not have."""
    gc.freeze()  # the collector leaves inherited objects alone, so their memory stays shared
    # The parent's exit handlers and finalizers are its own: they would remove its temporary folders.
    atexit._clear()
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()  # else all workers would draw the same numbers
    import torch

    # OpenMP has read its variable when the launcher imported torch, perhaps for another job.
    if threads.isdigit() and torch.get_num_threads() != int(threads):
        torch.set_num_threads(int(threads))


if __name__ == "__main__":
    run(from_json(sys.argv[1]))
