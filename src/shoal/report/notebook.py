"""The progress bar in a notebook: one output of the cell, replaced as training goes on."""

from __future__ import annotations

import builtins
import re
from typing import Any, TextIO

_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def in_notebook() -> bool:
    """Whether this is a kernel of Jupyter's: IPython at a terminal has none.

    >>> in_notebook()
    False
    """
    get = getattr(builtins, "get_ipython", None)
    return get is not None and getattr(get(), "kernel", None) is not None


class NotebookBar:
    """One line that a notebook shows below the cell; what the program prints stands in an output of its own."""

    def __init__(self) -> None:
        from IPython.display import display

        self._display: Any = display
        self._handle: Any = None

    def draw(self, text: str) -> None:
        """Show this line in place of the one before."""
        shown = {"text/plain": _COLOUR.sub("", text)}
        if self._handle is None:
            self._handle = self._display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)

    def above(self, stream: TextIO, text: str) -> int:
        """What is said once."""
        written = stream.write(text)
        stream.flush()
        return written

    def close(self) -> None:
        """The last line stays."""
        self._handle = None
