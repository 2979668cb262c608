"""docs/numbers.md: each block between `<!-- numbers:NAME -->` and `<!-- /numbers -->` shows results/NAME.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.report.draw import markdown
from benchmarks.report.origin import ROOT
from benchmarks.report.result import Result, read_result

PAGE = ROOT / "docs" / "numbers.md"
PUBLISHED = ROOT / "benchmarks" / "results"
"""One file a benchmark: what the page says. What a run finds goes to results/latest/ and is not kept in the history."""
LATEST = PUBLISHED / "latest"

_BLOCK = re.compile(r"(<!-- numbers:(\w+) -->\n).*?(<!-- /numbers -->)", re.DOTALL)


def render(page: str, result_of: Callable[[str], Result]) -> str:
    """The page with every block as its result has it.

    >>> from benchmarks.report.result import Section
    >>> page = "Text.\\n<!-- numbers:order -->\\nold\\n<!-- /numbers -->\\nMore."
    >>> print(render(page, lambda name: Result(name, [Section("new")])))
    Text.
    <!-- numbers:order -->
    **new**
    <!-- /numbers -->
    More.
    """
    return _BLOCK.sub(
        lambda found: found[1] + markdown(result_of(found[2]).sections).rstrip() + "\n" + found[3], page
    )


def published(name: str) -> Result:
    """What the page says of a benchmark; nothing if it says nothing yet."""
    path = PUBLISHED / f"{name}.json"
    return read_result(path) if path.exists() else Result(name)


def publish(fresh: Result, whole: bool) -> Path:
    """Keep what was measured as what the page says; `whole`: nothing of before stays."""
    kept = fresh if whole else published(fresh.benchmark).replace_parts(fresh.sections)
    path = PUBLISHED / f"{fresh.benchmark}.json"
    kept.write(path)
    return path


def write_page() -> Path:
    """Write the page anew from all results."""
    PAGE.write_text(render(PAGE.read_text(), published))
    return PAGE
