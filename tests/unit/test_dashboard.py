"""The page's server and answers: hostile logs, hostile requests, large logs, and what is written besides."""

from __future__ import annotations

import json
import random
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest

from shoal.dashboard.answers import answer
from shoal.dashboard.columns import Columns, thin
from shoal.dashboard.metrics import METRICS, metrics, write_textfile
from shoal.dashboard.page import export, page
from shoal.dashboard.run_log import RunLog
from shoal.dashboard.server import PageServer
from shoal.dashboard.trace import write_trace
from shoal.errors import ConfigError
from shoal.report.events import EventLog
from shoal.report.folder import events_path, spans_path, state_path
from shoal.report.spans import SpanKind, Spans
from shoal.report.state import StateFile
from shoal.types import StepReport
from shoal.world.progress_page import ProgressPage

REPORT = StepReport(1, 0, 2.5, 32, 32.0, 0.04, 0.001, 0.03, 0.005, 0.004, 1000, 1 << 20, 1e-3)
HOSTILE = "</script><img src=x onerror=alert(1)>\u2028\x1b[2J"
REQUESTS = ("series", "heat", "split", "spans", "pipeline", "memory", "servers", "marks")


def write_run(folder: Path, ranks: int = 3, steps: int = 40, slow: int = 1) -> Path:
    """A run whose rank `slow` takes twice as long."""
    for rank in range(ranks):
        header = {
            "rank": rank,
            "workers": ranks,
            "strategy": "ddp",
            "steps": steps,
            "settings": {"seed": rank},
        }
        spans = Spans()
        spans.open(spans_path(folder, rank), rank)
        with EventLog.open(events_path(folder, rank), header) as log:
            for step in range(1, steps + 1):
                busy = 0.06 if rank == slow else 0.03
                log.write(replace(REPORT, number=step, loss=5.0 / step, compute_seconds=busy))
                spans.begin(step)
                begin = step * 10**8
                spans.add(SpanKind.COMPUTE, begin, begin + int(busy * 1e9))
                spans.add(SpanKind.FORWARD, begin, begin + 10**7, rank * 1024)
                if step % 20 == 0 and rank == 0:
                    log.note("checkpoint", {"after": step, "name": f"step-{step}"})
            log.note("log", {"after": steps, "values": {"accuracy": 0.75}})
            log.note("end", {"why": "done", "after": steps})
        spans.close()
        state = StateFile(folder, rank, ranks, ProgressPage())
        state.last = replace(REPORT, number=steps)
        state.end("ended", "done")
        state.close()
    return folder


@contextmanager
def served(*folders: Path) -> Iterator[PageServer]:
    runs = [RunLog(folder).load() for folder in folders]
    server = PageServer(runs)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET", host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    answered = connection.getresponse()
    found = answered.status, answered.read()
    connection.close()
    return found


