"""Benchmarks without measuring: their command line, their results, and the page that shows them."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import main, parser_of
from benchmarks.catalogue import BENCHMARKS, find
from benchmarks.report.numbers_page import PAGE, PUBLISHED, published, render
from benchmarks.report.origin import ROOT, Origin, find_origin
from benchmarks.report.result import Column, Goal, Result, Section, read_result

FOLDER = ROOT / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_says_what_it_measures_how_to_call_it_and_its_goals(name: str) -> None:
    benchmark = find(name)
    said = benchmark.__doc__ or ""
    assert re.search(rf"^    scripts/bench {name}\b", said, re.MULTILINE)
    assert "goal" in said.lower()
    assert "--write" in parser_of(name).format_help()
    assert callable(benchmark.measure)


def test_the_readme_lists_them_all() -> None:
    named = re.findall(r"^\| \[(\w+)\]\((\S+)\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert dict(named) == {name: f"{folder}/{name}.py" for name, folder in BENCHMARKS.items()}


def test_tables_and_pictures_are_drawn_in_one_place() -> None:
    tools = {"rich": {"__main__.py", "report/draw.py"}, "matplotlib": {"report/picture.py"}}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for tool in {name.partition(".")[0] for name in names} & set(tools):
                assert str(file.relative_to(FOLDER)) in tools[tool], f"{file} draws by itself"


def test_every_file_has_a_docstring_and_no_folder_is_a_heap() -> None:
    for file in FILES:
        assert ast.get_docstring(ast.parse(file.read_text())), file
    assert max(len(list(folder.glob("*.py"))) for folder in {file.parent for file in FILES}) <= 15


def test_the_page_says_what_the_results_hold() -> None:
    page = PAGE.read_text()
    named = set(re.findall(r"<!-- numbers:(\w+) -->", page))
    assert named == {path.stem for path in PUBLISHED.glob("*.json")}, (
        "a result that nobody sees, or no result"
    )
    assert render(page, published) == page, "write it anew: scripts/bench --write"


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_every_result_says_where_it_was_measured(path: Path) -> None:
    result = read_result(path)
    assert result.benchmark == path.stem
    assert result.sections
    for section in result.sections:
        assert section.origin is not None
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", section.origin.date)
        assert all([section.origin.commit, section.origin.torch, section.origin.machine])
        assert all(len(row) == len(section.columns) for row in section.rows)


def test_a_result_is_written_and_read(tmp_path: Path) -> None:
    section = Section(
        "a [table]",
        [Column("name"), Column("x", "{:.1f}")],
        [["one [1]", 1.5], ["two", None]],
        [Goal("x", 1.5, 2.0, least=True)],
        ["a note"],
        part="p",
        raw={"losses": [1.0, 2.0]},
        origin=Origin("2026-11-18", "abc", "2.13.0", "a machine"),
    )
    Result("x", [section]).write(tmp_path / "new" / "x.json")
    assert read_result(tmp_path / "new" / "x.json") == Result("x", [section])
    assert '["two",null]' in (tmp_path / "new" / "x.json").read_text(), "a row is a line"


def test_what_is_not_measured_again_keeps_its_origin() -> None:
    def section(part: str, date: str) -> Section:
        return Section(part, part=part, origin=Origin(date, "a", "b", "c"))

    old = Result("server", [section("step", "2026-11-16"), section("push", "2026-11-16")])
    merged = old.replace_parts([section("push", "2026-11-18"), section("first", "2026-11-18")])
    assert [(s.part, s.origin and s.origin.date) for s in merged.sections] == [
        ("step", "2026-11-16"),
        ("push", "2026-11-18"),
        ("first", "2026-11-18"),
    ]


def test_this_machine_is_known() -> None:
    origin = find_origin()
    assert re.search(r"\d cores \(.*\), \d+ GiB", origin.machine)
    assert origin.torch.startswith("2.")


def test_a_run_from_another_folder(tmp_path: Path) -> None:
    """As from a clean checkout: the package is installed, benchmarks/ is on nobody's path."""

    command = [sys.executable, FOLDER, "order", "--out", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr  # a busy machine may miss a goal
    assert "the global order of samples" in done.stdout
    sections = json.loads((tmp_path / "out" / "order.json").read_text())["sections"]
    assert sections[0]["rows"][0][0] == 1_000_000
    assert sections[0]["origin"]["date"] >= "2026-11-18"


def test_quick_numbers_are_not_published(capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_text() for path in PUBLISHED.glob("*.json")}
    with pytest.raises(SystemExit) as ended:
        main(["exchange", "--quick", "--write"])
    assert ended.value.code == 2
    assert "leave --write out" in capsys.readouterr().err
    assert before == {path: path.read_text() for path in PUBLISHED.glob("*.json")}
