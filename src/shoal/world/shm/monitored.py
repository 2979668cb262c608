"""A barrier that says who did not come, in the words of gloo's: torch's `monitored_barrier`.

Each rank counts in its own line of the control page which of these barriers it has reached; rank 0 reads them all and
writes whether all have come. It stands beside the queue of collectives: it is there to find out why that is stuck.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import DistBackendError

from shoal.world.shm.flags import Flags

_PAUSE = 0.0005


def monitored_barrier(flags: Flags, seconds: float, wait_all_ranks: bool) -> None:
    """Return when all ranks have called this; raise on all that have if some have not after that time."""
    number = flags.reach_barrier()
    if flags.rank == 0:
        _lead(flags, number, seconds, wait_all_ranks)
    elif not _comes(lambda: flags.barrier_verdict(number) is not None, seconds) or not flags.barrier_verdict(
        number
    ):
        raise DistBackendError(
            f"Rank {flags.rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
            "from rank 0. Please check rank 0 logs for faulty rank."
        )


def _lead(flags: Flags, number: int, seconds: float, wait_all_ranks: bool) -> None:
    end = time.monotonic() + seconds
    missing: list[int] = []
    for rank in range(1, flags.size):
        left = end - time.monotonic()
        if left <= 0 and not wait_all_ranks:
            flags.end_barrier(number, passed=False)
            raise DistBackendError(f"Rank 0 timed out in monitoredBarrier after {seconds * 1e3:.0f} ms.")
        if not _comes(lambda rank=rank: flags.has_reached(rank, number), left):  # type: ignore[misc]
            missing.append(rank)
            if not wait_all_ranks:
                break
    flags.end_barrier(number, passed=not missing)
    if missing:
        names = ", ".join(map(str, missing))
        raise DistBackendError(
            f"[Rank 0]: Rank{'s' if wait_all_ranks else ''} {names} failed to pass monitoredBarrier in "
            f"{seconds * 1e3:.0f} ms"
        )


def _comes(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() >= end:
            return False
        time.sleep(_PAUSE)
    return True
