"""The nouns that every layer shares. Plain values only: nothing here talks, trains or touches a file."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

Value = int | float | bool | str

_PLAIN = re.compile(r"[A-Za-z0-9_.\-/:(),= ]+")
"""Text that reads back as it is: words, and choices within a choice. All else goes into quotes."""


class Promise(enum.Enum):
    """What a choice guarantees about its numbers. `verify` and the parity tests assert exactly this."""

    EXACT = "equals one process up to rounding"
    CLOSE = "stays within a stated bound of one process"
    CONVERGES = "reaches a like loss by another path"


@dataclass(frozen=True)
class Choice:
    """What a slot is asked for: a name with options, as the grammar writes it: `cosine(warmup=100)`, `step(30, 0.5)`.

    >>> print(Choice("pp2", args=("1f1b",), options=(("microbatches", 8),)))
    pp2(1f1b, microbatches=8)
    """

    name: str
    args: tuple[Value, ...] = ()
    options: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        inside = [show(a) for a in self.args] + [f"{key}={show(value)}" for key, value in self.options]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


def show(value: Value) -> str:
    """A value as the grammar writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not _PLAIN.fullmatch(value):
        return f"'{value}'" if '"' in value else f'"{value}"'
    # 1e+20 would not read back: "+" begins the compressor.
    return str(value).replace("e+", "e") if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Plan:
    """How the work of one run is shared: one choice per slot. Prints back in the grammar it was parsed from."""

    exchange: Choice
    """How replicas agree on the next parameters."""
    tensor: Choice | None = None
    """How each layer is cut (`tp2`)."""
    pipeline: Choice | None = None
    """How layers are divided into stages (`pp2(1f1b, microbatches=8)`)."""
    compressor: Choice | None = None
    """What goes on the wire (`+ topk(0.01)`)."""

    def __str__(self) -> str:
        product = " * ".join(str(c) for c in (self.exchange, self.tensor, self.pipeline) if c is not None)
        return f"{product} + {self.compressor}" if self.compressor is not None else product


@dataclass(frozen=True)
class StepReport:
    """One committed training step. The same loss on every rank; times, bytes and memory are this rank's own."""

    number: int
    """Steps committed so far, this one included: the first step is 1."""
    epoch: int
    loss: float
    """Mean over the global batch."""
    samples: int
    """Samples in the global batch of this step."""
    count: float
    """What the loss was divided by: samples, or tokens where the loss counts them."""
    seconds: float
    data_seconds: float
    compute_seconds: float
    exposed_seconds: float
    """Communication that nothing hid: time spent only waiting for other workers."""
    update_seconds: float
    bytes_sent: int
    peak_memory: int
    """Highest resident memory of this worker so far, in bytes."""
    lr: float
    grad_norm: float | None = None
    """Global gradient norm before clipping, where the run needed it."""
    skipped: bool = False
    """True if the update was dropped: overflow in fp16, or a non-finite loss with `on_nan="skip"`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What `metrics=` measures: means over the global batch, as the loss is. Of a run with a step of its own, what that
    returns; `loss/NAME` is the loss of model NAME."""

    @property
    def samples_per_second(self) -> float:
        """Samples a second of the whole job, not of this rank."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class Evaluation:
    """What `run.evaluate` found, over the whole data set and all workers."""

    loss: float
    count: float
    metrics: dict[str, float] = field(default_factory=dict)
