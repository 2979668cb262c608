"""Small problems, each chosen to hurt: what breaks a distributed trainer breaks on one of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from shoal.table import Table


class Tied(nn.Module):
    """Input and output embeddings are one weight, so its gradient comes from both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.tanh(self.mix(self.embed(tokens))))
        return out


class Frozen(nn.Module):
    """A frozen layer in the middle and a frozen bias: gradients pass through what does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.middle.requires_grad_(False)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.relu(self.middle(torch.relu(self.first(x)))))
        return out


class Unused(nn.Module):
    """One parameter is never used; another only when a sample asks for it, so on some ranks and steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3)
        self.sometimes = nn.Linear(5, 3)
        self.never = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x)
        if bool((x[:, 0] > 1.0).any()):
            chosen = (x[:, 0] > 1.0).to(x.dtype).unsqueeze(1)
            out = out + chosen * self.sometimes(x)
        return out


class Odd(nn.Module):
    """Sizes that no number of workers divides, a scalar parameter, and one larger than a small bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 131)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.second = nn.Linear(131, 7)
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.second(torch.tanh(self.scale * self.first(x)))))
        return out


class DropoutModel(nn.Module):
    """Dropout: equal only if the random streams follow the samples and not the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 16)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(F.dropout(torch.relu(self.first(x)), 0.3, self.training))
        return out


class ChainModel(nn.Module):
    """Layers in a row: the lower ones frozen, one that only some batches pass, one that none does, dropout, and samples
    that look at each other, so that a row too many would be noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5 if i == 0 else 8, 8) for i in range(5))
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.layers[:2].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = bool((x[:, 0] > 0.8).any())
        for i, layer in enumerate(self.layers):
            if i != 3 or used:
                x = F.dropout(torch.tanh(layer(x - x.mean(0))), 0.1, self.training)
        out: torch.Tensor = self.head(x)
        return out


class Stack(nn.Module):
    """A transformer with positions of its own, a mask, and one weight for its embedding and its head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.places = nn.Parameter(torch.randn(4, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout, "gelu", batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.mask = nn.Buffer(torch.full((4, 4), float("-inf")).triu(1), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.places
        for block in self.blocks:
            x = block(x, self.mask)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Weight decay and bias correction: both go wrong if an unused parameter is updated."""
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def grouped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Two groups with settings of their own."""
    return torch.optim.SGD(
        [
            {"params": [p for p in params if p.ndim > 1], "lr": 0.05, "weight_decay": 0.01},
            {"params": [p for p in params if p.ndim <= 1], "lr": 0.1, "momentum": 0.9},
        ]
    )


def classify(output: torch.Tensor, batch: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Cross-entropy; some labels are padding, so counts differ between ranks and from the batch size."""
    labels = batch[1].reshape(-1)
    total = F.cross_entropy(output.reshape(len(labels), -1), labels, reduction="sum", ignore_index=-1)
    return total, int((labels >= 0).sum())


@dataclass(frozen=True)
class Toy:
    """A problem: what `shoal.Run` needs."""

    summary: str
    model: Callable[[], nn.Module]
    tokens: bool = False
    samples: int = 24
    global_batch: int = 12
    accumulate: int = 1
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = adamw
    clip: float | None = None
    loss: Callable[[torch.Tensor, Sequence[torch.Tensor]], tuple[torch.Tensor, int]] = classify

    def data(self) -> Dataset[object]:
        """The samples; always the same."""
        generator = torch.Generator().manual_seed(5)
        if self.tokens:
            x = torch.randint(0, 11, (self.samples, 4), generator=generator)
            y = torch.randint(-1, 11, (self.samples, 4), generator=generator)
        else:
            x = torch.randn(self.samples, 5, generator=generator)
            y = torch.randint(0, 3, (self.samples,), generator=generator)
            y[4] = -1  # so that now and then one worker's whole share is padding, and never a whole batch
        return TensorDataset(x, y)


TABLE: Table[Toy] = Table(
    "toy",
    {
        "tied": Toy("one weight at both ends", Tied, tokens=True),
        "frozen": Toy("layers that do not learn", Frozen, optimizer=grouped),
        "unused": Toy("parameters without gradients", Unused),
        "odd": Toy("sizes nothing divides, clipped", Odd, clip=0.1),
        "uneven": Toy("a last batch too small for some workers", Odd, samples=26, global_batch=12),
        "accumulated": Toy("three micro-batches a step", Odd, accumulate=3, clip=0.5),
        "dropout": Toy("random streams", DropoutModel),
        "chain": Toy("frozen, skipped and unused layers", ChainModel, samples=26),
        "drawing": Toy("dropout inside of blocks", partial(Stack, 0.1), tokens=True, optimizer=grouped),
        "stack": Toy("a transformer, clipped", Stack, tokens=True, optimizer=grouped, clip=0.5),
    },
)
