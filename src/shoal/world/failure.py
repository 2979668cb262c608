"""How a worker ends when something goes wrong and no launcher of ours is watching (python, torchrun)."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from shoal.errors import ShoalError


def end_in_one_sentence(rank: int) -> None:
    """Let an uncaught ShoalError end the process with its sentence and its exit code, without a traceback."""
    before = sys.excepthook
    if getattr(before, "shoal", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ShoalError):
            before(kind, error, trace)
            return
        # torch.distributed wraps this hook in one that holds back what goes to sys.stderr.
        print(
            f"shoal: {error}" if rank == 0 else f"shoal: rank {rank}: {error}",
            file=sys.__stderr__,
            flush=True,
        )
        sys.stdout.flush()
        # An excepthook cannot choose the exit code, and peers may be gone: nothing is left to tidy up.
        os._exit(error.exit_code)

    hook.shoal = True  # type: ignore[attr-defined]
    sys.excepthook = hook
