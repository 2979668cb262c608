"""One test for all files of the source: as one test each they would take most of the time of the structure tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path


def each(files: Sequence[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make a check of one file the test of all of these. The first that fails is named."""

    def make(check: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            for file in files:
                try:
                    check(file)
                except AssertionError as error:
                    error.add_note(f"in {file}")
                    raise

        test.__name__ = check.__name__
        test.__doc__ = check.__doc__
        return test

    return make
