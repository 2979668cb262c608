"""What people and CI call: present, executable, pinned."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "scripts").iterdir())
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_scripts_are_those_of_the_readme() -> None:
    assert [script.name for script in SCRIPTS] == ["bench", "demo", "lint", "setup", "test"]


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / ".ci" / "run"], ids=lambda path: path.name)
def test_scripts_are_sound(script: Path) -> None:
    assert os.access(script, os.X_OK), f"{script.name} is not executable"
    text = script.read_text()
    first, second = text.splitlines()[:2]
    assert first == "#!/usr/bin/env bash"
    assert second.startswith("# "), f"{script.name}: the second line says what it does"
    strict = "set -euo pipefail" in text or 'source "$(dirname "$0")/setup"' in text
    assert strict, f"{script.name} goes on after a failure"
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_ci_calls_lint_and_test() -> None:
    commands = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("scripts/")
    ]
    assert commands == ["scripts/lint", "scripts/test"]


def test_torch_is_pinned_once_and_alike() -> None:
    assert PINS["torch"] == "2.13.0"
    assert "torch==2.13.0" in (ROOT / "scripts" / "setup").read_text()
    assert "torch>=2.10" in PROJECT["dependencies"]


def test_everything_asked_for_is_pinned() -> None:
    asked = [
        *PROJECT["dependencies"],
        *(x for extra in PROJECT["optional-dependencies"].values() for x in extra),
    ]
    names = {re.split(r"[<>=!\[ ]", text)[0] for text in asked}
    assert names <= set(PINS), f"not in constraints.txt: {sorted(names - set(PINS))}"


def test_an_unknown_benchmark_is_a_failure_and_each_named_one_exists() -> None:
    named = re.search(r"scripts/bench ([\w| ]+)\.", (ROOT / "scripts" / "bench").read_text())
    assert named is not None
    wanted = {word.strip() for word in named[1].split("|")}
    files = (ROOT / "benchmarks").glob("*.py")
    real = {file.stem for file in files if "__main__" in file.read_text()}  # the others are parts of one
    assert wanted == real, "scripts/bench names its benchmarks in its second line"


def test_results_of_runs_are_not_committed() -> None:
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {".venv/", "/runs/", "/demo/"} <= set(ignored)
