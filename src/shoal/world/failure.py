"""How a worker ends when something goes wrong, where no launcher of ours watches too (python, torchrun)."""

from __future__ import annotations

import atexit
import builtins
import os
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from types import TracebackType

from shoal.errors import CallMismatch, PeerLost, ShoalError

# How torch.distributed, gloo and the stores say that the other end has gone.
_LOST_PEER = (
    "connection reset",
    "connection closed",
    "connection refused",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "failed to recv, got 0 bytes",
)

YIELD_CODE = 75
"""The exit code of a worker that was asked to make way for another number of workers."""
SECOND_SECONDS = 0.5
"""So long other ranks leave the word to rank 0, which mostly says the same, and torchrun ends them with it."""
_OURS = str(Path(__file__).parents[1]) + os.sep
_PACKAGES = sysconfig.get_path("purelib") + os.sep
_TORCH = os.path.join(_PACKAGES, "torch") + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep


def is_interactive() -> bool:
    """Whether somebody types into this process: at a prompt, with `python -i`, or in a notebook."""
    return hasattr(sys, "ps1") or bool(sys.flags.inspect) or hasattr(builtins, "get_ipython")


def end_in_one_sentence(rank: int) -> None:
    """Let an uncaught ShoalError end the process with its sentence and its exit code, without a traceback.

    At a prompt it is the sentence alone, and the session goes on.
    """
    before = sys.excepthook
    if getattr(before, "shoal", False):
        return

    def end(error: ShoalError) -> None:
        if rank > 0:
            # One sentence, not one from each rank: rank 0 mostly ends the job before the others speak.
            sleep(SECOND_SECONDS)
        # torch.distributed wraps the hook in one that holds back what goes to sys.stderr.
        print(
            f"shoal: {error}" if rank == 0 else f"shoal: rank {rank}: {error}",
            file=sys.__stderr__,
            flush=True,
        )
        sys.stdout.flush()
        if is_interactive():
            return
        # An excepthook cannot choose the exit code, and peers may be gone: nothing is left to tidy up.
        os._exit(error.exit_code)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ShoalError):
            # The interpreter prints the trace that the error itself carries.
            before(kind, error.with_traceback(own_frames(trace)), error.__traceback__)
            return
        end(error)

    hook.shoal = True  # type: ignore[attr-defined]
    sys.excepthook = hook
    if not getattr(threading.excepthook, "shoal", False):  # else our launcher has set its own
        end_on_mismatch(end)


def end_on_mismatch(end: Callable[[CallMismatch], None]) -> None:
    """Let `CallMismatch` in a thread, which watches while the script waits in a collective, end the process."""
    before = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if isinstance(args.exc_value, CallMismatch):
            end(args.exc_value)
        else:
            before(args)

    hook.shoal = True  # type: ignore[attr-defined]
    threading.excepthook = hook


def own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame of the user's own code that Shoal has called; all of it if there is none."""
    inner = trace
    while inner is not None and not _file(inner).startswith(_OURS):
        inner = inner.tb_next
    while inner is not None and _is_foreign(_file(inner)):
        inner = inner.tb_next
    return trace if inner is None else inner


def _is_foreign(file: str) -> bool:
    """Whether a file is ours, torch's or Python's own."""
    python = file.startswith(_PYTHON) and "site-packages" not in file
    return python or file.startswith((_OURS, _TORCH))


def _file(trace: TracebackType) -> str:
    return trace.tb_frame.f_code.co_filename


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error says, itself or by its cause, that the other end of a connection has gone."""
    return any(_says_lost(each) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _says_lost(error: BaseException) -> bool:
    if isinstance(error, PeerLost | ConnectionError):
        return True
    # torch.distributed.DistError is a RuntimeError; naming that base keeps torch out of the launcher.
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _LOST_PEER)


def at_exit(method: Callable[[], None]) -> None:
    """Call a method when the script ends, if what it belongs to is still there: a notebook makes many runs."""

    def call() -> None:
        found = held()
        if found is not None:
            found()

    held = weakref.WeakMethod(method, lambda _: atexit.unregister(call))
    atexit.register(call)
