"""The meter adds up, the log stays whole JSON, the console reads well, the charts have their shape."""

from __future__ import annotations

import builtins
import io
import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import pytest

from shoal.errors import ConfigError
from shoal.report import (
    Console,
    EventLog,
    Meter,
    Times,
    draw,
    last_pass,
    peak_memory,
    read_events,
    save_png,
    time_split,
)
from shoal.types import StepReport

STEP = StepReport(
    number=1,
    epoch=0,
    loss=2.3456,
    samples=32,
    count=4096.0,
    seconds=0.04,
    data_seconds=0.0004,
    compute_seconds=0.0352,
    exposed_seconds=0.0024,
    update_seconds=0.002,
    bytes_sent=1000,
    peak_memory=2000,
    lr=3e-4,
)

KEYS = (
    "step epoch loss samples count samples_per_second counts_per_second seconds data compute exposed update "
    "bytes_sent peak_memory lr grad_norm skipped between time"
)


def strict(line: str) -> dict[str, Any]:
    """Parse as a standard reader would: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(line, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


class TestMeter:
    def test_every_stretch_belongs_to_one_phase(self, monkeypatch: pytest.MonkeyPatch) -> None:
        moments = iter([0, 0, 10, 30, 60, 100, 150, 170])  # ns: made, started, five marks, stopped
        monkeypatch.setattr("shoal.report.meter.perf_counter_ns", lambda: next(moments))
        meter = Meter()
        meter.start()
        for phase in ("data", "compute", "exposed", "compute", "update"):
            meter.mark(phase)
        times = meter.stop()
        assert times == Times(
            *(pytest.approx(n * 1e-9) for n in (170, 10, 60, 30, 50))  # type: ignore[arg-type]
        )

    def test_a_new_step_starts_from_zero(self) -> None:
        meter = Meter()
        meter.start()
        meter.mark("data")
        meter.start()
        assert meter.stop().data == 0

    def test_shares_add_up_and_never_exceed_the_whole(self) -> None:
        assert sum(Times(1.0, 0.1, 0.2, 0.3, 0.1).shares().values()) == pytest.approx(1)
        assert Times(0.5, 0.0, 1.0, 0.0, 0.0).shares()["compute"] == 1
        assert set(Times(0, 0, 0, 0, 0).shares().values()) == {0.0}

    def test_times_of_many_steps(self) -> None:
        assert Times.of([STEP, STEP]).compute == pytest.approx(2 * STEP.compute_seconds)
        assert Times.of([]).seconds == 0

    def test_peak_memory_is_in_bytes_and_counts_what_is_gone(self) -> None:
        size = 32 << 20
        block = bytearray(size)
        block[::4096] = b"x" * len(block[::4096])  # memory is resident once it is touched
        del block
        assert peak_memory() > size


class TestEvents:
    def test_a_line_per_step_with_every_key(self, tmp_path: Path) -> None:
        path = tmp_path / "made" / "events.jsonl"
        with EventLog.open(path, {"strategy": "zero1", "workers": 4}) as log:
            log.write(STEP)
            log.write(replace(STEP, number=2, grad_norm=1.5, skipped=True))
        header, first, second = (strict(line) for line in path.read_text().splitlines())
        assert header["event"] == "start"
        assert header["workers"] == 4
        assert list(first) == KEYS.split()
        assert first["loss"] == STEP.loss
        assert first["samples_per_second"] == pytest.approx(800)
        assert first["counts_per_second"] == pytest.approx(102400)
        assert first["grad_norm"] is None
        assert second["grad_norm"] == 1.5
        assert second["skipped"] is True

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_a_number_is_null(self, tmp_path: Path, bad: float) -> None:
        path = tmp_path / "events.jsonl"
        with EventLog(path) as log:
            log.write(replace(STEP, loss=bad, grad_norm=bad, lr=bad, count=bad, seconds=0.0))
        event = strict(path.read_text())
        assert [event[key] for key in ("loss", "grad_norm", "lr", "count")] == [None] * 4

    def test_floats_survive_exactly(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        with EventLog(path) as log:
            log.write(replace(STEP, loss=0.1 + 0.2))
        assert read_events(path)[0]["loss"] == 0.1 + 0.2

    def test_steps_wait_for_half_a_second(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr("shoal.report.events.time", lambda: now)
        path = tmp_path / "events.jsonl"
        with EventLog(path) as log:
            log.write(STEP)
            assert path.read_text() == ""
            now += 0.6
            log.write(STEP)
            assert len(read_events(path)) == 2

    def test_a_torn_last_line_is_left_out_and_then_cut(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        with EventLog(path) as log:
            log.write(STEP)
        with path.open("a") as file:
            file.write('{"step": 2, "los')
        assert [event["step"] for event in read_events(path)] == [1]
        with EventLog.open(path, {"strategy": "ddp"}) as log:
            log.write(replace(STEP, number=2))
        assert [strict(line).get("step") for line in path.read_text().splitlines()] == [1, None, 2]

    def test_a_file_of_another_kind_is_left_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "thesis.txt"
        path.write_text("chapter one\nlast words")
        with pytest.raises(ConfigError, match="not an event log"):
            EventLog(path)
        assert path.read_text() == "chapter one\nlast words"

    def test_damage_in_the_middle_is_reported(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
        with pytest.raises(ConfigError, match="line 2"):
            read_events(path)

    def test_an_empty_log_has_no_events(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        path.touch()
        assert read_events(path) == []

    def test_kill_9_leaves_whole_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "events.jsonl"
        program = (
            "import sys, shoal.report.events as e\n"
            "from tests_step import STEP\n"
            "e.FLUSH_SECONDS = 0.001\n"
            "log = e.EventLog(sys.argv[1])\n"
            "while True: log.write(STEP)\n"
        )
        (tmp_path / "tests_step.py").write_text(f"from shoal.types import StepReport\nSTEP = {STEP!r}\n")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        with subprocess.Popen([sys.executable, "-c", program, str(path)], env=environment) as child:
            while not path.exists() or path.stat().st_size < 10_000:
                assert child.poll() is None
                time.sleep(0.01)
            child.send_signal(signal.SIGKILL)
        text = path.read_text()
        assert text.endswith("\n")
        assert all(strict(line)["step"] == 1 for line in text.splitlines())

    def test_last_pass_drops_what_a_resume_took_back(self) -> None:
        log: list[dict[str, Any]] = [{"event": "start"}]
        log += [{"step": n, "pass": 1} for n in (1, 2, 3, 4)]
        log += [{"event": "start"}] + [{"step": n, "pass": 2} for n in (3,)]
        assert last_pass(log) == [{"step": 1, "pass": 1}, {"step": 2, "pass": 1}, {"step": 3, "pass": 2}]

    def test_closing_twice_is_harmless(self, tmp_path: Path) -> None:
        log = EventLog(tmp_path / "events.jsonl")
        log.close()
        log.close()


@dataclass
class Terminal:
    """A pseudo-terminal: `stream` is the program's side, `screen()` what a person would see."""

    stream: TextIO
    master: int

    def raw(self) -> str:
        self.stream.flush()
        os.set_blocking(self.master, False)
        data = b""
        try:
            while chunk := os.read(self.master, 65536):
                data += chunk
        except BlockingIOError:
            pass
        return data.decode()

    def screen(self) -> list[str]:
        """Play the text back: return and `[2K` start the line afresh, colours do nothing."""
        lines = []
        for line in self.raw().replace("\r\n", "\n").split("\n"):
            shown = line.split("\r\x1b[2K")[-1]
            for colour in ("\x1b[36m", "\x1b[2m", "\x1b[0m"):
                shown = shown.replace(colour, "")
            lines.append(shown)
        return lines


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        yield Terminal(stream, master)
    os.close(master)


