"""docs/programs.md: kinds of program × strategies; by default a third of the cells, where each program meets three."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from commands import shoal

sys.path.append(str(Path(__file__).parents[1] / "programs"))

from table import STRATEGIES, command, launches, parse, read_page

from programs import PROGRAMS
from shoal.testing.spawn import preload

DONE = {"EQUAL", "CONVERGES", "refused"}
THIRD = 3


def due(column: str, name: str, everything: bool) -> bool:
    """Whether a cell is run."""
    columns, rows = list(STRATEGIES), list(PROGRAMS)
    if column == "ps" and not everything:  # each is a launch of its own
        return rows.index(name) % 12 == 0
    return everything or (rows.index(name) + columns.index(column)) % THIRD == 0


def test_no_cell_is_ran_and_not_compared() -> None:
    page = read_page()
    assert set(page) == {(name, column) for name in PROGRAMS for column in STRATEGIES}
    assert {verdict for verdict, _ in page.values()} <= DONE
    assert len(PROGRAMS) >= 40


@pytest.fixture(autouse=True, scope="module")
def _models_are_loaded() -> None:
    preload("transformers.models.gpt2.modeling_gpt2")


@pytest.mark.parametrize("column", STRATEGIES)
def test_programs(column: str, tmp_path: Path, everything: bool) -> None:
    page = read_page()
    names = [name for name in PROGRAMS if due(column, name, everything)]
    found = {}
    for some in launches(column, names):
        done = shoal(tmp_path, *command(column, some))
        found.update(parse(done.out + done.err))
        assert done.code == 0 or (len(some) == 1 and page[some[0], column][0] == "refused"), done.err
    assert found == {name: page[name, column] for name in names}
