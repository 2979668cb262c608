"""What a failed worker says about itself, and which of several failures came first.

One worker fails and a moment later all others fail too, because they were talking to it. Only the first cause
is worth reading, so each worker leaves a small report with the time and whether it takes itself for a cause or
a consequence, and the launcher chooses. The launcher adds where the worker was: host, step and phase.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from types import TracebackType
from typing import Literal, get_args

from shoal.errors import Loss, PeerLost, ShoalError, WorkerFailed
from shoal.world.failure import is_lost_peer, own_frames
from shoal.world.progress_page import Phase, Place

Kind = Literal["config", "error", "consequence"]
_LASTING = (
    FileNotFoundError,
    FileExistsError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)
"""Errors of the system that come again as long as nobody changes something."""
LOST_PEER = "a lost peer"
_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MOST_BYTES = 2**20
"""Of a report: a traceback is shorter."""


@dataclass(frozen=True)
class Report:
    """Why a worker failed, written by the worker."""

    rank: int
    time: float
    """CLOCK_MONOTONIC, which all processes of a host share."""
    kind: Kind
    exit_code: int
    message: str
    traceback: str = ""
    """Empty where the sentence says everything."""
    passing: str = ""
    """The kind of an error that another start may not meet, as "ConnectionResetError"; empty for all others."""


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
    place: Place = field(default_factory=Place)
    """Where in its training it was."""
    host: str = ""

    @property
    def is_consequence(self) -> bool:
        """Whether the worker itself says that another one is the cause."""
        return self.report is not None and self.report.kind == "consequence"


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
    passing = type(error).__name__ if _may_pass(error) else ""
    return Report(rank, now, kind, 1, message, "".join(lines), passing)


def _may_pass(error: BaseException) -> bool:
    """Whether an error comes from the machine and not from the program: a device, a network, a killed helper."""
    if isinstance(error, OSError | EOFError):
        return not isinstance(error, _LASTING)
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error) and "killed" in str(error)


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
        with open(_path(folder, rank), encoding="utf-8", errors="replace") as file:
            return _checked(json.loads(file.read(_MOST_BYTES)))
    except (
        OSError,
        ValueError,
        TypeError,
        RecursionError,
    ):  # none, or half of one from a worker that is gone
        return None


def _checked(given: object) -> Report:
    """A report whose fields are what they should be; ValueError or TypeError for anything else."""
    if not isinstance(given, dict):
        raise ValueError("a report is an object")
    report = Report(**given)
    if report.kind not in get_args(Kind) or not all(
        type(getattr(report, field.name)) in _TYPES[str(field.type)] for field in fields(Report)
    ):
        raise ValueError("a field of a report is of another kind")
    return report


_TYPES = {"int": (int,), "float": (int, float), "str": (str,), "Kind": (str,)}


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
    if first.is_consequence:
        return _no_cause(first, [ending for ending in endings if ending.code == 0], endings, size)
    return _phrase(first, endings, size)


def _order(ending: Ending) -> tuple[int, float]:
    if ending.report is not None:
        return (2 if ending.is_consequence else 1, ending.report.time)
    # Nobody gets SIGKILL for what another worker did, whereas the others' errors may follow from its death.
    return (0 if ending.code == -signal.SIGKILL else 1, ending.time)


def _no_cause(lost: Ending, early: Sequence[Ending], endings: Sequence[Ending], size: int) -> WorkerFailed:
    """Somebody waited for a worker that failed nowhere: it has left early, or it was on another host."""
    assert lost.report is not None
    code = PeerLost.exit_code
    if early:
        first = min(early, key=lambda ending: ending.time)
        said = f"{_name(first, size)} ended without an error"  # as by exit(0)
        also = f" (so did {', '.join(str(e.rank) for e in early if e is not first)})" if early[1:] else ""
        said += f"{_where(first)}{also}, while worker {lost.rank} waited for it{_where(lost)}"
        remedy = (
            "all workers take the same number of steps: does its script call exit(), or leave the loop early?"
        )
        return WorkerFailed(f"{said}; {remedy}{_quote(first)}", code)
    sentence = lost.report.message.strip().rstrip(".")
    said = f"{_name(lost, size)}{_where(lost)} has lost another worker: {sentence}. "
    said += (
        "No worker of this host is the cause: see what the launchers of the other hosts say, and whether the "
    )
    said += "network between them is up."
    return WorkerFailed(said + _remedy(lost, endings), code, loss=loss_of(lost, said, LOST_PEER))


def loss_of(ending: Ending, sentence: str, cause: str) -> Loss:
    """What another start of the workers has to know of this end."""
    place = ending.place
    return loss_at(place, sentence, ending.rank, ending.pid, cause)


def loss_at(place: Place, sentence: str, rank: int, pid: int, cause: str) -> Loss:
    """The same of a worker that is at this place."""
    return Loss(
        sentence,
        rank,
        cause,
        place=str(place),
        step=place.step,
        begun=place.phase != Phase.STARTING,
        pid=pid,
        phase=place.phase.name.lower(),
        log=place.log,
        plan=place.plan,
        samples=place.samples if place.phase.in_step else "",
    )


def _name(ending: Ending, size: int) -> str:
    about = f"host {ending.host}, pid {ending.pid}" if ending.host else f"pid {ending.pid}"
    return f"worker {ending.rank} of {size} ({about})"


def _where(ending: Ending) -> str:
    said = within(ending.place)
    return f" {said}" if said else ""


def within(place: Place) -> str:
    """As "in step 7, loading data"; empty where no run has begun.

    >>> within(Place(Phase.BETWEEN, step=7))
    "after step 7, in the script's own code"
    """
    if place.phase == Phase.STARTING:
        return ""
    return f"in {place}" if place.phase.in_step else str(place)


def _phrase(ending: Ending, endings: Sequence[Ending], size: int) -> WorkerFailed:
    name = _name(ending, size)
    report = ending.report
    if report is None:
        if ending.code < 0:
            hint = " (out of memory? see dmesg)" if ending.code == -signal.SIGKILL else ""
            cause = signal_name(-ending.code)
            said = f"{name} was killed by {cause}{_where(ending)}{hint}."
            # Who sends one of these wants it to end.
            loss = None if -ending.code in _REQUESTS else loss_of(ending, said + _quote(ending), cause)
            return WorkerFailed(
                said + _remedy(ending, endings) + _quote(ending), 128 - ending.code, loss=loss
            )
        said = f"{name} ended with exit code {ending.code}{_where(ending)}; it left no report: the script "
        said += "or a library has called os._exit."
        loss = loss_of(ending, said + _quote(ending), f"exit code {ending.code}")
        return WorkerFailed(said + _remedy(ending, endings) + _quote(ending), ending.code, loss=loss)
    remedy = _remedy(ending, endings).strip()
    if report.traceback:
        output = f"{_quote(ending)}\n\n" if ending.tail else "\n"
        after = f"\nshoal: {remedy}" if remedy else ""
        said = f"{name} failed{_where(ending)}:{output}{report.traceback.rstrip()}"
        loss = loss_of(ending, said, report.passing) if report.passing else None
        return WorkerFailed(said + after, report.exit_code, loss=loss)
    if report.kind == "error":
        said = f"{name} failed{_where(ending)}: {report.message}{' ' if remedy else ''}{remedy}"
        return WorkerFailed(said + _quote(ending), report.exit_code)
    return WorkerFailed(report.message, report.exit_code, refusal=report.kind == "config")


def _remedy(ending: Ending, endings: Sequence[Ending]) -> str:
    said = resume(ending.place, [each.place for each in endings])
    return f" {said}" if said else ""


def resume(place: Place, others: Sequence[Place] = ()) -> str:
    """What is saved of a run of which a worker is at this place, and how to go on; empty if nothing can be lost.

    `others`: of the same run; the first worker knows what is on disk.

    >>> resume(Place(Phase.BETWEEN, step=9, folder="runs/first"), [Place(saved=8)])
    'The same command goes on from step 8, the newest checkpoint in runs/first.'
    """
    if not place.step:
        return ""
    if not place.folder:
        return (
            "Nothing was saved: with checkpoint=FOLDER and checkpoint_every=N the same command would go on."
        )
    saved = max(each.saved for each in (place, *others))
    if not saved:
        return f"The same command goes on from the newest checkpoint in {place.folder}, or anew if there is none."
    return f"The same command goes on from step {saved}, the newest checkpoint in {place.folder}."


def signal_name(number: int) -> str:
    """As "SIGKILL"."""
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def _quote(ending: Ending) -> str:
    if not ending.tail:
        return ""
    lines = "\n".join(f"  | {line}" for line in ending.tail.splitlines())
    return f"\nThe last lines it printed:\n{lines}"
