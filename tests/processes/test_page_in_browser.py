"""The page in Debian's Chromium: what people click is clicked, and a live run is followed."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.dashboard.page import export
from shoal.dashboard.run_log import RunLog
from shoal.dashboard.server import PageServer
from shoal.report.events import EventLog
from shoal.report.folder import events_path, spans_path, state_path
from shoal.report.spans import SpanKind, Spans
from shoal.types import StepReport

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: scripts/setup dev"
)
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: scripts/services")

REPORT = StepReport(1, 0, 2.5, 32, 32.0, 0.04, 0.001, 0.03, 0.005, 0.004, 1000, 1 << 20, 1e-3)
HOSTILE = "<img src=x onerror='window.hit=1'><script>window.hit=1</script>"
READY = "() => window.shoal && shoal.firstChart && shoal.drawn && shoal.updates"


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as running:
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        started = running.chromium.launch(executable_path=CHROMIUM, args=options)
        yield started
        started.close()


@pytest.fixture
def page(browser: object) -> Iterator[object]:
    context = browser.new_context(viewport={"width": 1100, "height": 800}, color_scheme="light")  # type: ignore[attr-defined]
    opened = context.new_page()
    opened.set_default_timeout(20_000)
    yield opened
    context.close()


@pytest.fixture
def serve() -> Iterator[object]:
    with ExitStack() as stack:

        def start(*folders: Path) -> PageServer:
            server = PageServer([stack.enter_context(RunLog(folder)) for folder in folders])
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.close)
            return server

        yield start


def write(folder: Path, steps: int = 300, ranks: int = 2, loss: float = 5.0) -> Path:
    for rank in range(ranks):
        spans = Spans()
        spans.open(spans_path(folder, rank), rank)
        header = {"rank": rank, "workers": ranks, "strategy": "ddp", "steps": steps, "settings": {"lr": loss}}
        with EventLog.open(events_path(folder, rank), header) as log:
            for step in range(1, steps + 1):
                busy = 0.09 if rank == 1 and 100 < step < 150 else 0.03
                log.write(replace(REPORT, number=step, loss=loss / step, compute_seconds=busy))
                spans.begin(step)
                spans.add(SpanKind.DATA, step * 10**8, step * 10**8 + 10**6)
                spans.add(SpanKind.UPDATE, step * 10**8 + 10**6, step * 10**8 + int(busy * 1e9))
            if rank == 0:
                log.note("failure", {"rank": 1, "why": HOSTILE, "after": 120})
                log.note("log", {"after": 10, "values": {HOSTILE: 1.0}})
        spans.close()
    return folder


def test_zoom_theme_heat_map_and_events(tmp_path: Path, page: object, serve: object) -> None:
    server = serve(write(tmp_path / "one"))  # type: ignore[operator]
    p: playwright.Page = page  # type: ignore[assignment]
    asked: list[str] = []
    p.on("request", lambda request: asked.append(request.url))
    p.goto(server.url)
    p.wait_for_function(READY)
    loss = p.get_by_label("Loss over steps")
    box = loss.bounding_box()
    assert box is not None
    p.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 90)
    p.mouse.down()
    p.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 90, steps=4)
    p.mouse.up()
    p.wait_for_function("() => document.getElementById('range').textContent.startsWith('steps ')")
    loss.focus()
    p.keyboard.press("ArrowRight")
    p.keyboard.press("+")
    p.keyboard.press("l")
    p.keyboard.press("Escape")
    p.wait_for_function("() => document.getElementById('range').textContent === ''")
    heat = p.get_by_label("Heat map of ranks", exact=False)
    p.wait_for_function("() => document.body.innerText.includes('rank 1 is slow: 2')")
    heat.focus()
    p.keyboard.press("Enter")
    p.wait_for_function("() => document.activeElement === shoal.timeline.canvas && shoal.timeline.low > 0")
    p.keyboard.press("-")
    p.keyboard.press("0")
    p.wait_for_function("() => shoal.timeline.low === 0")
    p.keyboard.press("t")
    assert p.evaluate("document.documentElement.dataset.theme") == "dark"
    p.get_by_text("failure: <img", exact=False).first.click()
    p.wait_for_function("() => document.getElementById('range').textContent === 'steps 70 to 170'")
    assert p.evaluate("[window.hit, shoal.errors, document.images.length]") == [None, [], 0]
    assert HOSTILE in p.inner_text("body")
    assert all(url.startswith(server.url) for url in asked)


def test_a_live_run_is_followed_within_a_second(tmp_path: Path, page: object, serve: object) -> None:
    p: playwright.Page = page  # type: ignore[assignment]
    with EventLog.open(events_path(tmp_path, 0), {"rank": 0, "strategy": "ddp"}) as log:
        log.write(REPORT)
        log.flush()
        p.goto(serve(tmp_path).url)  # type: ignore[operator]
        p.wait_for_function("() => window.shoal && shoal.firstChart")
        for number in range(2, 6):
            log.write(replace(REPORT, number=number, loss=float(number)))
            log.flush()
            written = time.monotonic()
            p.wait_for_function(f"() => document.querySelector('#runs').innerText.includes('step {number}')")
        assert time.monotonic() - written < 1.0
        state_path(tmp_path, 0).write_text(json.dumps({"rank": 0, "state": "failed", "why": HOSTILE}))
        p.wait_for_function("() => document.querySelector('#runs').innerText.includes('failed')")
        assert p.evaluate("[window.hit, shoal.errors]") == [None, []]


def test_two_runs_and_one_file_on_a_phone(tmp_path: Path, browser: object) -> None:
    runs = [
        RunLog(write(tmp_path / name, ranks=1, loss=loss)).load()
        for name, loss in (("one", 5.0), ("two", 9.0))
    ]
    export(runs, tmp_path / "out.html")
    context = browser.new_context(viewport={"width": 360, "height": 700}, color_scheme="dark", offline=True)  # type: ignore[attr-defined]
    p = context.new_page()
    asked: list[str] = []
    p.on("request", lambda request: asked.append(request.url))
    p.goto((tmp_path / "out.html").as_uri())
    p.wait_for_function(READY)
    text = p.inner_text("body")
    assert "Settings that differ" in text
    assert "one: 0.01" in text
    assert "two: 0.03" in text
    assert p.evaluate("document.documentElement.scrollWidth") <= 360
    assert p.evaluate("[window.hit, shoal.errors]") == [None, []]
    assert asked == [(tmp_path / "out.html").as_uri()]
    context.close()
