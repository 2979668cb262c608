"""README and docs are held to the code: examples run, links lead somewhere, commands and sentences exist."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.__main__ import parser_of
from benchmarks.catalogue import BENCHMARKS
from shoal.cli.main import app

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shoal"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FOLDERS = ("scripts/", "docs/", "src/", "tests/", "examples/", "benchmarks/", ".ci/")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *kinds: str) -> Iterator[str]:
    yield from (text for kind, text in BLOCK.findall(page.read_text()) if kind in kinds)


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text())


def program(page: Path) -> str:
    """The python blocks of a page, one after the other, on the lines where they stand: errors point there."""
    lines = [""] * len(page.read_text().splitlines())
    for match in BLOCK.finditer(page.read_text()):
        if match[1] == "python":
            first = page.read_text().count("\n", 0, match.start()) + 1
            lines[first : first + match[2].count("\n")] = match[2].splitlines()
    return "\n".join(lines)


def run_page(page: Path) -> None:
    exec(compile(program(page), str(page), "exec", dont_inherit=True), {"__name__": "__main__"})


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own to run in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Run sets it; the next test gets its own back
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page, "python"))], ids=name_of)
@pytest.mark.usefixtures("elsewhere")
def test_examples_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The python blocks of a page are one program, run from top to bottom."""
    run_page(page)
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    if page.name == "README.md":
        losses = {int(words[0]): float(words[1]) for words in printed if len(words) == 2}
        assert max(losses) == 32
        assert losses[32] < 0.8 * losses[1]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for label, target in LINK.findall(prose(page)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)}: the link to {target} leads nowhere"
        assert file.is_relative_to(ROOT), f"{name_of(page)}: {target} leaves the repository"
        assert not anchor, f"{name_of(page)}: link to pages, not into them; headings move"
        if file.suffix == ".py" and label.startswith("`"):
            assert label.strip("`") in names_in(file), f"{name_of(page)}: {target} defines no {label}"


def names_in(file: Path) -> set[str]:
    """Everything a module defines: functions, classes, methods and names assigned at its top."""
    tree = ast.parse(file.read_text())
    found = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_in_text_exist(page: Path) -> None:
    for code in CODE.findall(prose(page)):
        word = code.split()[0]
        if not word.startswith(FOLDERS) or "<" in word or "*" in word:
            continue
        assert (ROOT / word).exists(), f"{name_of(page)} names {word}, which does not exist"


