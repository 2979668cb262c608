"""What two workers under FSDP2 have saved with torch's own checkpoints comes in whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shoal.checkpoint.convert.import_weights import import_checkpoint
from shoal.checkpoint.folder import open_folder
from shoal.checkpoint.load import Reader
from shoal.checkpoint.verify import verify
from shoal.testing.spawn import spawn
from shoal.world.world import World


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value  # type: ignore[no-any-return]


def train_and_save(world: World, folder: str) -> dict[str, torch.Tensor]:
    """Saved twice: with the optimizer's state by name, and by number as optimizer.state_dict() has it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 7), nn.Linear(7, 7))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        x = torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + world.rank))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    by_name, named_state = get_state_dict(model, optimizer)
    dcp.save({"model": by_name, "optim": named_state}, checkpoint_id=f"{folder}/names")
    dcp.save(
        {"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=f"{folder}/numbers"
    )
    buffers = dict(model.named_buffers())
    found = {f"{'buffer' if n in buffers else 'parameter'}/{n}": t for n, t in by_name.items()}
    for name, p in model.named_parameters():
        found |= {f"optimizer/{key}/{name}": t for key, t in optimizer.state[p].items()}
    return {path: whole(value).detach() for path, value in found.items()}


@pytest.mark.parametrize("form", ["names", "numbers"])
def test_a_sharded_dcp_folder(form: str, saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, wanted = saved
    assert len(list((folder / form).glob("*.distcp"))) == 2
    made = import_checkpoint(folder / form, tmp_path, step=2)
    found = open_folder(made.folder)
    assert not list(verify(found))
    reader = Reader.of(found)
    assert made.manifest.tensors.keys() == wanted.keys()
    for path, value in wanted.items():
        if not path.startswith("buffer/"):  # each worker has its own statistics, and torch keeps one of them
            assert torch.equal(reader.read(path), value), path
    assert (made.manifest.state["optimizer"], made.remarks) == ("AdamW", [])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("dcp")
    return folder, spawn(train_and_save, 2, str(folder), backend="gloo")[0]
