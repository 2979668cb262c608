"""Six kinds of model that plans are made for, each with data, a loss and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from benchmarks.workload.transformer import adamw
from shoal.train.run_config import RunConfig


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _numbers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(2))


def classify(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    """The summed surprise at each true class."""
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), reduction="sum"), batch[1].numel()


class Language(nn.Module):
    """A small decoder."""

    def __init__(self, width: int, depth: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


class Recurrent(nn.Module):
    """An LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 256)
        self.lstm = nn.LSTM(256, 256, batch_first=True)
        self.head = nn.Linear(256, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(self.embed(tokens))[0])
        return out


class Untraceable(nn.Module):
    """Looks at its values as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(256, 1024)
        self.last = nn.Linear(1024, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        if x.mean().item() > 1e6:
            x = x / x.max()
        out: torch.Tensor = self.last(x)
        return out


def _mlp() -> nn.Module:
    wide = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), *wide, nn.Linear(1024, 10))


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 10))


def _tokens(length: int, words: int) -> TensorDataset:
    return TensorDataset(_numbers(words, 256, length), _numbers(words, 256, length))


def _features() -> TensorDataset:
    return TensorDataset(_random(1024, 256), _numbers(10, 1024))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], TensorDataset], int]] = {
    "mlp": (_mlp, _features, 256),
    "cnn": (_convolutions, lambda: TensorDataset(_random(256, 3, 32, 32), _numbers(10, 256)), 32),
    "transformer": (lambda: Language(256, 4, 1000), lambda: _tokens(64, 1000), 16),
    "wide embedding": (lambda: Language(128, 2, 20000), lambda: _tokens(32, 20000), 16),
    "lstm": (Recurrent, lambda: _tokens(32, 1000), 32),
    "untraceable": (Untraceable, _features, 512),
}
"""What makes the model, what makes its data, and the global batch."""


def config_of(name: str, strategy: str = "ddp") -> RunConfig:
    """What a user would write."""
    make, data, batch = MODELS[name]
    return RunConfig(
        model=make,
        loss=classify,
        optimizer=adamw,
        data=data(),
        global_batch=batch,
        strategy=strategy,
    )
