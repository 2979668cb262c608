"""What a failed worker says about itself, and which of several failures came first.

One worker fails and a moment later all others fail too, because they were talking to it. Only the first cause
is worth reading, so each worker leaves a small report with the time and its own opinion whether it is a cause
or a consequence, and the launcher chooses.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Literal

from shoal.errors import PeerLost, ShoalError, WorkerFailed
from shoal.world.failure import is_lost_peer, own_frames

Kind = Literal["config", "error", "consequence"]


@dataclass(frozen=True)
class Report:
    """Why a worker failed, in its own words."""

    rank: int
    time: float
    """CLOCK_MONOTONIC, which all processes of a host share."""
    kind: Kind
    exit_code: int
    message: str
    traceback: str = ""
    """Empty where the sentence says everything."""


@dataclass(frozen=True)
class Ending:
    """How a worker ended, as the launcher saw it."""

    rank: int
    pid: int
    time: float
    code: int
    """The exit code; minus the signal's number if a signal killed it."""
    report: Report | None = None
    tail: str = ""
    """The last lines of its output, if nobody has seen them yet."""


def describe(error: BaseException, rank: int, script: str) -> Report:
    """The report of a worker whose script raised `error`."""
    now = time.monotonic()
    if isinstance(error, ShoalError):
        kind: Kind = "consequence" if isinstance(error, PeerLost) else "config"
        return Report(rank, now, kind, error.exit_code, str(error))
    if isinstance(error, SystemExit):
        said = error.code if isinstance(error.code, str) else f"the script called sys.exit({error.code})."
        return Report(rank, now, "error", error.code if isinstance(error.code, int) else 1, said)
    if isinstance(error, KeyboardInterrupt):
        return Report(rank, now, "error", 128 + signal.SIGINT, "interrupted by SIGINT.")
    kind = "consequence" if is_lost_peer(error) else "error"
    message = "".join(traceback.format_exception_only(error)).strip()
    lines = traceback.format_exception(type(error), error, own_frames(_from_script(error, script)))
    return Report(rank, now, kind, 1, message, "".join(lines))


def _from_script(error: BaseException, script: str) -> TracebackType | None:
    """The traceback from the script's own first frame: what lies above is ours and runpy's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    if trace is None and not isinstance(error, SyntaxError):
        return error.__traceback__
    return trace


def write(folder: str, report: Report) -> None:
    """Leave `report` in `folder`, whole or not at all."""
    path = _path(folder, report.rank)
    with open(path + ".part", "w", encoding="utf-8", errors="backslashreplace") as file:
        json.dump(asdict(report), file)
    os.rename(path + ".part", path)


def read(folder: str, rank: int) -> Report | None:
    """The report that worker `rank` left in `folder`, if it left one."""
    try:
        with open(_path(folder, rank), encoding="utf-8") as file:
            return Report(**json.load(file))
    except FileNotFoundError:
        return None


def _path(folder: str, rank: int) -> str:
    return os.path.join(folder, f"report-{rank}.json")


def first_cause(endings: Sequence[Ending], size: int) -> WorkerFailed:
    """The error to show for a job in which the workers of `endings` ended badly.

    >>> alone = Report(0, 1.9, "consequence", 1, "RuntimeError: Connection closed by peer")
    >>> print(first_cause([Ending(0, 10, 2.0, 1, alone), Ending(3, 13, 1.0, -9)], size=4))
    worker 3 of 4 (pid 13) was killed by SIGKILL (out of memory? see dmesg).
    """
    bad = [ending for ending in endings if ending.code != 0]
    first = min(bad, key=_order)
    if first.report is not None:
        # All failed alike: show the lowest rank, whose output the user has most likely seen already.
        alike = [e for e in bad if e.report is not None and e.report.message == first.report.message]
        first = min(alike, key=lambda ending: ending.rank)
    failed = _phrase(first, size)
    early = [str(ending.rank) for ending in endings if ending.code == 0]
    if early and first.report is not None and first.report.kind == "consequence":
        # No cause but a missing peer: the usual reason is a loop that is shorter on some workers.
        who = f"Before that, worker {', '.join(early)} ended without an error"
        return WorkerFailed(f"{failed}\n{who}: do all take the same number of steps?", failed.exit_code)
    return failed


def _order(ending: Ending) -> tuple[int, float]:
    report = ending.report
    if report is not None:
        return (2 if report.kind == "consequence" else 1, report.time)
    # Nobody gets SIGKILL for what another worker did, whereas the others' errors may follow from its death.
    return (0 if ending.code == -signal.SIGKILL else 1, ending.time)


def _phrase(ending: Ending, size: int) -> WorkerFailed:
    name = f"worker {ending.rank} of {size}"
    report = ending.report
    if report is None:
        if ending.code < 0:
            hint = " (out of memory? see dmesg)" if ending.code == -signal.SIGKILL else ""
            said = f"{name} (pid {ending.pid}) was killed by {_signal_name(-ending.code)}{hint}."
            return WorkerFailed(said + _quote(ending), 128 - ending.code)
        said = f"{name} (pid {ending.pid}) ended with exit code {ending.code} and left no report."
        return WorkerFailed(said + _quote(ending), ending.code)
    if report.traceback:
        output = f"{_quote(ending)}\n\n" if ending.tail else "\n"
        return WorkerFailed(f"{name} failed:{output}{report.traceback.rstrip()}", report.exit_code)
    if report.kind == "error":
        return WorkerFailed(f"{name} failed: {report.message}{_quote(ending)}", report.exit_code)
    return WorkerFailed(report.message, report.exit_code, refusal=report.kind == "config")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _quote(ending: Ending) -> str:
    if not ending.tail:
        return ""
    lines = "\n".join(f"  | {line}" for line in ending.tail.splitlines())
    return f"\nThe last lines it printed:\n{lines}"
