"""A file reads in one sitting and a function on one screen."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

import pytest

from each import each

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shoal"
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = ROOT / "tests"

FILE_LINES = 450
MOST_FILES_LINES = 300
"""Nine files of ten."""
FUNCTION_LINES = 60
MEDIAN_LINES = 170
STEP_LINES = 130
"""train/step.py is the first file a newcomer reads."""


def name_of(file: Path) -> str:
    return str(file.relative_to(SOURCE))


def length(file: Path) -> int:
    return len(file.read_text().splitlines())


@each(FILES)
def test_files_are_short(file: Path) -> None:
    assert length(file) <= FILE_LINES, f"{name_of(file)} has {length(file)} lines; split it by idea"


@each(FILES)
def test_functions_are_short(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= FUNCTION_LINES, f"{name_of(file)}:{node.lineno}: {node.name} has {lines} lines"


def test_the_median_file_is_short() -> None:
    real = [length(file) for file in FILES if file.name != "__init__.py"]
    assert statistics.median(real) <= MEDIAN_LINES


def test_most_files_are_short() -> None:
    real = sorted(length(file) for file in FILES if file.name != "__init__.py")
    assert real[int(0.9 * len(real))] <= MOST_FILES_LINES


FOLDER_FILES = 16


def test_folders_are_small() -> None:
    """A newcomer sees what a folder holds at a glance: more files than this are a heap."""
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {file.parent for file in FILES}}
    assert not {name_of(folder): n for folder, n in counts.items() if n > FOLDER_FILES}


def test_the_step_is_short() -> None:
    assert length(SOURCE / "train" / "step.py") <= STEP_LINES


@each(FILES)
def test_every_module_says_what_it_is(file: Path) -> None:
    doc = ast.get_docstring(ast.parse(file.read_text()))
    assert doc, f"{name_of(file)} has no docstring"


@each(FILES)
def test_the_face_takes_no_unnamed_options(file: Path) -> None:
    """`**kwargs` hides what a function takes; torch's own protocols are the only ones that need it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            assert node.args.kwarg is None, (
                f"{name_of(file)}:{node.lineno}: {node.name} takes **{node.args.kwarg.arg}"
            )


def packed_in(file: Path) -> list[str]:
    """Places of `self.a, self.b = x, y`. A swap needs the tuple; the result of one call may be unpacked."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
            continue
        target = node.targets[0]
        if not (isinstance(target, ast.Tuple) and any(isinstance(t, ast.Attribute) for t in target.elts)):
            continue
        swapped = {ast.unparse(t) for t in target.elts} == {ast.unparse(v) for v in node.value.elts}
        if not swapped:
            found.append(f"{name_of(file)}:{node.lineno}: {ast.unparse(node)}")
    return found


@each(FILES)
def test_attributes_are_assigned_one_per_line(file: Path) -> None:
    packed = packed_in(file)
    assert not packed, "one attribute per line:\n" + "\n".join(packed)


def test_no_two_files_of_tests_have_one_name() -> None:
    """The folders of tests are no packages: of two modules with one name pytest can import the first only."""
    places: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("*.py")):
        if file.name != "conftest.py":
            places.setdefault(file.name, []).append(str(file.parent.relative_to(TESTS)))
    assert not {name: folders for name, folders in places.items() if len(folders) > 1}


WRITTEN = re.compile(r"^<!-- (\w+)(?::\w+)? -->\n.*?^<!-- /\1 -->", re.MULTILINE | re.DOTALL)
"""What a command has written into a page, between two marks."""
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), TESTS / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_pages_are_short(page: Path) -> None:
    """Pages are read beside code, in windows of that width. Rows of tables cannot be broken."""
    lines = WRITTEN.sub("", page.read_text()).splitlines()
    long = [line for line in lines if len(line) > 120 and not line.startswith("|")]
    assert not long, "lines of more than 120 characters:\n" + "\n".join(long)
