"""Tables as plain text: the same in a terminal, a file and a pipe."""

from __future__ import annotations

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows in columns; those numbered in `right` are flush right.

    >>> print(columns([["name", "step"], ["first", "7"]], right=[1]))
    name   step
    first     7
    """
    widths = [max(len(row[place]) for row in rows if place < len(row)) for place in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(widths[place]) if place in right else cell.ljust(widths[place])
            for place, cell in enumerate(row)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def size_text(size: float) -> str:
    """Bytes as people read them.

    >>> size_text(999), size_text(1_234_567), size_text(5e9)
    ('999 B', '1.2 MB', '5.0 GB')
    """
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