class TestAnswers:
    def test_the_pictures_of_a_run(self, tmp_path: Path) -> None:
        run = RunLog(write_run(tmp_path)).load()
        found = answer([run], "series", {"names": "loss,log:accuracy", "points": "10"})
        assert isinstance(found, dict)
        assert found["exact"]
        assert len(found["curves"]["loss"]["mean"]) == 10
        assert found["curves"]["loss"]["high"][0] == 5.0
        assert found["curves"]["log:accuracy"] == {"x": [40.0], "mean": [0.75]}
        heat = answer([run], "heat", {})
        assert isinstance(heat, dict)
        assert heat["slowest"]["rank"] == 1
        assert heat["slowest"]["ratio"] > 1.5
        split = answer([run], "split", {"first": "10", "last": "20"})
        assert isinstance(split, dict)
        assert [row["steps"] for row in split["rows"]] == [11, 11, 11]
        marks = answer([run], "marks", {})
        assert isinstance(marks, list)
        assert [(mark["kind"], mark["after"]) for mark in marks] == [
            *(("start", 0), ("checkpoint", 20), ("checkpoint", 40), ("end", 40)),
        ]
        lanes = answer([run], "pipeline", {"step": "7"})
        assert isinstance(lanes, dict)
        assert lanes["lanes"][2]["passes"][0][:3] == ["F", 0, 2]
        assert answer([run], "nothing", {}) is None
        assert answer([run], "heat", {"run": "1"}) is None

    def test_a_rank_that_was_slow_for_a_while_is_named_for_all_of_it(self, tmp_path: Path) -> None:
        for rank in range(3):
            with EventLog.open(events_path(tmp_path, rank), {"rank": rank}) as log:
                for step in range(1, 201):
                    slow = rank == 2 and 80 < step < 140
                    log.write(replace(REPORT, number=step, compute_seconds=0.09 if slow else 0.03))
        heat = answer([RunLog(tmp_path).load()], "heat", {})
        assert isinstance(heat, dict)
        found = heat["slowest"]
        assert found["rank"] == 2
        assert 78 <= found["first"] <= 85
        assert 133 <= found["last"] <= 142

    def test_a_log_that_grows(self, tmp_path: Path) -> None:
        with EventLog.open(tmp_path / "events.jsonl", {"rank": 0}) as log, RunLog(tmp_path) as run:
            log.write(REPORT)
            log.flush()
            deadline = time.monotonic() + 10
            while run.columns.last < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            before = run.version
            log.write(replace(REPORT, number=2))
            log.flush()
            while run.version == before and time.monotonic() < deadline:
                time.sleep(0.01)
            assert run.columns.last == 2

    def test_steps_done_again_count_once(self, tmp_path: Path) -> None:
        with EventLog(tmp_path / "events.jsonl") as log:
            for number, loss in ((1, 9.0), (2, 8.0), (3, 7.0), (2, 6.0)):
                log.write(replace(REPORT, number=number, loss=loss, metrics={"m": loss}))
        columns = Columns(tmp_path / "events.jsonl")
        columns.poll()
        steps, found, _ = columns.read(["loss"])
        assert (steps.tolist(), found["loss"].tolist()) == ([1, 2], [9.0, 6.0])
        assert columns.values()["m"][1].tolist() == [9.0, 6.0]

    def test_a_sample_comes_first_where_a_log_is_long(self, tmp_path: Path) -> None:
        line = '{{"step": {}, "loss": {}, "filler": "' + "x" * 200 + '"}}\n'
        with (tmp_path / "events.jsonl").open("w") as file:
            file.writelines(line.format(step, 1 / step) for step in range(1, 100_001))
        columns = Columns(tmp_path / "events.jsonl")
        columns.sample()
        steps, found, exact = columns.read(["loss"])
        assert not exact
        assert 900 < len(steps) < 1100
        assert np.allclose(found["loss"], 1 / steps)
        assert columns.last > 99_000

    def test_thinning_keeps_every_peak(self) -> None:
        values = np.zeros(100_000)
        values[77_777] = 3.0
        assert max(thin(np.arange(100_000), values, 500)["high"]) == 3.0  # type: ignore[type-var]


class TestHostileLogs:
    def events(self) -> list[object]:
        drawn = random.Random(3)
        values: list[object] = [
            None,
            True,
            HOSTILE,
            1e308,
            -1e308,
            10**400,
            [],
            {},
            [[[[[[[[1]]]]]]]],
            "9" * 10_000,
        ]
        values += [{HOSTILE: HOSTILE}, -1, 0, 1 << 53, 2.5]
        names = (
            "step loss time seconds data update compute exposed between peak_memory metrics values after host"
        )
        names += " offset busy queue staleness predicted measured settings rank event strategy steps why"
        keys = names.split()
        kinds = ["start", "end", "log", "servers", "memory", "clock", "failure", HOSTILE, 7, None, ["x"]]
        found: list[object] = []
        for _ in range(600):
            event = {key: drawn.choice(values) for key in drawn.sample(keys, 6)}
            event |= (
                {"step": drawn.randrange(1, 50)} if drawn.random() < 0.5 else {"event": drawn.choice(kinds)}
            )
            found.append(event)
        return [*found, HOSTILE, 5, None]

    def folder(self, tmp_path: Path) -> Path:
        for rank in (0, 1):
            lines = [json.dumps(event) for event in self.events()]
            events_path(tmp_path, rank).write_text("\n".join([*lines, '{"step": NaN}', "{torn"]))
            spans_path(tmp_path, rank).write_bytes(random.Random(rank).randbytes(9_999))
            state = {"host": HOSTILE, "doing": HOSTILE, "step": 10**300, "loss": "x"}
            state_path(tmp_path, rank).write_text(json.dumps(state))
        return tmp_path

    def test_every_answer_is_plain_json(self, tmp_path: Path) -> None:
        runs = [RunLog(self.folder(tmp_path)).load()] * 2
        for name in ("runs", "differences", *REQUESTS):
            found = answer(runs, name, {"names": f"loss,log:{HOSTILE},log:loss"})
            assert found is not None
            if not isinstance(found, bytes):
                json.dumps(found, allow_nan=False)
        assert all("\n" not in line or line for line in metrics(runs).splitlines())

    def test_an_export_has_no_markup_of_theirs(self, tmp_path: Path) -> None:
        out = tmp_path / "out.html"
        export([RunLog(self.folder(tmp_path)).load()], out)
        text = out.read_text()
        assert "<img" not in text
        assert text.count("</script>") == 1

    def test_the_page_asks_nobody_else(self) -> None:
        text, policy = page()
        assert len(text.encode()) < 150_000
        assert not re.search(r"//[a-z]|innerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


class TestServer:
    def test_only_the_token_opens_anything(self, tmp_path: Path) -> None:
        with served(write_run(tmp_path)) as server:
            token = server.token
            assert ask(server, f"/{token}/")[0] == 200
            assert ask(server, f"/{token}/api/runs", host="localhost:9")[0] == 200
            others = (
                "/",
                "//",
                f"/{token}",
                f"/{token[:-1]}/",
                f"/{token}x/api/runs",
                "/api/runs",
                f"/?token={token}",
            )
            for path in others:
                assert ask(server, path) == (404, b""), path
            for host in ("", "evil.example", "127.0.0.1.evil.example:80"):
                assert ask(server, f"/{token}/api/runs", host=host) == (404, b""), host

    def test_path_tricks_and_other_methods(self, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret")
        with served(write_run(tmp_path / "run")) as server:
            root = f"/{server.token}/"
            tricks = [
                "../secret",
                "..%2fsecret",
                "%2e%2e/secret",
                "/etc/passwd",
                "api/../../secret",
                "web/core.js",
            ]
            tricks += [
                "api/",
                "api/x",
                "api/heat?run=-1",
                "api/heat?run=9",
                "api/heat/0",
                "page.html",
                "events.jsonl",
            ]
            tricks += ["\\..\\secret", "api/live/x"]
            for trick in tricks:
                assert ask(server, root + trick) == (404, b""), trick
            for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "NONSENSE"):
                assert ask(server, root, method) == (404, b""), method
            assert ask(server, f"{root}api/series?names={'a,' * 3000}&points=zzz")[0] == 200

    @pytest.mark.parametrize(
        "data", [b"\x00" * 100, b"GET", b"GET / HTTP/9.9\r\n\r\n", b"GET " + b"a" * 70_000 + b"\r\n"]
    )
    def test_what_is_no_request(self, tmp_path: Path, data: bytes) -> None:
        with served(write_run(tmp_path, ranks=1)) as server:
            with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=5) as client:
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                assert b"shoal" not in client.recv(4096).partition(b"\r\n\r\n")[2]
            assert ask(server, f"/{server.token}/")[0] == 200

    def test_it_listens_on_loopback_only(self, tmp_path: Path) -> None:
        with served(write_run(tmp_path, ranks=1)) as server:
            assert server.server_address[0] == "127.0.0.1"


