"""What `shoal plan train.py --cluster cluster.toml` prints: the model is traced, nothing of it is allocated or run."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.errors import ConfigError
from shoal.plan.paper.any_model import AnyPlan, Shapes, search_any
from shoal.plan.paper.cluster import Cluster, read_cluster
from shoal.plan.show import size, span
from shoal.train.planning.profile_work import whole_profile
from shoal.train.planning.request import Request
from shoal.train.planning.trace import CannotTrace, trace
from shoal.train.run_config import RunConfig, check_kinds

_TRACED = 8
"""Samples that are traced at most: what a pass takes is in proportion to them."""
_ROWS = 12


def answer_cluster(config: RunConfig, request: Request) -> None:
    """Trace, search and print."""
    cluster = read_cluster(Path(request.cluster))
    if config.step is None:
        check_kinds(config)
    samples = max(1, min(_TRACED, config.global_batch // cluster.cards))
    try:
        found = trace(config, samples)
    except CannotTrace as error:
        raise ConfigError(
            f"the model cannot be traced ({error}), and cards that are not here cannot run it; plan for this machine."
        ) from None
    whole = whole_profile(config)
    shapes = Shapes(
        samples, found.forward_flops, found.flops, found.peak, found.recomputed_peak, len(found.blocks), whole
    )
    precision = "bf16" if config.precision == "bf16" else "fp32"
    plans = search_any(shapes, cluster, config.global_batch, precision)
    _print(plans, shapes, cluster, config, request)


def _print(
    plans: list[AnyPlan], shapes: Shapes, cluster: Cluster, config: RunConfig, request: Request
) -> None:
    if request.as_json:
        print(json.dumps([_plain(one) for one in plans]))
        return
    flops = shapes.flops / shapes.samples
    print(
        f"{cluster.cards} × {cluster.name}, global batch {config.global_batch}, {flops / 1e9:.3g} GFLOP a sample; "
        f"fractions of the peaks: {cluster.achieved.source}"
    )
    for one in plans if request.everything else plans[:_ROWS]:
        more = f", accumulate={one.accumulate}" if one.accumulate > 1 else ""
        more += ", recompute='blocks'" if one.recompute else ""
        low, high = span(one.seconds.low), span(one.seconds.high)
        fits = "" if one.fits else "  does not fit"
        print(
            f"{one.strategy}{more}: {span(one.seconds.middle)} ({low} to {high}), {size(one.total)} a card{fits}"
        )


def _plain(one: AnyPlan) -> dict[str, object]:
    return {
        "strategy": one.strategy,
        "accumulate": one.accumulate,
        "recompute": one.recompute,
        "seconds": {"low": one.seconds.low, "middle": one.seconds.middle, "high": one.seconds.high},
        "memory": one.memory,
        "fits": one.fits,
    }
