"""A search as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shoal.plan.predict import Prediction
from shoal.plan.search import Found

_ROWS = 12


def show(found: Found, everything: bool = False) -> str:
    """A table of plans, the best first, what would not fit, and what was refused.

    >>> print(show(Found([], [], {"solo": "solo is one process alone."})))
    no plan fits
    refused:
      solo: solo is one process alone.
    """
    plans = list(found.plans) if everything else best_of_each(found.plans)[:_ROWS]
    lines = [*_table(plans)] if plans else ["no plan fits"]
    if not everything and len(found.plans) > len(plans) > 0:
        lines.append(f"and {len(found.plans) - len(plans)} more (--all)")
    if found.too_large:
        least = found.too_large[0]
        lines.append(
            f"would not fit: {len(found.too_large)}; the smallest is {least.plan}, {size(least.total)}"
        )
    if found.refused:
        lines.append("refused:")
        lines += [f"  {text}: {why}" for text, why in _shortened(found.refused)]
    return "\n".join(lines)


def best_of_each(plans: Sequence[Prediction]) -> list[Prediction]:
    """Of plans that differ in schedule, micro-batches or accumulation only, the fastest."""
    seen: dict[tuple[object, ...], Prediction] = {}
    for one in plans:
        stages = one.plan.pipeline.name if one.plan.pipeline is not None else ""
        tensor = one.plan.tensor.name if one.plan.tensor is not None else ""
        compressor = str(one.plan.compressor or "")
        seen.setdefault((one.plan.exchange.name, tensor, stages, compressor), one)
    return list(seen.values())


def _table(plans: Sequence[Prediction]) -> Iterator[str]:
    rows = [["strategy", "step", "", "memory", "sent", "limited by", "promise"]]
    for one in plans:
        strategy = str(one.plan) + (f", accumulate={one.accumulate}" if one.accumulate > 1 else "")
        low, high = span(one.seconds.low), span(one.seconds.high)
        rows.append(
            [
                strategy,
                span(one.seconds.middle),
                f"{low} to {high}",
                size(one.total),
                size(one.sent),
                one.limits,
                one.promise.name,
            ]
        )
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _shortened(refused: Any) -> Iterator[tuple[str, str]]:
    """One line for strategies that are refused for one reason."""
    by_reason: dict[str, list[str]] = {}
    for text, why in refused.items():
        by_reason.setdefault(why.removeprefix(f"{text}: "), []).append(text)
    for why, texts in by_reason.items():
        more = f" and {len(texts) - 1} more" if len(texts) > 1 else ""
        yield f"{texts[0]}{more}", why


def memory_lines(one: Prediction) -> str:
    """Bytes of one plan by kind."""
    return ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in one.memory.items() if nbytes)


def to_json(one: Prediction) -> dict[str, object]:
    """Plain values of one plan."""
    return {
        "strategy": str(one.plan),
        "accumulate": one.accumulate,
        "seconds": {"low": one.seconds.low, "middle": one.seconds.middle, "high": one.seconds.high},
        "compute": one.compute,
        "communication": one.communication,
        "waiting": one.waiting,
        "memory": dict(one.memory),
        "bytes_sent": one.sent,
        "limited_by": one.limits,
        "promise": one.promise.name,
        "measured": one.measured,
    }


def span(seconds: float) -> str:
    """Seconds as people read them.

    >>> span(0.00123), span(0.0456), span(12.3)
    ('1.23 ms', '45.6 ms', '12.3 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def size(nbytes: float) -> str:
    """Bytes as people read them.

    >>> size(999), size(1_234_567), size(5e9)
    ('999 B', '1.2 MB', '5.0 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes:.0f} B"
