"""The nouns of tensor parallel: its options, one cut, and all cuts of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.tensor.layout import TensorCut, TensorLayout


@dataclass(frozen=True)
class TensorOptions:
    """The options of `tpN`, as in `tp2(sequence=true, loss=true)`.

    `sequence`: norms and dropouts between cut layers work on a slice of the sequence each.
    `loss`: the logits stay cut over the vocabulary, and so does the loss.
    """

    sequence: bool = False
    loss: bool = False


@dataclass(frozen=True)
class Cut:
    """One module that is cut.

    `how` is "column" (by outputs), "row" (by inputs), "heads", "vocabulary" (an embedding, by words) or "head" (by
    outputs, which are put together again or go into the loss in parts). `parameters` says for each
    parameter of the model, by name, how it is cut. Cuts of one `group` belong together: data between its columns
    and its rows is cut too, along `axis`. If a dropout works on that data, `dropped` names the module that all of
    it happens in. `divide` are attributes of the module `group` that count what is cut.
    """

    module: str
    how: str
    why: str
    parameters: tuple[tuple[str, TensorCut], ...]
    group: str = ""
    axis: int = -1
    dropped: str | None = None
    divide: tuple[str, ...] = ()


@dataclass(frozen=True)
class SequenceBlock:
    """A repeated block whose norms and dropouts can work on a slice of the sequence, which is dimension `dim`."""

    module: str
    attention: str
    norms: tuple[str, ...]
    dropouts: tuple[str, ...]
    dim: int


@dataclass(frozen=True)
class Cuts:
    """What is cut, and which modules with parameters are left whole, with the reason.

    `head` is the head whose output is what the model returns, so that a loss can be taken of its cut logits.
    `blocks` is a run of blocks for `sequence=true`, in order; if it is empty, `obstacle` says why.
    """

    cuts: tuple[Cut, ...]
    whole: tuple[tuple[str, str], ...] = ()
    degree: int = 1
    head: str = ""
    blocks: tuple[SequenceBlock, ...] = ()
    length: int = 0
    obstacle: str = ""

    def groups(self) -> list[set[str]]:
        """The modules that are cut together: data between them is cut too."""
        names = dict.fromkeys(cut.group for cut in self.cuts if cut.group)
        return [{cut.module for cut in self.cuts if cut.group == name} for name in names]

    def layout(self) -> TensorLayout:
        """Which rank holds which part; no processes are needed.

        >>> one = Cut("up", "column", "", (("up.weight", TensorCut(0, (8,))),))
        >>> Cuts((one,), degree=2).layout().shares("up.weight")
        1.0
        """
        return TensorLayout({name: piece for cut in self.cuts for name, piece in cut.parameters}, self.degree)


def describe_cuts(cuts: Cuts) -> str:
    """A table of what is cut, how and why, and of what is left whole and why. Repeated layers share a line.

    >>> one = Cut("0.up", "column", "a pair with 0.down", (("0.up.weight", TensorCut(0, (8,))),))
    >>> print(describe_cuts(Cuts((one,), (("norm", "LayerNorm is not cut"),), degree=2)))
    cut 2 ways  how     count  why
    0.up        column      1  a pair with 0.down
    <BLANKLINE>
    left whole  count  why
    norm            1  LayerNorm is not cut
    """
    rows = _folded((cut.module, cut.how, cut.why) for cut in cuts.cuts)
    text = _table((f"cut {cuts.degree} ways", "how", "count", "why"), [(m, h, n, w) for (m, h, w), n in rows])
    if cuts.whole:
        left = _folded(cuts.whole)
        text += "\n\n" + _table(("left whole", "count", "why"), [(m, n, w) for (m, w), n in left])
    return text


def _folded(rows: Iterable[tuple[str, ...]]) -> list[tuple[tuple[str, ...], str]]:
    # Layers of one model differ by their numbers only: what is left when numbers are hidden is one line.
    seen: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for row in rows:
        key = tuple(re.sub(r"\b\d+\b(?=[.'])|(?<=\.)\d+\b", "*", word, count=1) for word in row)
        seen.setdefault(key, []).append(row)
    return [(key if len(like) > 1 else like[0], str(len(like))) for key, like in seen.items()]


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    number = head.index("count")
    return "\n".join(
        "  ".join(
            word.rjust(widths[place]) if place == number else word.ljust(widths[place])
            for place, word in enumerate(line)
        ).rstrip()
        for line in lines
    )
