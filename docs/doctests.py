"""For mkdocstrings: examples in docstrings become code blocks, where markdown would read `>>>` as a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(>>> .*(?:\n.+)*)", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts a fence around every example."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)
