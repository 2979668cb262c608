"""Checkpoints of models with a SparseEmbedding: from any number of servers to any other, and to one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import shoal as command
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.checkpoint import large_tensors as pieces
from shoal.checkpoint.diff import compare
from shoal.checkpoint.folder import CheckpointEntry, open_folder
from shoal.checkpoint.verify import verify
from shoal.errors import ConfigError
from shoal.exchange.embeddings import embedding_tables as tables

ROWS = 300


class Words(nn.Module):
    """One table inside of another module, and one that only some samples touch."""

    def __init__(self, dim: int = 4) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"words": shoal.SparseEmbedding(ROWS, dim, std=0.5)})
        self.seldom = shoal.SparseEmbedding(5, 4)
        self.head = nn.Linear(dim, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.inner["words"](ids).sum(1))
        if bool((ids == ROWS - 1).any()):
            out = out + self.seldom(ids[:, 0] % 5)
        return out


def loss(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(output)


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def make_run(strategy: str, checkpoint: Path, **changes: Any) -> shoal.Run:
    generator = torch.Generator().manual_seed(5)
    ids = (torch.rand(64, 6, generator=generator) ** 2 * (ROWS - 1)).long()
    fields: dict[str, Any] = {
        "model": Words,
        "loss": loss,
        "optimizer": adamw,
        "data": TensorDataset(ids, ids[:, 0] % 4),
        "global_batch": 16,
        "strategy": strategy,
        "clip": 0.5,
        "checkpoint": str(checkpoint),
        "log": None,
        "progress": False,
    }
    return shoal.Run(**{**fields, **changes})


def train(strategy: str, checkpoint: Path, steps: int, **changes: Any) -> CheckpointEntry:
    """Train up to so many steps, save, and end."""
    run = make_run(strategy, checkpoint, **changes)
    for _ in run.steps(steps):
        pass
    run.save(f"step-{steps}")
    run._context.exchange.close()
    found = open_folder(checkpoint / f"step-{steps}")
    assert list(verify(found)) == []
    return found


@pytest.mark.parametrize("small", [False, True])
def test_a_run_goes_on_bit_for_bit_with_other_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    if small:  # several pieces a table and several files a checkpoint
        monkeypatch.setattr(tables, "_PIECE", 1000)
        monkeypatch.setattr(pieces, "_FILE", 3000)
    whole = train("ps(servers=2)", tmp_path / "whole", 8)
    train("ps(servers=2)", tmp_path / "parts", 3)
    train("ps(servers=3)", tmp_path / "parts", 5)
    again = train("ps(servers=1)", tmp_path / "parts", 8)
    assert list(compare(whole, again)) == []
    assert whole.manifest is not None
    stored = whole.manifest.tensors
    assert {path for path in stored if path.startswith("rows/seldom")} == {
        f"rows/seldom/{column}"
        for column in ("id", "clock", "step", "values", "state.exp_avg", "state.exp_avg_sq")
    }
    assert stored["rows/seldom/id"].shape == (0, 1)
    assert stored["rows/inner.words/values"].shape[0] > 100
    assert len(whole.manifest.files) > (5 if small else 2)


def test_between_one_process_and_servers(tmp_path: Path) -> None:
    kept = {"precision": "fp64", "clip": None}
    wanted = train("solo", tmp_path / "solo", 6, **kept)
    train("solo", tmp_path / "mixed", 2, **kept)
    train("ps", tmp_path / "mixed", 4, **kept)
    mixed = train("solo", tmp_path / "mixed", 6, **kept)
    for difference in compare(wanted, mixed):
        assert not difference.problem, difference
        assert difference.absolute < 1e-12, difference


def test_asynchronous_saves_hold_one_moment(tmp_path: Path) -> None:
    changes = {"checkpoint_every": 2, "checkpoint_keep": None}
    run = make_run("ps", tmp_path / "often", **changes)
    for _ in run.steps(6):
        pass
    run._context.exchange.close()
    for step in (2, 4):
        wanted = train("ps", tmp_path / f"until-{step}", step)
        assert list(compare(wanted, open_folder(tmp_path / "often" / f"step-{step}"))) == []


def test_another_type_is_converted_and_another_shape_refused(tmp_path: Path) -> None:
    train("solo", tmp_path, 2)
    for strategy in ("solo", "ps"):
        run = make_run(strategy, tmp_path, precision="fp64")
        assert next(run.steps(3)).number == 3
        run._context.exchange.close()
    with pytest.raises(ConfigError, match=r"'head\.weight' is"):
        make_run("solo", tmp_path, model=lambda: Words(3))

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, amsgrad=True)

    with pytest.raises(
        ConfigError, match=r"the rows of 'inner.words' were saved with .* and have .*max_exp_avg_sq"
    ):
        make_run("solo", tmp_path, optimizer=sgd)

    class Without(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

    with pytest.raises(ConfigError, match=r"the rows of 'inner\.words' are only in"):
        make_run("solo", tmp_path, model=Without)


def test_the_commands_take_rows(tmp_path: Path) -> None:
    train("solo", tmp_path / "run", 1)
    train("ps", tmp_path / "run", 3)
    for words in (
        ["ls", "run"],
        ["show", "run"],
        ["verify", "run"],
        ["export", "run", "model.safetensors"],
        ["diff", "run/step-3", "run/step-3"],
    ):
        done = command(tmp_path, "ckpt", *words)
        assert done.code == 0, done.out + done.err
        if words[0] == "export":
            assert "the rows of inner.words, seldom stay behind" in done.err
        if words[0] == "show":
            assert "rows/inner.words/values" in done.out
