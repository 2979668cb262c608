"""A transformer as a few numbers, where there is no program: `layers=96,hidden=12288,heads=96,seq=2048`."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.table import did_you_mean


@dataclass(frozen=True)
class Gpt:
    """A decoder-only transformer.

    >>> gpt = Gpt(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
    >>> f"{gpt.parameters / 1e9:.1f}"
    '174.6'
    """

    layers: int
    hidden: int
    heads: int
    seq: int
    vocab: int = 51200
    ffn: int = 0
    """Width inside of the feed-forward part; 0: 4 × hidden."""
    kv_heads: int = 0
    """Heads of keys and values; 0: as many as heads."""
    gated: bool = False
    """Three matrices in the feed-forward part in place of two, as in Llama."""
    tied: bool = True
    """Whether the matrix of the logits is that of the embedding."""

    @property
    def inner(self) -> int:
        """Width inside of the feed-forward part."""
        return self.ffn or 4 * self.hidden

    @property
    def block_parameters(self) -> int:
        """Numbers of one layer that are multiplied by every token."""
        shared = (self.kv_heads or self.heads) / self.heads
        attention = self.hidden * self.hidden * (2 + 2 * shared)
        return round(attention + (3 if self.gated else 2) * self.hidden * self.inner)

    @property
    def head_parameters(self) -> int:
        """Numbers of the matrix that makes logits."""
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        """All numbers, but for those of norms, biases and positions."""
        return self.layers * self.block_parameters + (1 if self.tied else 2) * self.head_parameters

    @property
    def head_width(self) -> int:
        """Numbers of each head."""
        return self.hidden // self.heads


_REQUIRED = ("layers", "hidden", "heads", "seq")


def parse_gpt(text: str) -> Gpt:
    """Read a description; wrong names and values get a sentence.

    >>> parse_gpt("layers=2,hidden=64,heads=4,seq=16").parameters
    3375104
    """
    known = {field.name: field.type for field in dataclasses.fields(Gpt)}
    found: dict[str, int | bool] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        if name not in known:
            raise ConfigError(f"--gpt: there is no '{name}'{did_you_mean(name, known)}")
        if known[name] == "bool" and value in ("true", "false"):
            found[name] = value == "true"
        elif re.fullmatch(r"\d{1,9}", value) and (int(value) > 0 or name in ("ffn", "kv_heads")):
            found[name] = int(value)
        else:
            raise ConfigError(f"--gpt: {part} should be a number above 0, as in {name}=96.")
    missing = [name for name in _REQUIRED if name not in found]
    if missing:
        raise ConfigError(
            f"--gpt needs {', '.join(missing)}, as in layers=96,hidden=12288,heads=96,seq=2048,vocab=51200."
        )
    gpt = Gpt(**found)  # type: ignore[arg-type]  # checked above, field by field
    if gpt.hidden % gpt.heads:
        raise ConfigError(f"--gpt: {gpt.heads} heads do not divide hidden={gpt.hidden}; use a divisor of it.")
    return gpt
