"""What it costs to be seen, and how fast one sees: instrumentation of a step, and the page of a large run.

    scripts/bench see

Goals: meter, spans, event log, state file and bar take at most 1 % of a step of 2 ms, at four ranks; the first curve of
a run of a million steps is there within 300 ms, and a new step within a second; a frame of a timeline of 64 ranks and
1,000 steps takes at most 16.7 ms.

The cost is CPU time of steps that do nothing but be measured, back to back, and of the other threads in 2 ms; what is
written twice a second counts. "After products" is the same between 2 ms of matrix products and no Python at all, where
caches are cold for any code: a bound from above, and no goal. The page is measured from the request to the first curve
in Debian's Chromium; without it (scripts/services), by a client of Python's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from urllib.request import urlopen

import numpy as np

from benchmarks.report.result import Column, Goal, Section
from shoal.dashboard.run_log import RunLog
from shoal.dashboard.server import PageServer
from shoal.report.events import EventLog
from shoal.report.folder import events_path, spans_path
from shoal.report.follow import Sampled
from shoal.report.meter import Meter
from shoal.report.span_table import DTYPE
from shoal.report.spans import LAYOUT, SpanKind
from shoal.report.state import StateFile
from shoal.train.technique.journal import Journal
from shoal.types import StepReport

STEP_SECONDS = 2e-3
COST_GOAL, CHART_GOAL, LIVE_GOAL, FRAME_GOAL = 0.01, 0.3, 1.0, 16.7
RANKS, BLOCK, WARM_SECONDS = 4, 50, 3.0


def instrumented(rank: int, folder: str, steps: int) -> tuple[float, float, float]:
    """CPU seconds of a step: back to back; after 2 ms of matrix products alone; and of other threads, for 2 ms."""
    meter = Meter()
    state = StateFile(Path(folder), rank, RANKS, meter.page)
    journal = Journal(Path(folder), {"rank": rank, "strategy": "ddp"}, False, meter, state)
    journal.open(steps)
    matrix, clock = np.ones((160, 160)), time.thread_time
    empty = statistics.median(-clock() + clock() for _ in range(1000))
    report = StepReport(0, 0, 2.0, 64, 64.0, 2e-3, 1e-4, 1.4e-3, 3e-4, 2e-4, 0, 1, 0.1)
    began, own, everything = time.perf_counter(), clock(), time.process_time()
    warm, step = 0.0, 0
    while time.perf_counter() - began < WARM_SECONDS:
        reports = [
            replace(report, number=step + n) for n in range(1, BLOCK + 1)
        ]  # what run.steps yields anyway
        before = clock()
        for each in reports:
            one_step(meter, journal, each)
        warm += clock() - before
        step += BLOCK
    others = (
        ((time.process_time() - everything) - (clock() - own)) / (time.perf_counter() - began) * STEP_SECONDS
    )
    cold = 0.0
    for number in range(step + 1, step + steps + 1):
        until = time.perf_counter() + STEP_SECONDS
        while time.perf_counter() < until:
            matrix @ matrix
        each, before = replace(report, number=number), clock()
        one_step(meter, journal, each)
        cold += clock() - before - empty
    journal.close(steps)
    state.close()
    return warm / step, cold / steps, max(0.0, others)


def one_step(meter: Meter, journal: Journal, report: StepReport) -> None:
    """All that a step of ddp notes: its phases, two passes, three buckets, its report."""
    meter.start(report.number)
    meter.page.step(report.number)
    meter.mark("data")
    meter.mark("exposed")
    begin = time.perf_counter_ns()
    for kind in (1, 2, 3, 4, 5, 6, 11):  # marks as near to each other as here are no spans
        meter.spans.add(kind, begin, time.perf_counter_ns())
    meter.mark("compute")
    meter.mark("exposed")
    for bucket in range(3):
        meter.spans.add(8, begin, time.perf_counter_ns(), bucket)
    meter.mark("exposed")
    meter.mark("update")
    meter.stop()
    meter.peak_memory()
    journal.step(report)


def cost(steps: int) -> list[tuple[float, float, float]]:
    """The same on each of four ranks that run together."""
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(RANKS) as pool:
        return pool.starmap(instrumented, [(rank, folder, steps) for rank in range(RANKS)], chunksize=1)


def write_long(path: Path, steps: int) -> None:
    """A log of so many steps, with losses that fall."""
    with EventLog.open(path, {"rank": 0, "strategy": "ddp", "steps": steps}) as log:
        log.write(StepReport(1, 0, 2.0, 64, 64.0, 0.002, 1e-4, 1e-3, 5e-4, 4e-4, 1000, 1 << 28, 1e-3, 0.5))
    line = path.read_text().splitlines(keepends=True)[-1]
    template = line.replace('"step": 1,', '"step": %d,').replace('"loss": 2.0,', '"loss": %.6f,')
    losses = 2.0 + 3.0 / np.sqrt(np.arange(1, steps + 1))
    with path.open("a") as file:
        file.writelines(template % (step + 1, loss) for step, loss in enumerate(losses.tolist(), start=1))


def write_spans(folder: Path, ranks: int, steps: int) -> None:
    """Six spans a step on each rank, of which one is slow."""
    kinds = [
        SpanKind.DATA,
        SpanKind.FORWARD,
        SpanKind.BACKWARD,
        SpanKind.COMPUTE,
        SpanKind.EXPOSED,
        SpanKind.UPDATE,
    ]
    parts = np.array([[0, 1e5], [1e5, 6e5], [7e5, 8e5], [1e5, 1.4e6], [1.5e6, 3e5], [1.8e6, 2e5]], np.int64)
    report, wall = StepReport(1, 0, 2.0, 64, 64.0, 2e-3, 1e-4, 1.4e-3, 3e-4, 2e-4, 0, 1, 0.1), time.time_ns()
    for rank in range(ranks):
        with EventLog.open(events_path(folder, rank), {"rank": rank, "workers": ranks}) as log:
            for step in range(1, steps + 1):
                log.write(replace(report, number=step))
        table = np.zeros(1 + 6 * steps, DTYPE)
        table[0] = (LAYOUT, SpanKind.ANCHOR, rank, 1, wall)
        table["step"][1:] = np.repeat(np.arange(1, steps + 1), 6)
        table["kind"][1:] = np.tile(np.array(kinds, np.uint16), steps)
        table["begin"][1:] = 1000 + np.repeat(np.arange(steps) * 2_000_000, 6) + np.tile(parts[:, 0], steps)
        table["duration"][1:] = np.tile(parts[:, 1], steps)
        table.tofile(spans_path(folder, rank))


@contextmanager
def page_of(folder: Path) -> Iterator[str]:
    """Serve a run; gives the address."""
    with RunLog(folder) as run:
        server = PageServer([run])
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.url
        finally:
            server.close()
            thread.join()


def first_chart(folder: Path, browser: object) -> float:
    """Seconds from the request to the first curve, of a log that nobody has looked at."""
    with page_of(folder) as url:
        if browser is None:
            began = time.perf_counter()
            for path in ("", "api/runs", "api/series?points=600"):
                urlopen(url + path).read()
            return time.perf_counter() - began
        page = browser.new_page()  # type: ignore[attr-defined]
        page.goto(url, wait_until="commit")
        page.wait_for_function("() => window.shoal && window.shoal.firstChart > 0")
        found = float(page.evaluate("shoal.firstChart")) / 1e3
        page.close()
        return found


def live_delay(folder: Path) -> float:
    """Seconds from a step's end to the page's knowing, the log's own half second included: the longest of some."""
    report, delays = StepReport(1, 0, 2.0, 64, 64.0, 0.02, 0, 0, 0, 0, 0, 1, 0.1), []
    with EventLog.open(folder / "events.jsonl", {"rank": 0}) as log:
        log.write(report)
        log.flush()
        with page_of(folder) as url:
            for number in range(2, 8):
                time.sleep(0.1)
                began = time.perf_counter()
                log.write(replace(report, number=number))
                while json.loads(urlopen(url + "api/runs").read())[0]["last"] < number:
                    time.sleep(0.02)
                    if time.perf_counter() - began > 0.5:  # the next step would have come, and flushed
                        log.flush()
                delays.append(time.perf_counter() - began)
    return max(delays)


