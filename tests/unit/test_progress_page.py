"""The page in which a worker writes how far it is: what a reader finds, and what it costs."""

from __future__ import annotations

import time
from pathlib import Path

from shoal.report.meter import Meter
from shoal.world.progress_page import Phase, ProgressPage


def test_a_reader_sees_what_the_meter_of_a_step_marks(tmp_path: Path) -> None:
    path = str(tmp_path / "page")
    reader = ProgressPage.create(path)
    meter = Meter()
    meter.page = ProgressPage(path)
    meter.page.keeps("/runs/first")
    meter.page.begin_loop()
    meter.page.step(7)
    seen = []
    meter.start()
    seen.append(str(reader.read()))
    for mark in ("data", "exposed", "compute", "exposed", "update"):
        meter.mark(mark)  # type: ignore[arg-type]
        seen.append(str(reader.read()))
    meter.stop()
    seen.append(str(reader.read()))
    computing, exchanging = "step 7, forward and backward", "step 7, gradients and update"
    assert seen == [
        "step 7, loading data",
        computing,
        computing,
        exchanging,
        exchanging,
        exchanging,
        "after step 7, in the script's own code",
    ]
    assert (reader.read().done, reader.read().folder) == (1, "/runs/first")
    meter.page.calls("run.evaluate of 9 samples")
    assert str(reader.read()) == "after step 7, in run.evaluate of 9 samples"


def test_the_usual_step_is_the_slowest_but_one_in_a_hundred() -> None:
    page = ProgressPage()
    page.begin_loop()
    page.stepped(500.0)  # the first compiles
    assert page.read().usual == 0.0
    for _ in range(990):
        page.stepped(0.1)
    for _ in range(9):
        page.stepped(30.0)
    assert 0.1 <= page.read().usual < 0.1 * 2**0.25 + 1e-9
    for _ in range(5):
        page.stepped(30.0)
    assert page.read().usual >= 30.0
    page.begin_loop()
    assert page.read().usual == 0.0


def test_long_phases_are_remembered() -> None:
    page = ProgressPage()
    page.enter(Phase.SAVING, 100.0)
    page.enter(Phase.BETWEEN, 170.0)
    page.enter(Phase.SAVING, 171.0)
    assert page.read().longest == 70.0
    page.enter(Phase.BETWEEN, 172.0)
    assert page.read().longest == 0.0


def test_a_step_pays_microseconds() -> None:
    """A hundred thousand steps: their marks would take seconds if each cost what a write to a file does."""
    meter = Meter()
    began = time.perf_counter()
    for _ in range(100_000):
        meter.start()
        meter.mark("data")
        meter.mark("compute")
        meter.stop()
    assert time.perf_counter() - began < 10.0
