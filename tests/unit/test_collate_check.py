"""What a run says in its first step of a collate= that mixes the samples of a batch. One process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset, default_collate

import shoal

SAMPLES = [(torch.randn(6), torch.tensor(i % 3)) for i in range(16)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(SAMPLES)


def said(capsys: pytest.CaptureFixture[str], collate: Any, data: Any = SAMPLES, **more: Any) -> str:
    settings: dict[str, Any] = {"data": data, "collate": collate, "global_batch": 8, "accumulate": 2, **more}
    run = shoal.Run(
        model=lambda: nn.Linear(6, 3),
        loss=lambda output, batch: F.cross_entropy(output, batch[1]),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        strategy="solo",
        log=None,
        progress=False,
        **settings,
    )
    list(run.steps(2))
    return capsys.readouterr().err


def mixed(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(samples)
    return 0.7 * x + 0.3 * x.flip(0), y


def centred(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(samples)
    return x - x.mean(0), y


def shuffled(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(samples)
    return x, y.roll(1)


def drawn(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(samples)
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))], y


def padded(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    rows = [torch.full((int(y) + 1,), float(y)) for _, y in samples]
    return (*default_collate(samples), pad_sequence(rows, batch_first=True))


def graphs(samples: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    owner = torch.repeat_interleave(
        torch.arange(len(samples)), torch.tensor([int(y) + 1 for _, y in samples])
    )
    return (*default_collate(samples), owner)


def pairs(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = default_collate(samples)
    return (x[::2] + x[1::2]) / 2, y[::2]


@pytest.mark.parametrize("collate", [mixed, centred, shuffled])
def test_a_collate_that_mixes_is_said(collate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = "collate= makes other rows of 8 samples than of the same in two halves"
    assert words in said(capsys, collate)
    assert words in said(capsys, collate, Stream())
    assert said(capsys, collate, accumulate=1) == ""


def test_it_is_said_of_a_loader_with_processes(capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader(SAMPLES, batch_size=8, collate_fn=mixed, num_workers=1)  # type: ignore[arg-type]
    assert "collate= makes other rows of 8 samples" in said(capsys, None, loader, global_batch=None)


def test_one_that_draws_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "collate= draws random numbers, once for all samples of a micro-batch" in said(capsys, drawn)


@pytest.mark.parametrize("collate", [padded, graphs, pairs, default_collate])
def test_others_are_not(collate: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "collate=" not in said(capsys, collate)