def frame(folder: Path, browser: object) -> float:
    """Milliseconds of a frame of the timeline while it is panned: the median over depths of zoom of their medians."""
    with page_of(folder) as url:
        page = browser.new_page(viewport={"width": 1400, "height": 900})  # type: ignore[attr-defined]
        page.goto(url)
        page.wait_for_function("() => window.shoal && shoal.timeline && shoal.timeline.spans")
        script = """async () => {
          const t = shoal.timeline, end = t.spans.end, found = [];
          t.set(await (await fetch('api/spans?run=0&most=600000')).arrayBuffer());
          for (const depth of [1, 4, 16, 64]) {
            const times = [];
            for (let i = 0; i < 40; i++) {
              t.low = (end * (1 - 1 / depth) * i) / 40; t.high = t.low + end / depth;
              const begin = performance.now(); t.draw(); t.canvas.getContext('2d').getImageData(0, 0, 1, 1);
              times.push(performance.now() - begin);
            }
            found.push(times.sort((a, b) => a - b)[20]);
          }
          return [t.spans.count, Math.max(...found)];
        }"""
        count, slowest = page.evaluate(script)
        assert count > 300_000, count
        page.close()
    return float(slowest)


@contextmanager
def chromium() -> Iterator[object]:
    """Debian's browser, or None."""
    path = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        yield None
        return
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def add_options(parser: argparse.ArgumentParser) -> None:
    """How much."""
    parser.add_argument("--cpu-steps", type=int, default=500)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=5)