class TestMetrics:
    def test_the_text_has_every_number_in_prometheus_form(self, tmp_path: Path) -> None:
        run = RunLog(write_run(tmp_path / 'a"b\\c')).load()
        text = metrics([run])
        sample = r'\w+\{\w+="(?:[^"\\\n]|\\["\\n])*"(?:,\w+="(?:[^"\\\n]|\\["\\n])*")*\} -?[\d.e+-]+'
        for line in text.splitlines():
            assert re.fullmatch(rf"# HELP \w+ .*|# TYPE \w+ (gauge|counter)|{sample}", line), line
        assert 'shoal_up{run="a\\"b\\\\c",rank="2",' in text
        write_textfile(tmp_path / "shoal.prom", [run])
        assert (tmp_path / "shoal.prom").read_text() == metrics([run])

    def test_the_dashboard_of_grafana_asks_for_what_there_is(self) -> None:
        path = Path(__file__).parents[2] / "docs" / "grafana.json"
        found = json.loads(path.read_text())
        asked = {t["expr"] for panel in found["panels"] for t in panel.get("targets", ())}
        named = {name for expr in asked for name in re.findall(r"shoal_\w+", expr)}
        assert named <= METRICS.keys()
        assert len(named) >= 10


class TestTrace:
    def test_all_ranks_on_one_clock(self, tmp_path: Path) -> None:
        folder = write_run(tmp_path / "run", ranks=2)
        host = RunLog(folder).header_of(1)["host"]
        count = write_trace(RunLog(folder).load(), 10, 12, tmp_path / "trace.json")
        trace = json.loads((tmp_path / "trace.json").read_text())
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        assert count == len(spans) == 12
        wanted = {(rank, step) for rank in (0, 1) for step in (10, 11, 12)}
        assert {(event["pid"], event["args"]["step"]) for event in spans} == wanted
        assert {event["name"] for event in spans} == {"compute", "forward 0", "forward 0 stage 1"}
        with EventLog.open(events_path(folder, "launcher"), {"role": "launcher"}) as log:
            log.note("clock", {"host": host, "offset": 3.0})
        assert RunLog(folder).load().clock_offset(1) == 3.0
        with pytest.raises(ConfigError, match="no spans of steps 900 to 910"):
            write_trace(RunLog(folder).load(), 900, 910, tmp_path / "none.json")
