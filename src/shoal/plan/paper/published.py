"""Runs that others have measured and published, in one JSON schema: read, fitted to, and predicted.

    {"rows": [{"model": {"layers": 96, ...}, "hardware": {"gpu": "A100 80GB", "gpus": 64, ...},
               "parallel": {"dp": 8, "tp": 8, "pp": 1, ...}, "measured": {"step_time_s": 12.5, ...}}]}

What a row does not say is derived where it follows from the rest, and said; a row without layers and width, such as a
mixture of experts, is left out, and so is one whose own numbers contradict each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.plan.paper.cards import CARDS
from shoal.plan.paper.cluster import Cluster
from shoal.plan.paper.fit import Measured
from shoal.plan.paper.gpt import Gpt
from shoal.plan.paper.layout import Layout
from shoal.plan.paper.step_time import step_flops

LARGEST = 1 << 26
"""Bytes of a file that is read at all."""
_CARDS = (
    ("GB300", "GB300"),
    ("GB200", "GB200"),
    ("B300", "B300"),
    ("B200", "B200"),
    ("H100", "H100"),
    ("A100.*40GB", "A100-40GB"),
    ("A100", "A100-80GB"),
    ("V100", "V100"),
    ("MI300", "MI300X"),
)
_LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
_VOCABULARY, _LLAMA_VOCABULARY = 51200, 128256


@dataclass(frozen=True)
class Rows:
    """What of a file can be replayed."""

    groups: Mapping[str, Sequence[Measured]]
    """By hardware, and by who measured on it: one calibration each."""
    left_out: Mapping[str, int]
    """Why rows are not among them, and how many."""


def read_published(path: Path) -> Rows:
    """Read a file of published runs."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
        found = json.loads(text) if len(text) <= LARGEST else None
        rows = found["rows"] if isinstance(found, dict) else found
        assert isinstance(rows, list)
    except (OSError, ValueError, KeyError, AssertionError, RecursionError) as error:
        raise ConfigError(
            f"--replay {path}: no published runs in it ({type(error).__name__}); see docs/guides/plan.md."
        ) from None
    groups: dict[str, list[Measured]] = {}
    left_out: dict[str, int] = {}
    for row in rows:
        try:
            made = run_of(row)
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
            made = "a field is missing or of another kind"
        if isinstance(made, str):
            left_out[made] = left_out.get(made, 0) + 1
        else:
            groups.setdefault(f"{row['hardware']['gpu']}, {row.get('group', '')}", []).append(made)
    return Rows(groups, left_out)


def run_of(row: Mapping[str, Any]) -> Measured | str:
    """One run; or why it cannot be replayed."""
    model, hardware, parallel, measured = (
        row[part] for part in ("model", "hardware", "parallel", "measured")
    )
    if row.get("consistent") is False:
        return "its numbers contradict each other, as the file says"
    if not model.get("layers") or not model.get("hidden"):
        return "its layers or width are not given"
    if (parallel.get("ep") or 1) > 1 or "LoRA" in str(row.get("note")):
        return "not a dense transformer of which every weight is trained"
    card = next(
        (
            name
            for pattern, name in _CARDS
            if re.search(pattern, str(hardware["gpu"]).upper().replace("_", "-"))
        ),
        None,
    )
    if card is None:
        return f"card {hardware['gpu']} is not known"
    gpt, layout = _gpt(model), _layout(parallel)
    seconds = measured.get("step_time_s")
    flops = (measured.get("tflops_per_gpu") or 0) * 1e12 * hardware["gpus"]
    if not seconds:
        if not flops:
            return "no step time in it"
        seconds = step_flops(gpt, layout.global_batch) / flops
    if not model.get("seq"):
        if not flops:
            return "no length of its sequences in it"
        gpt, layout = _length_by_flops(gpt, layout, flops * seconds)
    elif flops and not _agrees(gpt, layout, flops * seconds):
        return "its FLOP/s are not those of its model, batch and time"
    name = f"{row.get('id', '')} {model.get('name') or ''} {_shown(layout)}".strip()
    return Measured(gpt, layout, Cluster(CARDS[card], 1, card), float(seconds), name)


