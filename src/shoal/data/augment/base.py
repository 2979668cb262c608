"""The contract of an augmentation: rows of a batch in, rows of the same shape out, each from its own sample alone.

What is drawn comes from `SampleDraws`, never from a generator that others draw from too; and no number may depend on
how many rows there are or which. So a sample is augmented to the same bits in a batch of any size, on any worker, in
any loader process and after any restart.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.data.augment.sample_draws import SampleDraws
from shoal.errors import ConfigError
from shoal.types import Promise


@dataclass(frozen=True)
class Augmentation(ABC):
    """A way to change samples. Each choice is a frozen dataclass of its own options; `field` is among them."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str]
    takes: ClassVar[str]
    """What rows it is for: a key of `KINDS`."""
    field: str = dataclasses.field(default="", kw_only=True)
    """Which part of the batch, by key or number; default what goes into the model."""

    def apply(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """Other rows for these; the rows given stay as they are."""
        check_rows(self, rows)
        return self.change(rows, draws)

    @abstractmethod
    def change(self, rows: torch.Tensor, draws: SampleDraws) -> torch.Tensor:
        """`apply`, of rows that fit."""


@dataclass(frozen=True)
class Mixture(ABC):
    """A way to mix each sample with a partner from anywhere in the global batch, and their labels in proportion."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str]
    takes: ClassVar[str]
    field: str = dataclasses.field(default="", kw_only=True)
    labels: str = dataclasses.field(default="", kw_only=True)
    """Which part of the batch holds labels; default batch[1], or "labels"."""
    classes: int = dataclasses.field(default=0, kw_only=True)
    """How many classes there are, if labels are their numbers: they become a share for each class."""

    @abstractmethod
    def mix(
        self, rows: torch.Tensor, others: torch.Tensor, draws: SampleDraws
    ) -> tuple[torch.Tensor, list[float]]:
        """Mixed rows, and how much of each is its own."""


KINDS = {
    "images": "images, n × channels × height × width or n × height × width",
    "signals": "numbers, n × ... × time",
    "tokens": "token ids, n × length, of whole numbers",
}


def check_rows(what: Augmentation | Mixture, rows: torch.Tensor) -> None:
    """Refuse rows that an augmentation is not for."""
    name, shown = (
        type(what).__name__.lower(),
        f"{list(rows.shape)} of {str(rows.dtype).removeprefix('torch.')}",
    )
    fits = {
        "images": rows.dim() in (3, 4) and (rows.is_floating_point() or rows.dtype is torch.uint8),
        "signals": rows.dim() > 1 and rows.is_floating_point(),
        "tokens": rows.dim() == 2 and not rows.is_floating_point() and not rows.is_complex(),
    }
    if not fits[what.takes]:
        raise ConfigError(
            f"augment: {name} is for {KINDS[what.takes]}; this part of the batch is {shown}. Name another part with "
            f"{name}(field=...), or reshape samples in the data set."
        )


def check_share(name: str, option: str, value: float) -> None:
    """Refuse what is no share of a whole."""
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"augment: {name} has {option}={value:g}; it is from 0 to 1.")


def as_floats(rows: torch.Tensor) -> torch.Tensor:
    """Rows to compute with: in single precision at least."""
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def as_before(changed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Computed rows in the dtype in which they were given; bytes are rounded and stay within their range."""
    if rows.dtype is torch.uint8:
        return changed.round().clamp(0, 255).to(torch.uint8)
    return changed.to(rows.dtype)


def numbers_in(name: str, text: str) -> tuple[int, ...]:
    """The tokens that an option lists.

    >>> numbers_in("mask", "101/102/0")
    (101, 102, 0)
    """
    try:
        return tuple(int(word) for word in text.split("/")) if text else ()
    except ValueError:
        raise ConfigError(
            f"augment: {name} has keep={text}; give numbers of tokens joined by '/', as keep=101/102/0."
        ) from None


def one_of(rows: torch.Tensor, tokens: tuple[int, ...]) -> torch.Tensor:
    """Where rows hold one of these tokens."""
    found = torch.zeros(rows.shape, dtype=torch.bool, device="cpu")
    for token in tokens:
        found |= rows == token
    return found
