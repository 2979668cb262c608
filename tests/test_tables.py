"""Every slot has a table, every choice is in it, and every choice says what it is and when to use it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import exchange
from shoal.exchange.contract import Exchange
from shoal.table import Table
from shoal.types import Promise

SOURCE = Path(shoal.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(SOURCE)], "shoal.") if m.name != "shoal.__main__")


def tables() -> dict[str, Table[Any]]:
    found = {name: getattr(importlib.import_module(name), "TABLE", None) for name in MODULES}
    return {name: table for name, table in found.items() if isinstance(table, Table)}


TABLES = tables()
CHOICES = [(name, choice) for name, table in TABLES.items() for choice in table]


def test_there_are_tables() -> None:
    assert {
        "shoal.exchange",
        "shoal.compress",
        "shoal.train.technique.precision",
        "shoal.train.technique.learning_rate",
    } <= set(TABLES)
    kinds = [table.kind for table in TABLES.values()]
    assert len(kinds) == len(set(kinds)), "two tables list the same kind of thing"


@pytest.mark.parametrize(("module", "choice"), CHOICES)
def test_every_choice_explains_itself(module: str, choice: str) -> None:
    made = TABLES[module][choice]
    assert choice == choice.lower()
    summary = getattr(made, "summary", None) or (inspect.getdoc(made) or "").splitlines()[0]
    assert 8 <= len(summary) <= 110, f"{choice}: one line says what it does"
    assert "\n" not in summary
    if inspect.isclass(made):
        doc = made.__doc__ or ""
        generated = doc.startswith(f"{made.__name__}(")  # what a dataclass gets when it says nothing itself
        assert doc, f"{choice}: {made.__name__} has no docstring"
        assert not generated, f"{choice}: {made.__name__} has no docstring of its own"


@pytest.mark.parametrize("choice", exchange.TABLE)
def test_every_exchange_declares_its_facts(choice: str) -> None:
    made = exchange.TABLE[choice]
    assert isinstance(made.promise, Promise)
    assert made.summary
    doc = importlib.import_module(made.__module__).__doc__ or ""
    assert "When to use" in doc, f"exchange/{choice}.py: the module docstring says when to use it"


def test_every_exchange_is_in_the_table() -> None:
    """A class that implements the whole contract is a choice; one that does not is abstract and has heirs."""
    found: set[type[Exchange]] = set()
    for file in sorted((SOURCE / "exchange").glob("*.py")):
        module = importlib.import_module(
            f"shoal.exchange.{file.stem}" if file.stem != "__init__" else "shoal.exchange"
        )
        for thing in vars(module).values():
            if inspect.isclass(thing) and issubclass(thing, Exchange) and not inspect.isabstract(thing):
                found.add(thing)
    assert found == set(exchange.TABLE.values())


def test_each_exchange_is_a_file_of_its_name() -> None:
    for name, made in exchange.TABLE.items():
        assert made.__module__ == f"shoal.exchange.{name}"
        assert made.__name__.lower() == name


def test_the_face_names_no_choice() -> None:
    """Outside its own folder and the rules, code asks a choice for facts and never for its name."""
    allowed = {"plan/check.py"}
    names = set(exchange.TABLE) - {"shared"}
    for file in sorted(SOURCE.rglob("*.py")):
        place = str(file.relative_to(SOURCE))
        if place.startswith(("exchange/", "testing/")) or place in allowed:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare):
                words = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
                assert not names & words, f"{place}:{node.lineno} asks for an exchange by name"


def test_wrong_names_get_the_nearest() -> None:
    for table in TABLES.values():
        name = max(table, key=len)
        with pytest.raises(shoal.ConfigError, match=f"did you mean '{name}'"):
            table.look_up(name + "x")