def test_files_named_in_the_source_exist() -> None:
    """A docstring or comment that sends the reader to another file: train.py and script.py are the user's."""
    files = [
        f"/{file.relative_to(ROOT)}" for file in (*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"))
    ]
    files += ["/train.py", "/script.py"]
    for file in SOURCE.rglob("*.py"):
        for word in re.findall(r"(?<![\w./<{*])(?:[a-z_]\w*/)*[a-z_]\w*\.py\b", file.read_text()):
            assert any(f.endswith(f"/{word}") for f in files), f"{file.relative_to(ROOT)} names {word}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_benchmarks_named_in_text_exist(page: Path) -> None:
    for name in re.findall(r"scripts/bench ([a-z]\w*)", page.read_text()):
        assert name in BENCHMARKS, f"{name_of(page)}: there is no benchmark {name}"


def with_verbs(command: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by the words that it takes, as "run" or "ckpt ls"."""
    for name, inner in getattr(command, "commands", {}).items():
        yield f"{above}{name}", inner
        yield from with_verbs(inner, f"{above}{name} ")


def names_of(parameter: Any) -> list[str]:
    """How an option is written, its opposite too, as --no-dry-run."""
    return [*parameter.opts, *parameter.secondary_opts]


COMMANDS: dict[str, Any] = dict(with_verbs(typer.main.get_command(app)))


def commands(page: Path) -> Iterator[str]:
    """Everything that looks like a use of the `shoal` command, in code blocks and in code inside text."""
    texts = [text.replace("\\\n", " ") for text in blocks(page, "bash", "console", "sh")]
    lines = [line for text in texts for line in text.splitlines()]
    for line in [*lines, *CODE.findall(prose(page))]:
        if line.startswith("shoal "):
            yield line.partition("#")[0].strip()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_exist(page: Path) -> None:
    for line in commands(page):
        _, verb, *words = line.split()
        if verb == "--version":
            continue
        if words and f"{verb} {words[0]}" in COMMANDS:
            verb = f"{verb} {words.pop(0)}"
        assert verb in COMMANDS, f"{name_of(page)}: `{line}`: there is no verb {verb}"
        if hasattr(COMMANDS[verb], "commands"):
            assert not words, f"{name_of(page)}: `{line}`: {verb} has no verb {words[0]}"
        options = {name for parameter in COMMANDS[verb].params for name in names_of(parameter)}
        for word in words:
            if word.endswith(".py") and verb == "run":
                break  # what follows belongs to the script
            if word == "--":
                break
            if word.startswith("--"):
                assert word.partition("=")[0] in options, f"{name_of(page)}: `{line}`: {verb} has no {word}"


@cache
def of_benchmarks() -> set[str]:
    """All options of `scripts/bench`."""
    return {
        word for name in BENCHMARKS for action in parser_of(name)._actions for word in action.option_strings
    }


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_named_in_text_exist(page: Path) -> None:
    known = {
        name for command in COMMANDS.values() for parameter in command.params for name in names_of(parameter)
    }
    known |= {"--version", "--help", "--fix", "--strict"}  # of shoal itself, of scripts/lint and of mypy
    for code in CODE.findall(prose(page)):
        for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*", code):
            if word in of_benchmarks():
                continue
            assert word in known, f"{name_of(page)}: no command has an option {word}"


def test_the_tree_names_every_folder() -> None:
    """Every folder has its row, and every row its folder and that folder's own first sentence."""
    source = ROOT / "src" / "shoal"
    rows = dict(
        re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", (ROOT / "docs" / "tree.md").read_text(), re.MULTILINE)
    )
    folders = {
        str(f.parent.relative_to(source)): f for f in source.rglob("__init__.py") if f.parent != source
    }
    assert set(rows) == set(folders)
    for name, file in folders.items():
        doc = (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n\n")[0].replace("\n", " ")
        assert rows[name] == doc, f"docs/tree.md and {name}/__init__.py say two things"


def test_the_strategies_in_the_readme_are_those_of_the_table() -> None:
    from shoal.exchange import TABLE

    rows = re.findall(r"^\| `(\w+)` \|.*\| (\w+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert dict(rows) == {name: made.promise.name for name, made in TABLE.items()}


RAISED = ("ConfigError", "NonFiniteLoss", "PeerLost", "VerifyFailed")


def sentences() -> Iterator[tuple[str, str]]:
    """Where, and what: every sentence that is raised on purpose, with … for what is filled in."""
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in RAISED
                and node.args
            ):
                text = template(node.args[0])
                if text is not None:
                    yield f"{file.relative_to(SOURCE)}:{node.lineno}", text


def template(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def families() -> list[str]:
    """The sentences in docs/errors.md: the code at the start of each row of a table."""
    return re.findall(r"^\| `` ?(.+?) ?`` \|", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)


def fits(family: str, sentence: str) -> bool:
    """Whether the row's words come in the sentence, in order; … stands for anything."""
    place = 0
    for part in family.split("…"):  # a pattern would be compiled anew for each of some hundred thousand pairs
        place = sentence.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_every_error_sentence_is_explained() -> None:
    rows = families()
    missing = [f"{place}: {text}" for place, text in sentences() if not any(fits(row, text) for row in rows)]
    assert not missing, "docs/errors.md has no row for:\n" + "\n".join(missing)


def test_every_explained_sentence_exists() -> None:
    source = "\n".join(
        text
        for file in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant | ast.JoinedStr) and (text := template(node)) is not None
    )
    for row in families():
        pattern = "[^\n]*".join(re.escape(part) for part in row.split("…"))
        assert re.search(pattern, source), f"docs/errors.md explains a sentence that nothing raises: {row}"


def test_decisions_are_numbered_without_gaps() -> None:
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(file.name[:4]) for file in files] == list(range(1, len(files) + 1))
    for file in files:
        text = file.read_text()
        assert text.startswith(f"# {file.name[:4]}: ")
        for word in ("Context", "Decision", "Consequence"):
            assert f"**{word}.**" in text, f"{file.name} has no {word}"


def test_number_sections_are_closed() -> None:
    marks = re.findall(r"<!-- (/?numbers)(?::(\w+))? -->", (ROOT / "docs" / "numbers.md").read_text())
    assert [kind for kind, _ in marks] == ["numbers", "/numbers"] * (len(marks) // 2)
    assert all(name in BENCHMARKS for kind, name in marks if kind == "numbers")


def test_number_sections_have_numbers() -> None:
    sections = re.findall(
        r"<!-- numbers:(\w+) -->\n(.*?)<!-- /numbers -->", (ROOT / "docs" / "numbers.md").read_text(), re.S
    )
    results = {file.stem for file in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert {name for name, _ in sections} == results, "one section for each file of results"
    for name, text in sections:
        assert re.search(r"\d\.\d", text), f"docs/numbers.md has no numbers of `scripts/bench {name}`"
