"""Guides that show what commands print: they print it."""

from __future__ import annotations

import doctest
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main as cli

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CHANGES = [
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "DATE"),
    (r"[\d.]+ GB/s", "RATE"),
    (r"torch [\d.]+(\+\w+)?", "TORCH"),
]
"""What is another on another day."""


def fixed(text: str) -> str:
    for pattern, word in CHANGES:
        text = re.sub(pattern, word, text)
    return text


def command(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a command prints, errors too."""
    monkeypatch.setattr(sys, "argv", line.split())
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main()
    return "".join(capsys.readouterr())


def test_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Programs and commands of the page in the order in which they stand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Run sets it
    names: dict[str, Any] = {"__name__": "__main__"}
    checker, seen = doctest.OutputChecker(), 0
    for kind, text in BLOCK.findall((GUIDES / "checkpoints.md").read_text()):
        if kind == "python":
            exec(compile(text, "checkpoints.md", "exec"), names)
        elif kind == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                line, _, wanted = part.partition("\n")
                got = command(line, monkeypatch, capsys)
                same = checker.check_output(fixed(wanted), fixed(got), doctest.ELLIPSIS)
                assert same, f"{line} prints:\n{got}"
                seen += 1
    assert seen >= 10
