"""What a launcher reads of its workers may be anything: pages, reports, stacks and words about a restart."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.cluster import report, stacks
from shoal.cluster.recovery.retries import Retries
from shoal.errors import ConfigError
from shoal.train.calls.answers import Answers
from shoal.world.launch import Again
from shoal.world.progress_page import BYTES, Phase, Place, ProgressPage

STACK = b'Current thread:\n  File "train.py", line 3 in loss\n  File "x.py", line 9 in _run_script\n'
REPORT = json.dumps(vars(report.Report(1, 2.5, "error", 1, "ValueError: x", "Traceback", "OSError"))).encode()
AGAIN = json.dumps(vars(Again(2, 12.5, "worker 1 was killed", 1, 7))).encode()
ANSWERS = json.dumps([["run.evaluate", [0.5, 10.0, {}]], ["run.log", {"a": 1}]]).encode()


def mutated(draws: random.Random, data: bytes) -> bytes:
    """A few bytes changed, a piece taken out, or one put in twice."""
    made = bytearray(data)
    for _ in range(draws.randrange(1, 6)):
        at, length = draws.randrange(len(made) + 1), draws.randrange(1, 40)
        kind = draws.randrange(4)
        if kind == 0 and at < len(made):
            made[at] = draws.randrange(256)
        elif kind == 1:
            del made[at : at + length]
        elif kind == 2:
            made[at:at] = made[at : at + length]
        else:
            made[at : at + length] = draws.randbytes(length)
    return bytes(made)


def check_page(folder: Path, data: bytes) -> None:
    path = folder / "page"
    path.write_bytes(data[:BYTES].ljust(BYTES, b"\0"))
    place = ProgressPage(str(path)).read()
    assert isinstance(place, Place)
    assert place.step >= 0
    said = f"{place} {report.within(place)} {report.resume(place)}"
    assert len(said) < BYTES
    loss = report.loss_at(place, "lost", 1, 2, "SIGKILL")
    assert Retries(1).after(report.WorkerFailed("x", loss=loss), place.step) is not None


def check_report(folder: Path, data: bytes) -> None:
    (folder / "report-1.json").write_bytes(data)
    found = report.read(str(folder), 1)
    if found is not None:
        ending = report.Ending(1, 10, 2.0, 1, found)
        assert str(report.first_cause([ending], size=2))


def check_stack(folder: Path, data: bytes) -> None:
    (folder / "stack-1").write_bytes(data)
    found = stacks.read(str(folder), 1)
    assert found is None or str(found)


def check_again(folder: Path, data: bytes) -> None:
    del folder
    with suppress(ConfigError):  # in one sentence
        Again.of(data.decode(errors="replace"))


def check_answers(folder: Path, data: bytes) -> None:
    del folder
    try:
        state = json.loads(data)
    except (ValueError, RecursionError):
        return
    answers = Answers()
    answers.restore(state)
    answers.known("run.evaluate")


def test_nothing_that_a_worker_leaves_disturbs_its_launcher(tmp_path: Path, everything: bool) -> None:
    page = ProgressPage.create(str(tmp_path / "first"))
    page.step(7)
    page.enter(Phase.COMPUTING)
    page.plans("ddp * tp2")
    for seconds in (0.1, 0.2, 0.3):
        page.stepped(seconds)
    whole = (tmp_path / "first").read_bytes()
    kinds: list[tuple[Callable[[Path, bytes], None], bytes]] = [
        (check_page, whole[:600]),
        (check_page, whole),
        (check_report, REPORT),
        (check_stack, STACK),
        (check_again, AGAIN),
        (check_answers, ANSWERS),
    ]
    draws = random.Random(18)
    for number in range(1_000_000 if everything else 1_500):
        check, data = kinds[number % len(kinds)]
        check(tmp_path, mutated(draws, data))
