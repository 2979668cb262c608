"""What is run by default: few cells, the same ones every time, and each pair of values among them."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cells import covering, crossed, pairs_of

ROOT = Path(__file__).parents[2]


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_every_pair_of_values_is_kept(sizes: list[int]) -> None:
    cells = list(product(*map(range, sizes)))
    kept = covering(cells)
    assert set(kept) <= set(cells)
    assert kept == covering(cells)
    assert set().union(*map(pairs_of, kept)) == set().union(*map(pairs_of, cells))


def test_it_leaves_most_of_a_large_product_out() -> None:
    axes = [range(6)] * 3
    assert len(covering(list(product(*axes)))) <= 48
    cells = crossed(*axes)
    assert len(cells) == 216
    assert sum(not getattr(cell, "marks", ()) for cell in cells) == len(covering(list(product(*axes))))


DRAWS = """
import pytest
from hypothesis import given, strategies as st

@given(st.integers())
def test_draws(number):
    print("drew", number)

@pytest.mark.all_only
def test_the_rest():
    pass
"""


def drawn(folder: Path, *options: str) -> tuple[list[str], str]:
    """What a test draws in a run of its own, and how pytest sums it up."""
    file = folder / "test_draws.py"
    file.write_text(DRAWS)
    command = ["python", "-m", "pytest", "-s", "-p", "no:cacheprovider", "-c", "pyproject.toml", *options]
    command += ["--confcutdir", str(ROOT), "-p", "conftest", str(file)]
    paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"drew (-?\d+)", done.stdout), done.stdout.splitlines()[-1]


def test_examples_are_the_same_ones_unless_all_are_asked_for(tmp_path: Path) -> None:
    first, said = drawn(tmp_path)
    assert first == drawn(tmp_path)[0]
    assert said.startswith("1 passed, 1 deselected")
    seven, said = drawn(tmp_path, "--all", "--hypothesis-seed=7")
    assert said.startswith("2 passed")
    assert seven == drawn(tmp_path, "--all", "--hypothesis-seed=7")[0]
    assert len({tuple(first), tuple(seven), tuple(drawn(tmp_path, "--all", "--hypothesis-seed=8")[0])}) == 3


@pytest.mark.parametrize("rest", [[], ["tests/unit", "-k", "order"]])
def test_the_script_says_how_to_repeat_a_seed(tmp_path: Path, rest: list[str]) -> None:
    """With a python that only says what it was given."""
    for name, text in (
        ("scripts/test", (ROOT / "scripts" / "test").read_text()),
        ("scripts/setup", "set -eu"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "python").write_text('#!/bin/sh\necho "python $*"\n')
    (tmp_path / "python").chmod(0o755)
    there = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def said(*arguments: str) -> list[str]:
        command = ["bash", str(tmp_path / "scripts" / "test"), *arguments]
        return subprocess.run(
            command, env=there, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    (plain,) = said(*rest)
    assert "--all" not in plain
    advice, command = said("--all", *rest)
    again = advice.partition("scripts/test ")[2].split()
    assert again[:2] == ["--all", "--seed"]
    assert again[3:] == rest
    assert f"--hypothesis-seed={again[2]}" in command
    assert said(*again) == [advice, command]
