"""A file reads in one sitting and a function on one screen."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "shoal"
FILES = sorted(SOURCE.rglob("*.py"))

FILE_LINES = 300
FUNCTION_LINES = 60
MEDIAN_LINES = 170
STEP_LINES = 170
"""train/step.py is the first file a newcomer reads."""


def name_of(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def length(file: Path) -> int:
    return len(file.read_text().splitlines())


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_short(file: Path) -> None:
    assert length(file) <= FILE_LINES, f"{name_of(file)} has {length(file)} lines; split it by idea"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_functions_are_short(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{name_of(file)}:{node.lineno}: {node.name} has {lines} lines"


def test_the_median_file_is_short() -> None:
    real = [length(file) for file in FILES if file.name != "__init__.py"]
    assert statistics.median(real) <= MEDIAN_LINES


def test_the_step_is_short() -> None:
    assert length(SOURCE / "train" / "step.py") <= STEP_LINES


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_every_module_says_what_it_is(file: Path) -> None:
    doc = ast.get_docstring(ast.parse(file.read_text()))
    assert doc, f"{name_of(file)} has no docstring"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_face_takes_no_unnamed_options(file: Path) -> None:
    """`**kwargs` hides what a function takes; torch's own protocols are the only ones that need it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            assert node.args.kwarg is None, (
                f"{name_of(file)}:{node.lineno}: {node.name} takes **{node.args.kwarg.arg}"
            )
