"""The one place that draws tables: for a terminal with rich, for docs/numbers.md as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

from benchmarks.report.result import Cell, Column, Goal, Section


def show(section: Section, console: Console) -> None:
    """Print one section."""
    console.print()
    console.print(section.title, style="bold", markup=False, highlight=False, soft_wrap=True)
    if section.columns:
        grid = Grid(box=None, pad_edge=False)
        grid.padding = (0, 3, 0, 0)
        for number, column in enumerate(section.columns):
            grid.add_column(escape(column.name), justify="left" if number == 0 else "right", no_wrap=True)
        for row in section.rows:
            grid.add_row(*(escape(text) for text in texts(row, section.columns)))
        console.print(grid)
    for line in (*section.notes, *map(verdict, section.goals)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def markdown(sections: Iterable[Section]) -> str:
    """Sections one under the other; where they were measured stands above those that share it."""
    out: list[str] = []
    before = ""
    for section in sections:
        said = section.origin.sentence() if section.origin else ""
        if said != before:
            out += [f"*{said}*", ""]
            before = said
        out += [*_one(section), ""]
    return "\n".join(out)


def _one(section: Section) -> Iterator[str]:
    yield f"**{section.title}**"
    if section.columns:
        yield ""
        yield _line(_quoted(column.name) for column in section.columns)
        yield _line("---" if number == 0 else "--:" for number, _ in enumerate(section.columns))
        for row in section.rows:
            yield _line(_quoted(text) for text in texts(row, section.columns))
    lines = [*map(_quoted, section.notes), *map(_quoted, map(verdict, section.goals))]
    if lines:
        yield ""
        yield from (f"- {line}" for line in lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _quoted(text: str) -> str:
    """Text that Markdown leaves as it is."""
    for sign in "\\*_|<":
        text = text.replace(sign, f"\\{sign}")
    return text


def texts(row: Iterable[Cell], columns: Iterable[Column]) -> list[str]:
    """A row as people read it.

    >>> texts(["ddp", 0.0123, None], [Column("name"), Column("step", "seconds"), Column("share", "{:.0%}")])
    ['ddp', '12.3 ms', '-']
    """
    return [_text(cell, column.form) for cell, column in zip(row, columns, strict=True)]


def _text(cell: Cell, form: str) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if form == "seconds":
        return seconds(cell)
    return size(int(cell)) if form == "bytes" else form.format(cell)


def verdict(goal: Goal) -> str:
    """
    >>> verdict(Goal("shared / torch ddp", 0.874, 0.92))
    'met: shared / torch ddp = 0.874 (goal: at most 0.92)'
    """
    word, bound = "met" if goal.met else "MISSED", "at least" if goal.least else "at most"
    return f"{word}: {goal.what} = {goal.found:.3f} (goal: {bound} {goal.goal:g})"


def seconds(value: float) -> str:
    """A duration in the unit that suits it.

    >>> seconds(0.000085), seconds(0.0123), seconds(6.8), seconds(2700)
    ('85.0 µs', '12.3 ms', '6.80 s', '45.0 min')
    """
    if value < 1:
        return f"{value * 1e3:.1f} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.1f} µs"
    return f"{value:.2f} s" if value < 120 else f"{value / 60:.1f} min"


def size(nbytes: int) -> str:
    """Binary kilobytes and megabytes.

    >>> size(4096), size(16 << 20)
    ('4 KB', '16 MB')
    """
    return f"{nbytes >> 20} MB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KB"
