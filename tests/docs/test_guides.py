"""Guides that show what commands print: they print it."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal import clock, compress, pipeline
from shoal.cli import main as cli
from shoal.compress.base import Layout
from shoal.pipeline.check_schedule import simulate
from shoal.table import Table
from shoal.testing.scenario import SimulatedJob, check
from shoal.testing.shape import JobShape

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHANGES = [
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "DATE"),
    (r"[\d.]+ GB/s", "RATE"),
    (r"torch [\d.]+(\+\w+)?", "TORCH"),
]
"""What is another on another day."""


def fixed(text: str) -> str:
    for pattern, word in CHANGES:
        text = re.sub(pattern, word, text)
    return text


def command(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, errors too."""
    monkeypatch.setattr(sys, "argv", line.split())
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main()
    return "".join(capsys.readouterr())


def test_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs and commands of the page in the order in which they stand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Run sets it
    names: dict[str, Any] = {"__name__": "__main__"}
    checker, seen = doctest.OutputChecker(), 0
    for kind, text in BLOCK.findall((GUIDES / "checkpoints.md").read_text()):
        if kind == "python":
            exec(compile(text, "checkpoints.md", "exec"), names)
        elif kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                line, _, wanted = part.partition("\n")
                got = command(line, monkeypatch, capsys)
                same = checker.check_output(fixed(wanted), fixed(got), doctest.ELLIPSIS)
                assert same, f"{line} prints:\n{got}"
                seen += 1
    assert seen >= 10


def choices_of_adding() -> dict[str, Any]:
    """What the python blocks of the page define."""
    names: dict[str, Any] = {"__name__": "adding"}
    for kind, text in BLOCK.findall((GUIDES / "adding.md").read_text()):
        if kind == "python":
            exec(compile(text, "adding.md", "exec", dont_inherit=True), names)
    return names


@pytest.mark.parametrize("size", [0, 1, 257, 5000])
def test_adding_a_compressor(size: int) -> None:
    """The contract of tests/unit/test_compress.py, for a compressor in a copy of the table."""
    table = Table("compressor", {**compress.TABLE, "root8": choices_of_adding()["Root8"]})
    vector = torch.randn(size, generator=torch.Generator().manual_seed(0))
    before = vector.clone()
    compressor = table.look_up("root8")()
    code = compressor.code(Layout(size, vector.dtype, vector.device))
    payload = code.payload()
    code.encode(vector, payload, 3)
    assert torch.equal(vector, before)
    assert payload.nbytes == code.nbytes()
    out, kept = torch.full_like(vector, torch.nan), vector.clone()
    code.decode(payload, out, add=False)
    code.lose(kept, payload, 1)
    torch.testing.assert_close(kept + out, vector)
    torch.testing.assert_close(out, vector, atol=0.04, rtol=0.0)
    assert 0 < compressor.bound < 1
    if size == 5000:
        assert code.nbytes() < vector.nbytes / 3.8


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 8), (4, 3), (4, 8)])
def test_adding_a_schedule(ranks: int, micro: int) -> None:
    """The checks of tests/unit/test_schedules.py, for a schedule in a copy of the table."""
    table = Table("pipeline schedule", {**pipeline.TABLE, "lastfirst": choices_of_adding()["LastFirst"]})
    schedule = table.look_up("lastfirst")
    run = simulate(schedule, ranks, micro)
    assert run.idle == pytest.approx(schedule.bubble(ranks, micro))
    assert list(run.peaks) == [schedule.peak(rank, ranks, micro) for rank in range(ranks)]


def test_adding_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock in a copy of the table: the contract of tests/unit/test_clocks.py, and a simulated job by it."""
    table = Table("clock", {**clock.TABLE, "gentle": choices_of_adding()["Gentle"]})
    monkeypatch.setattr(clock, "TABLE", table)
    new, told = clock.make_clock("gentle(2, strict=3)"), clock.make_clock("gentle(2, strict=3)")
    assert str(new) == "gentle(2, 3)"
    for _ in range(3):
        told.finished()
    new.restore(told.state())
    assert [new.may_begin(ahead, 0) for ahead in range(4)] == [True, True, True, False]
    job = SimulatedJob(JobShape(seed=3, workers=3, steps=20, clock="gentle(2, strict=5)", server_kills=2))
    job.run()
    check(job)
    claims = job.history.claims
    assert max(step - oldest for step, oldest in claims if oldest < 5) == 0
    assert max(step - oldest for step, oldest in claims if oldest >= 5) == 2
