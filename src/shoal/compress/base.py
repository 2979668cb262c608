"""The contract of a compressor: what a vector becomes on the wire, and what comes out at the other end.

A `Compressor` is a value: the choice with its options, as written in a strategy. It makes a `Code` for each vector that
travels again and again, such as a bucket of gradients. A code has the sizes, the scratch memory and whatever it
remembers from turn to turn. Payloads have a fixed size, so every worker knows what to expect. There are two kinds:

- payloads that may be added up on the wire (`summable`) go through an all-reduce, and the sum is decoded once;
- others are gathered, and each of them is decoded into the sum.

What a payload does not say is lost, unless it is kept and sent later: error feedback, in `feedback.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.cost import Cost
from shoal.errors import ConfigError
from shoal.types import Promise
from shoal.world.traffic import ring_bytes, share_of

ALIGNMENT = 16
"""Packed payloads are multiples of so many bytes: one behind the other, each begins where any type may begin."""


@dataclass(frozen=True)
class Layout:
    """A vector that travels: how long it is, and where whole matrices lie in it.

    >>> Layout(10, torch.float32, torch.device("cpu")).nbytes
    40
    """

    size: int
    dtype: torch.dtype
    device: torch.device
    matrices: tuple[tuple[int, int, int], ...] | None = None
    """(start, rows, columns) of each parameter with two or more dimensions; None where parameters are cut."""

    @property
    def nbytes(self) -> int:
        """What the vector itself would take on the wire."""
        return self.size * self.dtype.itemsize


class Compressor(ABC):
    """A way to send less. Each choice is a frozen dataclass of its options, `feedback` the last of them."""

    promise: ClassVar[Promise] = Promise.CLOSE
    summary: ClassVar[str]
    bound: ClassVar[float]
    """The share of what an uncompressed run learns in as many steps that may be lost, in the convergence tests."""

    tried: ClassVar[bool] = False
    """Whether the first steps run with it and without, and the faster way stays."""

    @property
    @abstractmethod
    def feedback(self) -> bool:
        """Whether what a payload leaves out is added to the next vector. The default is what theory needs."""

    @abstractmethod
    def code(self, layout: Layout) -> Code:
        """Everything that is needed to send one vector, step after step."""

    def reduction(self, layout: Layout) -> float:
        """Bytes of the vector for each byte of its payloads."""
        return layout.nbytes / max(1, self.code(layout).nbytes()) if layout.size else 1.0

    def cost(self, layout: Layout, workers: int, slices: int = 1) -> Cost:
        """Cost of one vector that is summed over so many workers, turn after turn.

        `slices` > 1: of so many vectors of this layout, each with a payload of its own that goes to its owner alone.
        """
        code = self.code(layout)
        first = code.sizes()[0]
        if slices > 1:
            sent = share_of(first * slices, workers)
        elif code.summable:
            sent = sum(ring_bytes(size, workers) for size in code.sizes())
        else:
            sent = share_of(first * workers, workers)
        residuals = slices * layout.nbytes if self.feedback else 0
        working = slices * (first + code.kept(self.feedback))
        return Cost({"residuals": residuals, "working": working}, {"data": sent})


class Code(ABC):
    """One vector's way to the wire and back. Made once per vector, used turn after turn, one use at a time.

    Vectors are one-dimensional and contiguous. Infinite and undefined values are not hidden: what is decoded then is
    not finite either, though perhaps in other places.
    """

    summable: bool
    """Payloads of all workers may be added up on the wire; else they are gathered."""
    elementwise: bool
    """payload[i] belongs to vector[i]: a slice of the payload is the payload of a slice."""
    rounds: int = 1
    """2: the sum of the first payloads is needed to make the second ones."""

    salt: int = 0
    """Another number on each worker that encodes: where chance rounds, it must not do so alike everywhere."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @abstractmethod
    def payload(self) -> torch.Tensor:
        """A fresh tensor of the first round's size and type; uint8 where it is packed."""

    @abstractmethod
    def encode(self, vector: torch.Tensor, out: torch.Tensor, turn: int) -> None:
        """Write the payload of a vector, which is not changed. `turn` numbers the use, the same on all workers."""

    @abstractmethod
    def put(self, payload: torch.Tensor, out: torch.Tensor, factor: float | None) -> None:
        """out += factor × what the payload says; None: out = what it says."""

    def decode(self, payload: torch.Tensor, out: torch.Tensor, add: bool) -> None:
        """Write or add what a payload says; of summable codes, the sum of payloads."""
        self.put(payload, out, 1.0 if add else None)

    def lose(self, kept: torch.Tensor, payload: torch.Tensor, among: int) -> None:
        """Take from `kept` what this worker has said; what remains was not sent.

        One round: given the worker's own payload, before any summing. Two rounds: given the last sum, after it is
        decoded; `among` workers then lose the sum between them.
        """
        del among
        self.put(payload, kept, -1.0)

    def second(self, vector: torch.Tensor, summed: torch.Tensor) -> torch.Tensor:
        """Of codes of two rounds: the second payload, from the sum of the first. It is summed too, then decoded."""
        raise NotImplementedError(f"{type(self).__name__} has one round only")

    def turn_to(self, turn: int) -> None:  # noqa: B027  (most payloads explain themselves)
        """Get ready to decode payloads of a turn that this code has not encoded itself."""

    @abstractmethod
    def nbytes(self) -> int:
        """What a worker sends in a turn, all rounds together."""

    def sizes(self) -> tuple[int, ...]:
        """The bytes of each round's payload."""
        return (self.nbytes(),)

    def kept(self, feedback: bool) -> int:
        """Bytes of scratch memory, and of what it remembers, from the first turn on; `feedback`: as that needs it."""
        del feedback
        return 0

    def state(self) -> dict[str, torch.Tensor]:
        """What must be saved to continue as if nothing had happened; the same on all workers."""
        return {}

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        """Continue from a saved state of a code of the same layout."""
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but was given {sorted(state)}")


def aligned(nbytes: int) -> int:
    """The size of a packed payload that has to hold so many bytes.

    >>> aligned(0), aligned(1), aligned(32)
    (0, 16, 32)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def part(payload: torch.Tensor, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` values of a packed payload, from byte `start` on.

    A view, unless somebody has put the payload where such values cannot begin.

    >>> part(torch.arange(4, dtype=torch.uint8), 2, 1, torch.int16).tolist()  # 3 × 256 + 2
    [770]
    """
    found = payload[start : start + count * dtype.itemsize]
    if found.storage_offset() % dtype.itemsize:
        found = found.clone()
    return found.view(dtype)


def check_ratio(name: str, ratio: float) -> None:
    """Refuse a share of elements that is none, or more than all of them."""
    if not 0 < ratio <= 1:
        raise ConfigError(
            f"{name}({ratio}) would send this share of the elements; give more than 0, and 1 at most, as in "
            f"{name}(0.01)."
        )