def _gpt(model: Mapping[str, Any]) -> Gpt:
    hidden, layers = int(model["hidden"]), int(model["layers"])
    heads = int(model.get("heads") or max(1, hidden // 128))
    shared, gated = int(model.get("kv_heads") or 0), bool(model.get("kv_heads"))
    vocab = int(model.get("vocab") or (_LLAMA_VOCABULARY if gated else _VOCABULARY))
    gpt = Gpt(
        layers,
        hidden,
        heads,
        int(model.get("seq") or 1024),
        vocab,
        int(model.get("ffn") or 0),
        shared,
        gated,
        not gated,
    )
    if not gpt.ffn and gated:  # what is left of the parameters is the feed-forward part
        billions = re.search(r"(\d+(?:\.\d+)?)B", str(model.get("name")))
        whole = float(model.get("params") or (float(billions[1]) * 1e9 if billions else 0))
        rest = (whole - 2 * hidden * vocab) / layers - hidden * hidden * (2 + 2 * shared / heads)
        if rest > 0:
            gpt = replace(gpt, ffn=round(rest / 3 / hidden))
    return gpt


def _layout(parallel: Mapping[str, Any]) -> Layout:
    data, batch = int(parallel["dp"]), int(parallel["global_batch"])
    precision = str(parallel.get("precision") or "bf16").lower()
    recompute = str(parallel.get("recompute") or "none").split()[0]
    zero = parallel.get("zero")
    return Layout(
        global_batch=batch,
        data=data,
        tensor=int(parallel.get("tp") or 1),
        stages=int(parallel.get("pp") or 1),
        context=int(parallel.get("cp") or 1),
        virtual=int(parallel.get("vpp") or 1),
        micro_batch=int(parallel.get("microbatch") or max(1, batch // data)),
        zero=1 if zero is None else int(zero),
        recompute=recompute if recompute in ("full", "selective") else "none",
        sequence=bool(parallel.get("sp")),
        precision=next((name for name in ("fp4", "fp8") if name in precision), "bf16"),
    )


def _length_by_flops(gpt: Gpt, layout: Layout, flops: float) -> tuple[Gpt, Layout]:
    """The usual length of sequences whose FLOP are nearest to those that were counted, with or without recomputing."""
    found = []
    for length in _LENGTHS:
        longer = replace(gpt, seq=length)
        plain = step_flops(longer, layout.global_batch)
        found += [
            (max(factor * plain / flops, flops / factor / plain), longer, way)
            for factor, way in ((1.0, "none"), (4 / 3, "full"))
        ]
    _, best, recompute = min(found, key=lambda one: one[0])
    return best, replace(layout, recompute=recompute)


_COUNTS = (0.55, 1.6)
"""What others count as the FLOP of a step, beside what we do: with half of attention, or with what runs again."""


def _agrees(gpt: Gpt, layout: Layout, flops: float) -> bool:
    return _COUNTS[0] < flops / step_flops(gpt, layout.global_batch) < _COUNTS[1]


def _shown(layout: Layout) -> str:
    degrees = [f"zero{layout.zero}", f"dp{layout.data}", f"tp{layout.tensor}", f"pp{layout.stages}"]
    return f"{' '.join(degrees)}, micro-batch {layout.micro_batch}, {layout.precision}"


def rank_agreement(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Kendall's tau: 1 if every two runs are in the same order, -1 if in the opposite one.

    >>> rank_agreement([1, 2, 3], [1, 3, 2])
    0.3333333333333333
    """
    alike = pairs = 0
    for i in range(len(measured)):
        for j in range(i):
            sign = (measured[i] - measured[j]) * (predicted[i] - predicted[j])
            alike += (sign > 0) - (sign < 0)
            pairs += measured[i] != measured[j]
    return alike / pairs if pairs else 1.0
