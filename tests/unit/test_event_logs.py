"""Logs of every rank: what is written keeps to the schema, and readers take whatever they find."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.pipeline.timed_stage import PassClock
from shoal.report import spans as spans_module
from shoal.report.events import EventLog
from shoal.report.folder import events_path, ranks_in, roles_in, spans_path, state_path
from shoal.report.follow import Follower, Sampled
from shoal.report.meter import Meter
from shoal.report.schema import EVENTS, STEP, problems
from shoal.report.span_table import read_spans, step_range
from shoal.report.spans import RECORD, SpanKind, Spans, older
from shoal.report.state import StateFile, read_state, read_states
from shoal.train.technique.journal import Journal
from shoal.types import StepReport
from shoal.world.progress_page import Phase, ProgressPage

REPORT = StepReport(1, 0, 2.5, 32, 32.0, 0.04, 0.001, 0.03, 0.005, 0.004, 1000, 1 << 20, 1e-3)


class TestSchema:
    def test_what_a_log_writes_keeps_to_it(self, tmp_path: Path) -> None:
        with EventLog.open(tmp_path / "events.jsonl", {"rank": 0, "workers": 2, "strategy": "ddp"}) as log:
            log.write(replace(REPORT, loss=float("nan"), metrics={"accuracy": 0.5}))
            log.note("failure", {"rank": 1, "why": "killed", "after": 7})
        events = Follower(tmp_path / "events.jsonl").poll()
        assert [event.get("event", "step") for event in events] == ["start", "step", "failure"]
        assert [problem for event in events for problem in problems(event)] == []
        assert events[0]["host"]
        assert abs(float(events[0]["monotonic"]) - time.perf_counter()) < 60

    def test_every_kind_and_field_is_in_the_docs(self) -> None:
        text = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
        for name, kind in {**EVENTS, "step": STEP}.items():
            line = next(line for line in text.splitlines() if line.startswith(f"| `{name}` "))
            must, may = (dict(re.findall(r"`(\w+)` (\S+?)(?:,| |$)", cell)) for cell in line.split("|")[3:5])
            assert must | {"time": "number"} == dict(kind.fields), name
            assert may == dict(kind.optional), name

    @pytest.mark.parametrize("kind", [k for k, v in EVENTS.items()])
    def test_a_missing_field_and_a_wrong_type_are_named(self, kind: str) -> None:
        assert any("'time' is missing" in problem for problem in problems({"event": kind}))
        assert any("'time' is 'now'" in problem for problem in problems({"event": kind, "time": "now"}))

    def test_a_full_disk_loses_lines_and_not_the_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        with EventLog(tmp_path / "events.jsonl") as log:
            log.note("note", {"text": "before"})
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
            try:
                log.note("note", {"text": "nobody will read this" * 3})
                log.note("note", {"text": "nor this" * 9})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            log.note("note", {"text": "after"})
        assert capsys.readouterr().err.count("File too large; events are lost") == 1
        assert [event["text"] for event in Follower(log.path).poll()] == ["before", "after"]


class TestSpans:
    def test_phases_come_back_with_their_times(self, tmp_path: Path) -> None:
        spans = Spans()
        spans.open(spans_path(tmp_path, 3), 3)
        meter = Meter(spans)
        wall = time.time()
        for step in (1, 2, 3):
            meter.start(step)
            time.sleep(0.002)
            meter.mark("data")
            time.sleep(0.004)
            meter.mark("compute")
            meter.stop()
            time.sleep(0.001)
        spans.close()
        table = read_spans(tmp_path, 3, 2, 3)
        assert table.step.tolist() == [2, 2, 2, 3, 3, 3]
        assert table.kind.tolist() == [SpanKind.BETWEEN, SpanKind.DATA, SpanKind.COMPUTE] * 2
        assert 0.004 <= table.duration[2] < 1.0
        assert wall <= table.begin[0] < wall + 5
        assert step_range(tmp_path, 3) == (1, 3)

    def test_a_resumed_run_replaces_what_it_does_again(self, tmp_path: Path) -> None:
        spans = Spans()
        for first, duration in ((1, 10), (3, 20)):  # killed after step 5, resumed at step 3
            spans.open(spans_path(tmp_path, 0), 0)
            for step in range(first, first + 5):
                spans.begin(step)
                spans.add(SpanKind.UPDATE, 1000, 1000 + duration)
        spans.begin(6)  # and rolled back in the same process
        spans.add(SpanKind.UPDATE, 1000, 1030)
        spans.close()
        table = read_spans(tmp_path, 0)
        assert list(zip(table.step, np.rint(table.duration * 1e9), strict=True)) == [
            (1, 10), (2, 10), (3, 20), (4, 20), (5, 20), (6, 30)
        ]  # fmt: skip

    def test_files_rotate_and_are_read_as_one(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spans_module, "ROTATE_BYTES", 100 * RECORD.size)
        spans = Spans()
        spans.open(spans_path(tmp_path, 0), 0)
        for step in range(1, 151):
            spans.begin(step)
            spans.add(SpanKind.DATA, step, step + 1)
            spans.flush()
        spans.close()
        assert older(spans_path(tmp_path, 0)).stat().st_size <= 102 * RECORD.size
        assert read_spans(tmp_path, 0).step.tolist() == list(range(1, 151))

    def test_a_full_ring_goes_to_the_file(self, tmp_path: Path) -> None:
        spans = Spans()
        spans.open(spans_path(tmp_path, 0), 0)
        spans.begin(1)
        for n in range(spans_module.RING + 1):
            spans.add(SpanKind.BUCKET, 1 + n, 2 + n, n)
        assert spans.waiting == 1
        spans.close()
        assert len(read_spans(tmp_path, 0)) == spans_module.RING + 1

    def test_garbage_is_left_out(self, tmp_path: Path) -> None:
        spans = Spans()
        spans.open(spans_path(tmp_path, 0), 0)
        spans.begin(5)
        spans.add(SpanKind.DATA, 100, 200)
        spans.close()
        with spans_path(tmp_path, 0).open("ab") as file:
            file.write(RECORD.pack(5, 99, 0, 100, 100) + RECORD.pack(5, 1, 0, 100, -1) + b"torn")
        assert len(read_spans(tmp_path, 0)) == 1
        spans_path(tmp_path, 0).write_bytes(random.Random(1).randbytes(100_000))
        assert len(read_spans(tmp_path, 0)) == 0


class TestFollower:
    def test_torn_lines_garbage_cuts_and_rotation(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        follower = Follower(path)
        assert follower.poll() == []
        path.write_text('{"step": 1}\n{"st')
        assert follower.poll() == [{"step": 1}]
        with path.open("a") as file:
            file.write('ep": 2}\n\n\xff[1]\n' + "[" * 5000 + '\nnull\n{"step": NaN}\n')
        assert follower.poll() == [{"step": 2}, {"step": None}]
        assert follower.bad == 3
        path.write_text('{"step": 3}\n')  # cut
        assert follower.poll() == [{"step": 3}]
        with path.open("a") as file:
            file.write('{"step": 4}\n')
        os.replace(path, tmp_path / "events.1.jsonl")  # rotated, before it was read to its end
        path.write_text('{"step": 5}\n')
        assert follower.poll() == [{"step": 4}, {"step": 5}]
        path.unlink()
        assert follower.poll() == []

    def test_any_bytes_at_all(self, tmp_path: Path) -> None:
        path, drawn = tmp_path / "events.jsonl", random.Random(0)
        line = b'{"step": 7, "loss": 1e999, "time": 1}\n'
        for _ in range(300):
            mutated = bytearray(line * 20)
            for _ in range(drawn.randrange(1, 30)):
                mutated[drawn.randrange(len(mutated))] = drawn.randrange(256)
            path.write_bytes(bytes(mutated))
            assert all(isinstance(event, dict) for event in Follower(path).poll())
            for event in Sampled(path, 8).steps(0, 1 << 70):
                assert isinstance(event["step"], int)


class TestSampled:
    def test_a_large_log_opens_without_reading_it(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        with path.open("w") as file:
            for step in range(1, 100_001):
                file.write(f'{{"step": {step}, "loss": {1 / step:.6f}, "filler": "{"x" * 150}"}}\n')
        log = Sampled(path)
        assert len(log.places) >= 500
        assert log.bytes_read < log.size / 20
        assert [event["step"] for event in log.steps(70_000, 70_010)] == list(range(70_000, 70_011))
        assert log.bytes_read < log.size / 10
        many = log.steps(10_000, 90_000, most=300)
        assert 250 < len(many) < 400

    def test_steps_that_a_resume_repeats_are_all_found(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        steps = [*range(1, 400), *range(300, 500)]
        path.write_text("".join(f'{{"step": {step}, "at": {i}}}\n' for i, step in enumerate(steps)))
        found = Sampled(path, 16).steps(310, 312)
        assert [event["step"] for event in found] == [310, 311, 312, 310, 311, 312]


class TestStates:
    def test_a_state_follows_the_page(self, tmp_path: Path) -> None:
        page = ProgressPage()
        state = StateFile(tmp_path / "run", 2, 4, page, "cpu")
        assert not (tmp_path / "run").exists()
        page.step(7)
        page.enter(Phase.COMPUTING)
        state.last = replace(REPORT, loss=float("inf"))
        state.begin({"strategy": "zero1", "steps": 20})
        (found,) = read_states(tmp_path / "run")
        assert (found.rank, found.workers, found.step, found.steps) == (2, 4, 7, 20)
        assert (found.doing, found.strategy, found.loss) == ("step 7, forward and backward", "zero1", None)
        assert found.condition(time.time(), found.host) == "running"
        assert found.condition(found.written + 60, "elsewhere") == "silent"
        assert replace(found, pid=2**22 + 1).condition(time.time(), found.host) == "dead"
        state.end("failed", "ValueError: no")
        assert read_states(tmp_path / "run")[0].condition(time.time()) == "failed"
        state.close()

    @pytest.mark.parametrize(
        "text", ["", "[]", "{", '{"rank": "x", "step": true, "loss": 1e999, "pid": 1e400}', "9" * 70_000]
    )
    def test_any_file_is_read_without_harm(self, tmp_path: Path, text: str) -> None:
        path = state_path(tmp_path, 0)
        path.write_text(text)
        found = read_state(path)
        assert found is None or (found.rank, found.step, found.loss) == (0, 0, None)

    def test_who_has_written(self, tmp_path: Path) -> None:
        for who in (0, 12, 100_000, "launcher"):
            events_path(tmp_path, who).touch()
        (tmp_path / "events-rankx.jsonl").touch()
        assert ranks_in(tmp_path) == [0, 12, 100_000]
        assert roles_in(tmp_path) == ["launcher"]


def test_status_of_a_run_that_was_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shoal.cli.status import status

    page = ProgressPage()
    page.step(3)
    state = StateFile(tmp_path, 0, 2, page)
    state.begin({"strategy": "ddp\x1b[2J", "steps": 5})
    state.close()
    text = state_path(tmp_path, 0).read_text()
    dead = {**json.loads(text), "rank": 1, "pid": 2**22 + 1}
    state_path(tmp_path, 1).write_text(json.dumps(dead))
    with pytest.raises(SystemExit, match="1"):
        status(tmp_path, watch=False, as_json=False)
    out = capsys.readouterr().out
    assert "1 running, 1 dead of 2" in out
    assert "\x1b[2J" not in out
    with pytest.raises(SystemExit):
        status(tmp_path, watch=False, as_json=True)
    assert [json.loads(line)["condition"] for line in capsys.readouterr().out.splitlines()] == [
        "running",
        "dead",
    ]


def test_spans_reach_the_file_with_every_note(tmp_path: Path) -> None:
    """A worker that is ended for a lost neighbour writes nothing any more."""
    meter = Meter()
    journal = Journal(tmp_path, {"rank": 0, "strategy": "ddp"}, False, meter, None)
    journal.open(9)
    meter.start(1)
    meter.spans.add(SpanKind.FORWARD, 1000, 9000)
    journal.note("checkpoint", {"after": 1, "name": "step-1"})
    assert len(read_spans(tmp_path, 0)) == 1
    journal.recovered(2.0, 5.0)
    journal.note("recovery", {"how": "all workers started again"})
    spans = read_spans(tmp_path, 0)
    assert spans.kind.tolist() == [SpanKind.FORWARD, SpanKind.RECOVERY]
    assert spans.duration[1] == pytest.approx(3.0)
    journal.close()


def test_waiting_for_a_neighbour_is_no_computing(tmp_path: Path) -> None:
    meter = Meter()
    meter.spans.open(tmp_path / "spans-rank00000.bin", 0)
    meter.start(1)
    clock = PassClock(meter.spans)
    clock.begin()
    time.sleep(0.03)
    clock.add(SpanKind.FORWARD, time.perf_counter_ns(), 0)
    begin = time.perf_counter_ns()
    while time.perf_counter_ns() < begin + 10**7:
        pass
    clock.add(SpanKind.BACKWARD, begin, 0)
    meter.waited(clock.waited())
    meter.mark("compute")
    times = meter.stop()
    assert times.compute >= 0.01
    assert times.exposed >= 0.03
    assert times.compute + times.exposed <= times.seconds
    meter.spans.close()
    kinds = read_spans(tmp_path, 0).kind.tolist()
    assert kinds[:3] == [SpanKind.EXPOSED, SpanKind.FORWARD, SpanKind.BACKWARD]
