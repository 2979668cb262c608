"""The public face: each name exported once, explained, and cheap to reach."""

from __future__ import annotations

import ast
import enum
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal

SOURCE = Path(shoal.__file__)


def test_all_is_sorted_and_matches_the_lazy_table() -> None:
    assert shoal.__all__ == sorted(shoal.__all__)
    assert shoal.__all__ == sorted(shoal._HOME)


def test_type_checkers_see_the_same_names_from_the_same_modules() -> None:
    """The names under TYPE_CHECKING are a third list; it must not drift from the other two."""
    seen = {}
    for node in ast.walk(ast.parse(SOURCE.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shoal."):
            seen |= {alias.asname: node.module for alias in node.names}
    assert seen == shoal._HOME


@pytest.mark.parametrize("name", shoal.__all__)
def test_public_names_exist_and_are_explained(name: str) -> None:
    thing = getattr(shoal, name)
    assert thing.__module__ == shoal._HOME[name]
    doc = inspect.getdoc(thing) or ""
    generated = doc.startswith(f"{name}(")  # what a dataclass gets when it says nothing itself
    assert doc, f"shoal.{name} has no docstring"
    assert not generated, f"shoal.{name} has no docstring of its own"
    for label, member in public_members(thing):
        assert inspect.getdoc(member), f"shoal.{name}.{label} has no docstring"


def public_members(thing: Any) -> list[tuple[str, Any]]:
    """What a class itself adds: methods and properties, not fields."""
    if not inspect.isclass(thing) or issubclass(thing, enum.Enum | BaseException):
        return []
    own = vars(thing).items()
    return [
        (n, m) for n, m in own if not n.startswith("_") and (inspect.isfunction(m) or isinstance(m, property))
    ]


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Runn'"):
        _ = shoal.Runn


def test_importing_shoal_imports_no_torch() -> None:
    code = "import sys, shoal, shoal.errors, shoal.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_the_one_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((SOURCE.parents[2] / "pyproject.toml").read_text())["project"]
    assert shoal.__version__ == project["version"]
