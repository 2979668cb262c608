"""Which plans there are for a model on so many workers: those that the rules permit, and why the others are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shoal import exchange, pipeline
from shoal.config import degree_of
from shoal.errors import ConfigError
from shoal.plan.check import check_device, check_text, pipeline_options
from shoal.plan.predict import Prediction, Predictor, degrees_of
from shoal.types import Plan, Promise

SPARE = 0.05
"""Of the memory that a worker may take, which stays free."""
COMPRESSORS = ("int8", "bf16")
"""Tried beside none: those that change numbers least."""
MICROBATCHES = (2, 4, 8, 16)
ROUNDS = 16
"""Steps between two synchronisations, where workers train on their own."""


@dataclass(frozen=True)
class Wanted:
    """What the user asks for of a plan."""

    memory: float = float("inf")
    """Bytes that a worker may take."""
    exact: bool = False
    """Only plans that equal one process up to rounding."""
    only: Sequence[str] = ()
    """Only these strategies; empty: all."""
    device: str = "cpu"
    accumulate: Sequence[int] = (1,)


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    plans: Sequence[Prediction]
    """That fit, the fastest first; those whose exchange was not measured here come after all others."""
    too_large: Sequence[Prediction]
    """That would not fit, the smallest first."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Strategies that cannot work, and why."""


def candidates(workers: int) -> Iterator[str]:
    """Texts of strategies, sensible or not: what cannot work is for the rules to say.

    >>> [text for text in candidates(2) if "pp2" not in text][:5]
    ['solo', 'ddp', 'ddp + int8', 'ddp + bf16', 'zero1']
    """
    for tensor, stages in degrees(workers):
        product = f" * tp{tensor}" if tensor > 1 else ""
        for name, kind in exchange.TABLE.items():
            if tensor * stages == workers > 1 and not _stands_for_all(name):
                continue  # one replica alone has nobody to exchange with, so all of them would be one
            written = written_alone(name)
            for middle in _schedules(stages):
                text = f"{written}{product}{middle}"
                yield text
                if kind.compresses and tensor * stages < workers:
                    yield from (f"{text} + {compressor}" for compressor in COMPRESSORS)


def _stands_for_all(name: str) -> bool:
    """Whether it is the first exchange that keeps every worker's part whole and lets it be divided."""
    plain = [
        other
        for other, kind in exchange.TABLE.items()
        if kind.takes_own_step and not kind.one_copy and kind.compresses
    ]
    return name == plain[0]


def written_alone(name: str, rounds: int = ROUNDS) -> str:
    """An exchange as a strategy names it, with what has no default.

    >>> written_alone("ddp"), written_alone("local")
    ('ddp', 'local(16)')
    """
    return f"{name}({rounds})" if exchange.TABLE[name].updates_alone else name


def degrees(workers: int) -> list[tuple[int, int]]:
    """Tensor degree and number of stages, the model whole first.

    >>> degrees(4)
    [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]
    """
    ways = [n for n in range(1, workers + 1) if workers % n == 0]
    return [(t, p) for t in ways for p in ways if workers % (t * p) == 0]


def _schedules(stages: int) -> Iterator[str]:
    if stages == 1:
        yield ""
        return
    for schedule in pipeline.TABLE:
        for count in MICROBATCHES:
            yield f" * pp{stages}({schedule}, microbatches={count})"


def search(predictor: Predictor, wanted: Wanted) -> Found:
    """Every candidate that the rules and the model permit, predicted and in order."""
    found: list[Prediction] = []
    refused: dict[str, str] = {}
    workers = predictor.setting.workers
    for text in wanted.only or candidates(workers):
        try:
            plan = check_text(text, workers)
            check_device(plan, wanted.device)
            _check(predictor, plan, wanted)
        except ConfigError as objection:
            refused[text] = str(objection)
            continue
        for accumulate in wanted.accumulate:
            if _enough(predictor, plan, accumulate):
                found.append(predictor.predict(plan, accumulate))
    limit = (1 - SPARE) * wanted.memory
    found = [one for one in found if not wanted.exact or one.promise is Promise.EXACT]
    fitting = [one for one in found if one.most <= limit]
    others = [one for one in found if one.most > limit]
    return Found(
        sorted(fitting, key=lambda one: (not one.measured, one.seconds.middle)),
        sorted(others, key=lambda one: one.total),
        refused,
    )


def _check(predictor: Predictor, plan: Plan, wanted: Wanted) -> None:
    """Refuse what the model cannot, or the user does not want."""
    degree = degrees_of(plan)
    if degree != (1, 1, 1) and degree not in predictor.work.divisions:
        raise ConfigError(predictor.work.refused.get(degree, "the model was not divided so"))
    objection = predictor.work.exchanges.get(plan.exchange.name)
    if objection is not None:
        raise ConfigError(objection)
    if plan.compressor is not None and predictor.work.compression:
        raise ConfigError(predictor.work.compression)
    if not _enough(predictor, plan, wanted.accumulate[0]):
        raise ConfigError(
            f"a global batch of {predictor.setting.global_batch} has fewer samples than its micro-batches"
        )


def _enough(predictor: Predictor, plan: Plan, accumulate: int) -> bool:
    cells = degree_of(plan.tensor) * degree_of(plan.pipeline)
    replicas = predictor.setting.workers // cells
    return predictor.setting.global_batch >= replicas * accumulate * pipeline_options(plan).microbatches
