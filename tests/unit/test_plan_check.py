"""Every rule of plan/check: what cannot work is refused in one sentence with the numbers and the remedy."""

from __future__ import annotations

import pytest

from shoal.config import parse_strategy
from shoal.errors import ConfigError
from shoal.plan.check import RULES, Rule, check_text
from shoal.types import Plan

REFUSED = [
    # names
    ("zero4", 4, "unknown exchange 'zero4'; did you mean 'zero3'? There are: "),
    ("dpd", 2, "unknown exchange 'dpd'; did you mean 'ddp'?"),
    ("xyzzy", 2, "unknown exchange 'xyzzy'. There are: ddp, "),
    ("ddp + non", 2, "unknown compressor 'non'; did you mean 'none'?"),
    # options
    ("ddp(bucket=2)", 2, "ddp has no option 'bucket'; did you mean 'bucket_mb'?"),
    ("solo(3)", 1, "solo takes no options, but 'solo(3)' gives 1."),
    ("zero1(bucket_mb=big)", 2, "zero1: bucket_mb=big should be float."),
    ("ddp + none(3)", 2, "none takes no options"),
    ("ddp(bucket_mb=0)", 2, "ddp(bucket_mb=0): bucket_mb must be a size above 0"),
    ("ddp(-1)", 2, "bucket_mb must be a size above 0"),
    ("ddp(nan)", 2, "bucket_mb must be a size above 0"),
    ("ddp(inf)", 2, "bucket_mb must be a size above 0"),
    # workers
    ("ddp", 0, "ddp needs at least 1 worker; you have 0. Use --workers 1."),
    ("ddp * tp2 * pp2", 6, "tp2 * pp2 needs a multiple of 4 workers; you have 6. Use --workers 4 or 8."),
    ("zero1 * tp8", 2, "tp8 needs a multiple of 8 workers; you have 2. Use --workers 8."),
    ("ddp * tp0", 2, "ddp * tp0: a degree of 0 leaves nobody to do the work; use tp1 or pp1."),
    ("ddp * tp2(sequences=true)", 4, "tp2 has no option 'sequences'; did you mean 'sequence'?"),
    ("ddp * pp2(1f2b)", 4, "unknown pipeline schedule '1f2b'; did you mean '1f1b'?"),
    (
        "ddp * pp2(microbatches=0)",
        4,
        "a pipeline needs at least 1 micro-batch; you have 0. Use microbatches=8.",
    ),
    (
        "zero3 * pp2(interleaved)",
        4,
        "zero3 gathers the layers of one stage a worker, and interleaved has 2; use pp2(1f1b).",
    ),
    (
        "zero3(replicas=3)",
        4,
        "zero3(replicas=3) puts 4 workers into 3 equal groups, which cannot be done; use replicas=1",
    ),
    ("solo", 2, "solo is one process alone; you have 2 workers. Use --workers 1, or ddp."),
    ("ps * tp2", 2, "ps keeps models whole; leave tpN and ppN out, or use ddp."),
    ("ps(replicas=3)", 2, "ps(replicas=3): 3 replicas need as many servers, and there are 2; use servers=3"),
    (
        "ps(asp, aggregate=median)",
        2,
        "median compares the parts of a step, and asp applies each alone; use bsp",
    ),
    ("ps(backup=2)", 2, "backup=2 leaves 0 of 2 workers to wait for"),
    ("ps(asp, backup=1)", 4, "it takes bsp"),
    ("ps + powersgd", 2, "powersgd needs the sum of all workers on its way"),
    ("ps + powersgd(2)", 2, "powersgd needs the sum of all workers on its way"),
    ("ps(ssp)", 2, "ssp needs a number of steps, as in ssp=4."),
    ("ps(bsp, ssp=3)", 2, "ssp=3 has no meaning for bsp; leave one out."),
    ("ps(then=asp)", 2, "a second clock needs both, as in then=asp, after=100."),
    ("ps(patience=0)", 2, "patience=0.0 s lets nobody work; 60 is a good one."),
    ("ps(aggregate=trimed(0.1))", 2, "unknown aggregate 'trimed'; did you mean 'trimmed'?"),
    (
        "zero3 + int8",
        2,
        "nothing can be compressed under zero3; it can be under ddp, zero1, zero2, local, diloco",
    ),
    ("shared + fp16", 2, "nothing can be compressed under shared"),
    ("ddp + int9", 2, "unknown compressor 'int9'; did you mean 'int8'?"),
    ("ddp + topk(2)", 2, "topk(2.0) would send this share of the elements; give more than 0, and 1 at most"),
    ("ddp + auto(auto)", 2, "auto(auto) has nothing to weigh; name a compressor, as in auto(int8)."),
    ("local(8) + auto", 2, "auto compares whole steps, which workers do not take together there"),
    ("local", 2, "local needs every, as in 'local(every=...)'."),
    ("local(0)", 2, "local(0): workers meet after 1 step at least"),
    ("local(8, quorum=1.5)", 2, "a quorum is a share of the workers, above 0 and at most 1"),
    ("diloco(8, quorum=0.5) * tp2", 4, "with a quorum each worker may be at another step"),
    ("diloco(10, fragments=3)", 2, "10 steps are cut into as many equal parts as there are fragments"),
    ("diloco(10, fragments=2, delay=5)", 2, "a delay is shorter than such a part"),
    ("diloco(10, momentum=1)", 2, "a momentum from 0 to below 1"),
    ("ps(bps)", 2, "unknown clock 'bps'; did you mean 'bsp'?"),
]


@pytest.mark.parametrize(("text", "workers", "words"), REFUSED)
def test_what_cannot_work_is_refused(text: str, workers: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_text(text, workers)
    sentence = str(caught.value)
    assert words in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")


def test_every_rule_refuses_something() -> None:
    plans = [(parse_strategy(text), workers) for text, workers, _ in REFUSED]
    for rule in RULES:
        assert any(_objects(rule, plan, workers) for plan, workers in plans), rule.__name__


def _objects(rule: Rule, plan: Plan, workers: int) -> bool:
    try:
        return rule(plan, workers) is not None
    except ConfigError:  # a wrong name or option in the plan, which is not the rule's to refuse
        return False


@pytest.mark.parametrize(
    "text", ["solo", "ddp", "zero1", "zero2(8)", "shared", "ddp * tp1 * pp1", "ddp + none"]
)
def test_what_works_alone_passes(text: str) -> None:
    assert str(check_text(text, 1)) == text
