"""A flow with all that flows have, and its inputs: tests run it on both engines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from shoal.data.flow.flow import Flow
    from shoal.data.flow.sessions import Session


def events(start: int, stop: int) -> pa.Table:
    """What users did."""
    draw = np.random.default_rng(0)
    kinds = draw.choice(["buy", "view", "skip"], 1000, p=[0.2, 0.5, 0.3])
    table = pa.table(
        {
            "id": np.arange(1000),
            "user": draw.integers(0, 50, 1000),
            "kind": kinds,
            "value": draw.uniform(-1, 1, 1000),
            "text": [
                " ".join(draw.choice(["a", "b", "see", "é"], int(n))) for n in draw.integers(0, 5, 1000)
            ],
        }
    )
    return table.slice(start, stop - start)


def users() -> pa.Table:
    """Who they are; some are missing."""
    draw = np.random.default_rng(1)
    return pa.table(
        {
            "user": np.arange(45),
            "age": draw.integers(10, 60, 45),
            "country": draw.choice(["de", "fr", "cn"], 45),
        }
    )


def words_in(text: str) -> int:
    """How many words."""
    return len(text.split())


def prepare(data: Session, inputs: Path) -> Flow:
    """Filter, map by expression and by function, window, join, group."""
    from shoal.data.flow import _

    return (
        data.read(inputs / "events")
        .filter(_.kind != "skip")
        .map({"v2": _.value * 2 + 1, "words": words_in})
        .window("user", "id", {"before": _.value.lag()})
        .map({"delta": (_.value - _.before).fill_null(0.0)})
        .join(data.read(inputs / "users.parquet"), "user", unique=True)
        .filter(_.age >= 18)
        .group(
            ("country", "kind"),
            {"n": _.count(), "high": _.v2.max(), "delta": _.delta.sum(), "words": _.words.sum()},
        )
    )
