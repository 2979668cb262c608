"""The face of data: partitions, columns and streams as a script gives them to Run. One process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import ConfigError
from shoal.plan.check import check_text
from shoal.testing.parity import toy_order
from shoal.testing.toys import TABLE as TOYS
from shoal.train.rules import check_numbers
from shoal.world.mesh import Mesh
from shoal.world.world import World

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


def squares(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return ((output - batch[1]) ** 2).sum(), batch[1].numel()


def make_run(**changes: Any) -> shoal.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 1),
        "loss": squares,
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": TensorDataset(X, X.sum(1, keepdim=True)),
        "global_batch": 8,
        "accumulate": 2,
        "log": None,
        "progress": False,
        "strategy": "solo",
        "precision": "fp64",
    }
    return shoal.Run(**{**settings, **changes})


def losses(how_long: int | str = 5, **changes: Any) -> list[float]:
    return [step.loss for step in make_run(**changes).steps(how_long)]


class Rows:
    """The samples as a stream."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((x, x.sum(0, keepdim=True)) for x in X)


def test_a_partition_does_not_change_the_run() -> None:
    plain = losses()
    columns = {"user": [f"u{i % 3}" for i in range(20)]}
    for text in (
        "hash(user)",
        "feature(user)",
        "consistent(user, kind=ring)",
        "block(shares=3/1)",
        "roundrobin",
    ):
        assert losses(partition=text, columns=columns) == pytest.approx(plain, rel=1e-12)
    assert losses(partition="bucket(user)", columns={"user": range(20)}) != pytest.approx(plain, rel=1e-6)


def test_a_stream_is_the_data_set_in_its_own_order() -> None:
    wanted = losses(7, shuffle=False)
    assert losses(7, data=Rows()) == pytest.approx(wanted, rel=1e-12)
    assert losses("2ep", data=Rows()) == pytest.approx(wanted[:6], rel=1e-12), "three steps an epoch"
    with pytest.raises(ConfigError, match="evaluate takes data with len"):
        make_run().evaluate(Rows())  # type: ignore[arg-type]


def test_uneven_parts_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_run(progress=True)
    assert "partition" not in capsys.readouterr().err
    run = make_run(progress=True, partition="feature(kind)", columns={"kind": [0] * 20}, log=str(tmp_path))
    said = capsys.readouterr().err
    assert "partition feature(kind): the largest part has 2.00 × its share (over 3 steps)" in said
    next(iter(run.steps(1)))
    header = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[0])
    assert (header["partition"], header["skew"]) == ("feature(kind)", 2.0)


def test_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_OVERRIDES", json.dumps({"partition": "roundrobin"}))
    assert make_run().partition == "roundrobin"
    monkeypatch.setenv("SHOAL_OVERRIDES", json.dumps({"columns": "x"}))
    with pytest.raises(ConfigError, match="Run has no such setting"):
        make_run()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"partition": "blok"}, "unknown partition 'blok'; did you mean 'block'?"),
        ({"partition": "hash(user)"}, "the partition asks for column 'user', which columns= does not have"),
        ({"columns": [1]}, 'columns= is a list; give a dict such as {"length": lengths}.'),
        (
            {"partition": "block(shares=1/2/3)"},
            "shares=1/2/3 are for 3 workers, and a step is cut into 2 parts",
        ),
        ({"data": Rows(), "loader_workers": 1}, "loader_workers=1 with a stream"),
        ({"data": Rows(), "partition": "bucket"}, "a stream has no columns to divide by 'length'"),
        ({"data": 5}, "data= is a int; it needs len() and [i]"),
    ],
)
def test_wrong_settings(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_run(**changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text", ["hash", "feature(id)", "consistent", "block(shares=2/1)", "bucket(id, shares=2/1)"]
)
def test_a_pipeline_needs_parts_of_equal_size(text: str) -> None:
    plan, mesh = check_text("ddp * pp2(1f1b, microbatches=2)", 2), Mesh.imagine(World.alone(), 2, 1, 2)
    order = toy_order(TOYS["stack"], "ddp * pp2(1f1b, microbatches=2)")
    for even in ("block", "sequential", "roundrobin", "random", "bucket(id)", "block(shares=2/2)"):
        check_numbers(replace(order, partition=even), plan, mesh)
    with pytest.raises(ConfigError, match="a pipeline needs micro-batches of equal size"):
        check_numbers(replace(order, partition=text), plan, mesh)
