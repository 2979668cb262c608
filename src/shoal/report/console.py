"""Progress for people: one live bar on a terminal, a plain line now and then anywhere else.

The bar is the last line of the terminal. Whatever the program prints goes above it: while the bar is up,
`sys.stdout` and `sys.stderr` pass through `_Above`, which wipes the bar, lets the text through and puts the
bar back. It is drawn by hand because of what drawing costs: `rich.live` renders its whole display for each
refresh and for each `print` of the user, a sizeable part of a 2 ms step. There is no thread: the bar
moves only inside `update`, at most eight times a second, and all other steps pay for one look at the clock.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from time import monotonic
from types import TracebackType
from typing import TextIO, cast

from shoal.report.meter import PHASES, Times
from shoal.report.notebook import NotebookBar, in_notebook
from shoal.types import StepReport, Value

BAR_SECONDS = 0.125
LINE_SECONDS = 5.0

_WIPE = "\r\x1b[2K"


class Console:
    """Shows the steps of one run on `stream`, the standard output unless told otherwise.

    >>> console = Console(total_steps=200, title="zero1")           # doctest: +SKIP
    >>> for step in run.steps(200):                                 # doctest: +SKIP
    ...     console.update(step)
    step 1/200  loss 5.5412  790 samples/s  data 1% compute 88% exposed 6% update 5%
    step 130/200  loss 2.3456  812 samples/s  data 1% compute 88% exposed 6% update 5%
    """

    def __init__(self, total_steps: int | None, title: str = "", stream: TextIO | None = None) -> None:
        """`total_steps` is None where nobody knows before the data end."""
        self.total_steps = total_steps
        self.title = title
        self._stream = stream if stream is not None else sys.stdout
        self._bar = _make_bar(self._stream)
        self.values: Mapping[str, Value] = {}
        """What the user has measured, to be shown."""
        self.slowest = ""
        """The rank that others wait for, in words; empty where they are even."""
        self._interval = LINE_SECONDS if self._bar is None else BAR_SECONDS
        self._recent: list[StepReport] = []  # since the last time something was shown
        self._last: StepReport | None = None
        self._skipped = 0
        self._begun = 0.0
        self._begun_at = 0
        self._due = 0.0

    def update(self, report: StepReport) -> None:
        """Take note of a step, and show it if the time has come. The first and the last are always shown."""
        self._recent.append(report)
        now = monotonic()
        if now >= self._due or report.number == self.total_steps:
            self._show(now)

    def note(self, text: str) -> None:
        """Say something once, above the bar: a checkpoint was written, a worker was lost."""
        if self._bar is not None:
            self._bar.above(self._stream, text + "\n")
        else:
            self._line(text)

    def close(self) -> None:
        """Show the last step if it was not shown yet, and give the terminal back. Twice is harmless."""
        if self._recent:
            self._show(monotonic())
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _show(self, now: float) -> None:
        report = self._recent[-1]
        if self._last is None:
            # Counting time from the end of the first step keeps its warm-up out of the estimate.
            self._begun = now
            self._begun_at = report.number
        self._last = report
        self._skipped += sum(r.skipped for r in self._recent)
        if self._bar is not None:
            self._bar.draw(self._bar_text(report, now))
        else:
            line = f"step {self._number(report)}  {self._facts(report)}  {_split(self._recent)}"
            self._line("  ".join([line, *self._more(report)]))
        self._recent.clear()
        self._due = now + self._interval

    def _facts(self, report: StepReport) -> str:
        seconds = sum(r.seconds for r in self._recent)
        rate = sum(r.samples for r in self._recent) / seconds if seconds > 0 else 0.0
        skipped = f"  {self._skipped} skipped" if self._skipped else ""
        measured: Mapping[str, Value] = {**self.values, **report.metrics}
        metrics = "".join(f"  {name} {_short(value)}" for name, value in measured.items())
        return f"loss {report.loss:.4f}{metrics}  {_rate(rate)} samples/s{skipped}"

    def _more(self, report: StepReport) -> list[str]:
        """What is shown where there is room."""
        return [_size(report.peak_memory), *([self.slowest] if self.slowest else [])]

    def _bar_text(self, report: StepReport, now: float) -> str:
        if self.total_steps is None:
            return f"{self.title}  {report.number}  {self._facts(report)}".strip()[: _columns(self._stream)]
        done = report.number - self._begun_at
        left = max(0, self.total_steps - report.number)
        eta = f"{_clock((now - self._begun) / done * left)} left" if done and left else ""
        if not left:
            eta = f"{_clock(now - self._begun)} in all"
        facts = f"{self._number(report)}  {self._facts(report)}  {eta}".rstrip()
        columns = _columns(self._stream)
        title = f"{self.title}  " if self.title else ""
        for more in self._more(report):
            if len(title) + len(facts) + len(more) + 14 <= columns:
                facts += f"  {more}"
        room = min(40, columns - len(title) - len(facts) - 2)
        if room < 5:
            return f"{title}{facts}"[:columns]
        return f"{title}{_stripe(report.number / max(1, self.total_steps), room, self._stream)}  {facts}"

    def _number(self, report: StepReport) -> str:
        return f"{report.number}" if self.total_steps is None else f"{report.number}/{self.total_steps}"

    def _line(self, text: str) -> None:
        # Flushed at once: in a pipe or a batch log nothing else would show that the run is alive.
        self._stream.write(text + "\n")
        self._stream.flush()


def _make_bar(stream: TextIO) -> _Bar | NotebookBar | None:
    if _is_terminal(stream):
        return _Bar(stream)
    return NotebookBar() if stream is sys.stdout and in_notebook() else None


def _size(memory: int) -> str:
    return f"{memory / 1e9:.2f} GB" if memory >= 1e9 else f"{memory / 1e6:.0f} MB"


def _short(value: Value) -> str:
    return value[:20] if isinstance(value, str) else f"{value:.4g}"


class _Bar:
    """The last line of a terminal, kept below everything that the program prints meanwhile."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""
        self._inside_line = False  # the program has printed the beginning of a line: the bar must not cut it
        self._out = sys.stdout
        self._err = sys.stderr
        # A stream that goes into a file is not ours to touch: only what lands on a terminal can harm the bar.
        if _is_terminal(self._out):
            sys.stdout = cast(TextIO, _Above(self._out, self))
        if _is_terminal(self._err):
            sys.stderr = cast(TextIO, _Above(self._err, self))

    def draw(self, text: str) -> None:
        self._text = text
        if not self._inside_line:
            self._stream.write(_WIPE + text)
            self._stream.flush()

    def above(self, stream: TextIO, text: str) -> int:
        """Let `text` through to `stream`, then put the bar back if the line it was printed on is complete."""
        if not text:
            return 0
        if self._text and not self._inside_line:
            self._stream.write(_WIPE)
            self._stream.flush()
        written = stream.write(text)
        stream.flush()
        self._inside_line = not text.endswith("\n")
        if self._text and not self._inside_line:
            self._stream.write(self._text)
            self._stream.flush()
        return written

    def close(self) -> None:
        # Someone may have replaced the streams after us; theirs must stay.
        if isinstance(sys.stdout, _Above) and sys.stdout.bar is self:
            sys.stdout = self._out
        if isinstance(sys.stderr, _Above) and sys.stderr.bar is self:
            sys.stderr = self._err
        if self._text:
            # The finished bar stays in the scroll-back, also where the program left a line unfinished.
            self._stream.write(f"\n{self._text}\n" if self._inside_line else "\n")
            self._stream.flush()
        self._text = ""  # whoever still holds our stand-in, a logger perhaps, now writes straight through


