"""The examples in docstrings are run, module by module; those of examples/ too."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

import benchmarks
import shoal

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    module.name
    for package in (shoal, benchmarks)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if module.name.rpartition(".")[2] != "__main__"
)
EXAMPLES = sorted(file for file in (ROOT / "examples").glob("*.py") if ">>>" in file.read_text())
"""The others have nothing to run here, and may train when they are imported; test_examples.py runs all of them."""


def run(module: ModuleType) -> int:
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    return attempted


@pytest.mark.parametrize("name", MODULES)
def test_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    module = importlib.import_module(name)
    run(module)


def test_there_are_doctests() -> None:
    """The finder really finds them: a module that is known to have some."""
    assert run(importlib.import_module("shoal.config")) > 3


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_example(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # importing an example starts nothing
    run(module)