def measure(options: argparse.Namespace) -> Iterator[Section]:
    """Two tables."""
    paid = cost(options.cpu_steps)
    names = ("back to back", "after products", "other threads")
    columns = [Column("rank"), *(Column(name, "seconds") for name in names)]
    shares = [(warm + others) / STEP_SECONDS for warm, _, others in paid]
    goal = Goal("instrumentation / step of 2 ms, mean over ranks", statistics.mean(shares), COST_GOAL)
    rows = [[rank, *each] for rank, each in enumerate(paid)]
    yield Section(f"what a step of 2 ms pays to be seen: {RANKS} ranks", columns, rows, [goal])
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        root = Path(folder)
        write_long(root / "events.jsonl", options.points)
        size = (root / "events.jsonl").stat().st_size
        charts = [first_chart(root, browser) for _ in range(options.rounds)]
        sampled = Sampled(root / "events.jsonl")
        (root / "live").mkdir()
        delay = live_delay(root / "live")
        seen = [
            ["first curve", statistics.median(charts)],
            ["a new step is known", delay],
        ]
        goals = [
            Goal(f"first curve of {options.points:,} steps, seconds", statistics.median(charts), CHART_GOAL),
            Goal("a new step is known, seconds", delay, LIVE_GOAL),
            Goal(
                f"share of a log of {size / 1e6:.0f} MB that is read to open it",
                sampled.bytes_read / size,
                0.05,
            ),
        ]
        if browser is not None:
            (root / "wide").mkdir()
            write_spans(root / "wide", 64, 1000)
            drawn = frame(root / "wide", browser)
            seen.append(["a frame of 64 ranks x 1,000 steps", drawn / 1e3])
            goals.append(Goal("a frame of the timeline, ms", drawn, FRAME_GOAL))
        yield Section("how fast one sees", [Column("what"), Column("time", "seconds")], seen, goals)