class _Above:
    """Stands in for a text stream: writes above the bar, and is the stream itself in everything else."""

    def __init__(self, stream: TextIO, bar: _Bar) -> None:
        self._stream = stream
        self.bar = bar

    def write(self, text: str) -> int:
        return self.bar.above(self._stream, text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _columns(stream: TextIO) -> int:
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except OSError:
        columns = 0
    # Some terminals do not know their size and say 0; in some a full last column would wrap.
    return (columns or 80) - 1


def _split(reports: list[StepReport]) -> str:
    shares = Times.of(reports).shares()
    return " ".join(f"{phase} {shares[phase]:.0%}" for phase in PHASES)


def _stripe(fraction: float, width: int, stream: TextIO) -> str:
    """A bar `width` characters wide, coloured unless NO_COLOR says otherwise (https://no-color.org)."""
    full, empty = ("━", "─") if "utf" in (stream.encoding or "").lower() else ("#", "-")
    done = min(width, int(fraction * width))
    if os.environ.get("NO_COLOR"):
        return full * done + empty * (width - done)
    return f"\x1b[36m{full * done}\x1b[2m{empty * (width - done)}\x1b[0m"


def _rate(per_second: float) -> str:
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _clock(seconds: float) -> str:
    """`0:07`, `12:30`, `3:05:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