class TestConsole:
    def test_plain_lines_first_last_and_now_and_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr("shoal.report.console.monotonic", lambda: now)
        out = io.StringIO()
        with Console(200, stream=out) as console:
            for number in range(1, 201):
                console.update(replace(STEP, number=number))
                now += 0.04
        lines = out.getvalue().splitlines()
        assert lines[0] == (
            "step 1/200  loss 2.3456  800 samples/s  data 1% compute 88% exposed 6% update 5%  0 MB"
        )
        assert lines[-1].startswith("step 200/200")
        assert len(lines) == 3  # 8 s of steps, a line every 5 s
        assert "\x1b" not in out.getvalue()

    def test_a_run_that_stops_early_shows_its_last_step(self) -> None:
        out = io.StringIO()
        with Console(200, stream=out) as console:
            for number in (1, 2, 3):
                console.update(replace(STEP, number=number, skipped=number == 2))
        assert out.getvalue().splitlines()[-1].startswith("step 3/200  loss 2.3456  800 samples/s  1 skipped")

    def test_notes_are_lines_of_their_own(self) -> None:
        out = io.StringIO()
        with Console(2, stream=out) as console:
            console.note("checkpoint written")
        assert out.getvalue() == "checkpoint written\n"

    def test_a_dumb_terminal_gets_plain_lines(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TERM", "dumb")
        with redirect_stdout(terminal.stream), Console(1) as console:
            console.update(STEP)
        assert terminal.raw().startswith("step 1/1  loss")

    def test_prints_go_above_the_bar(self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
        now = 100.0
        monkeypatch.setattr("shoal.report.console.monotonic", lambda: now)
        with redirect_stdout(terminal.stream), Console(4, title="zero1") as console:
            assert sys.stdout is not terminal.stream
            for number in (1, 2, 3, 4):
                console.update(replace(STEP, number=number))
                print("the user says", number)
                now += 1.0
            console.note("done")
            console.close()
            assert sys.stdout is terminal.stream
        *above, bar, end = terminal.screen()
        assert above == [*(f"the user says {n}" for n in (1, 2, 3, 4)), "done"]
        assert bar.startswith("zero1  ━━━━")
        assert bar.endswith("4/4  loss 2.3456  800 samples/s  0:03 in all  0 MB")
        assert len(bar) < 80
        assert end == ""

    def test_the_bar_never_cuts_an_unfinished_line(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 100.0
        monkeypatch.setattr("shoal.report.console.monotonic", lambda: now)
        with redirect_stdout(terminal.stream), Console(9) as console:
            console.update(STEP)
            print("loading", end="")
            now += 1.0
            console.update(replace(STEP, number=2))
            print(" done")
        lines = terminal.screen()
        assert lines[0] == "loading done"
        assert "2/9  loss" in lines[1]

    def test_most_steps_do_not_touch_the_terminal(
        self, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = 100.0
        monkeypatch.setattr("shoal.report.console.monotonic", lambda: now)
        with redirect_stdout(terminal.stream), Console(1000) as console:
            for number in range(1, 501):
                console.update(replace(STEP, number=number))
                now += 0.002
            assert terminal.raw().count("\r") == 8  # one second of 2 ms steps
            console.close()
            assert "500/1000  loss 2.3456  800 samples/s  0:01 left" in terminal.raw()

    def test_a_stream_held_after_the_end_still_works(self, terminal: Terminal) -> None:
        with redirect_stdout(terminal.stream), Console(1) as console:
            console.update(STEP)
            held = sys.stdout
        terminal.raw()
        held.write("late\n")
        assert terminal.raw() == "late\r\n"


class TestChart:
    def test_shape(self) -> None:
        lines = draw([5 / (i + 1) for i in range(300)], width=60, height=10, title="loss").splitlines()
        assert lines[0] == "loss"
        assert len(lines) == 1 + 10 + 2
        assert max(map(len, lines)) == 60
        assert lines[1].strip().startswith("5 ┤")
        assert lines[-1].split() == ["1", "300"]

    def test_a_falling_curve_falls(self) -> None:
        first, *_, last = draw([4.0, 3.0, 2.0, 1.0], width=30, height=6).splitlines()[:6]
        assert len(first) < len(last)

    def test_two_series_have_a_legend_and_two_signs(self) -> None:
        text = draw({"loss": [3.0, 2.0, 1.0], "smooth": [3.0, 2.5, 2.0]})
        assert text.splitlines()[0] == "⠒ loss   • smooth"
        assert text.count("•") > 10

    def test_nan_leaves_a_gap(self) -> None:
        row = draw([1.0] * 30 + [math.nan] * 40 + [1.0] * 30, width=60, height=1).splitlines()[0]
        left, gap, right = row.partition(" " * 20)
        assert left.strip()
        assert gap
        assert right.strip()

    def test_a_value_between_two_gaps_is_still_shown(self) -> None:
        middle = draw([math.nan, 1.0, math.nan], width=40, height=1).splitlines()[0].split("┤")[1]
        assert len(middle.strip()) == 1

    @pytest.mark.parametrize("values", [[], [1.0], [2.0, 2.0], [0.0], [math.nan], [math.inf, -math.inf]])
    def test_odd_series_have_the_same_shape(self, values: list[float]) -> None:
        assert len(draw(values, height=5).splitlines()) == 7

    def test_time_split_is_as_wide_as_asked(self) -> None:
        for width in (10, 33, 40):
            assert len(time_split(STEP, width=width).split("  ")[0]) == width
        assert time_split(STEP).endswith("data 1% compute 88% exposed 6% update 5%")
        event = {"seconds": 1.0, "compute": 0.5}
        assert time_split(event).endswith("data 0% compute 50% exposed 0% update 0% other 50%")

    def test_png_is_written(self, tmp_path: Path) -> None:
        path = tmp_path / "loss.png"
        noisy = [math.nan if i == 70 else 5 / (1 + i / 20) for i in range(100)]
        save_png(path, {"ddp": noisy, "zero1": [3.0, 2.0], "none": []}, "a title", "step", "loss")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 10_000

    def test_png_leaves_pyplot_alone(self, tmp_path: Path) -> None:
        program = "import sys; from shoal.report import save_png; save_png(sys.argv[1], {'a': [1.0, 2.0]})\n"
        program += "assert 'matplotlib.pyplot' not in sys.modules"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run([sys.executable, "-c", program, tmp_path / "a.png"], env=environment, check=True)

    def test_without_matplotlib_the_remedy_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = builtins.__import__

        def without(name: str, *rest: Any) -> Any:
            if name.startswith("matplotlib"):
                raise ImportError(name)
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(ConfigError, match=r"pip install shoal\[plots\]"):
            save_png(tmp_path / "a.png", {"a": [1.0]})

    def test_smoothing_follows_a_straight_line_exactly(self) -> None:
        from shoal.report.chart import _smooth

        line = [3.0 - 0.01 * i for i in range(200)]
        assert _smooth(line) == pytest.approx(line)
        assert _smooth([1.0, 5.0]) == [1.0, 5.0]
