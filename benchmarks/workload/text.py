"""What contestants train: a transformer that reads the source code of Python's standard library byte by byte.

Every machine with Python has that text, so the task is real and nothing is downloaded.

When to use: wherever strategies are compared by the loss they reach and not only by their speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from sysconfig import get_path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

BYTES = 256
"""A byte is a token."""
CONTEXT = 64

_MODULES = """
argparse ast calendar codecs configparser contextlib dataclasses difflib enum fractions functools gzip heapq
inspect ipaddress os pdb pickle platform pprint pydoc random shutil socket ssl statistics subprocess tarfile
tempfile threading tokenize trace traceback typing uuid weakref
"""


@dataclass(frozen=True)
class Size:
    """How large a model is."""

    width: int
    depth: int

    @property
    def parameters(self) -> int:
        """How many numbers it learns."""
        block = 12 * self.width**2 + 13 * self.width
        return self.depth * block + (2 * BYTES + CONTEXT + 2) * self.width


def size_for(parameters: float) -> Size:
    """The size nearest to a number of parameters, about a hundred times as wide as deep.

    >>> size_for(20e6), size_for(20e6).parameters
    (Size(width=640, depth=4), 20064000)
    """
    ideal = (parameters * 100 / 12) ** (1 / 3)
    # Heads are 32 wide. Of the widths in reach, one gives a depth that fits.
    widths = range(max(32, int(ideal * 0.6) // 32 * 32), max(33, int(ideal * 1.2)), 32)
    sizes = [Size(width, _depth(parameters, width)) for width in widths]
    return min(sizes, key=lambda size: abs(size.parameters - parameters))


def _depth(parameters: float, width: int) -> int:
    ends = Size(width, 0).parameters
    return max(1, round((parameters - ends) / (Size(width, 1).parameters - ends)))


class _Block(nn.Module):
    """One layer: each position looks at those before it, then thinks for itself. Both add to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 32
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.look, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.look(self.before(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, 32)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.think(self.between(x))
        return out


class Reader(nn.Module):
    """Bytes in; for each of them the scores of all bytes that could be next.

    >>> reader = Reader(Size(width=32, depth=2))
    >>> reader(torch.zeros(3, CONTEXT, dtype=torch.int64)).shape
    torch.Size([3, 64, 256])
    >>> sum(p.numel() for p in reader.parameters()) == Size(width=32, depth=2).parameters
    True
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, size.width), nn.Embedding(CONTEXT, size.width)
        self.blocks = nn.Sequential(*(_Block(size.width) for _ in range(size.depth)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)  # small scores: at first every byte is about as likely

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places.weight[: tokens.shape[1]]
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


def make_reader(size: Size, seed: int) -> Reader:
    """The same initial weights for the same seed, whoever asks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Reader(size)


def loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """The summed surprise at each true next byte, and how many bytes that were."""
    targets = batch[1]
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


@cache
def _pieces() -> tuple[Tensor, Tensor]:
    files = [Path(get_path("stdlib")) / f"{name}.py" for name in _MODULES.split()]
    text = b"".join(file.read_bytes() for file in files if file.exists())
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    count = (len(tokens) - 1) // CONTEXT
    # In an order of its own: the pieces kept for the end are then of the same kind as the others.
    mixed = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    now, following = tokens[: count * CONTEXT], tokens[1 : count * CONTEXT + 1]
    return now.view(count, CONTEXT)[mixed], following.view(count, CONTEXT)[mixed]


KEPT = 512
"""Pieces of the text that nobody trains on."""


def training_text(global_batch: int) -> TensorDataset:
    """The pieces to train on, as many as make whole batches: so every worker has as many samples as the other."""
    now, following = _pieces()
    count = (len(now) - KEPT) // global_batch * global_batch
    return TensorDataset(now[:count], following[:count])


def kept_text() -> TensorDataset:
    """The pieces that nobody trains on."""
    now, following = _pieces()
    return TensorDataset(now[-KEPT:], following[-KEPT:])
