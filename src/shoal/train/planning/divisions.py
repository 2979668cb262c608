"""In which ways the user's model can be divided over a number of workers, and what each worker would hold of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from shoal.config import degree_of
from shoal.cost import ModelProfile
from shoal.embedding import SparseEmbedding
from shoal.errors import ConfigError
from shoal.plan.check import check_text, pipeline_options, tensor_options
from shoal.plan.search import degrees
from shoal.plan.work import Degrees, Division
from shoal.tensor import Cuts
from shoal.train.build import find_in_model, make_feed, make_trial
from shoal.train.model.divide import Trial
from shoal.train.model.profile import profile_cuts, profile_part
from shoal.train.planning.rehearsal import forget_peak, resident, settle
from shoal.train.rules import check_numbers, plan_schedule
from shoal.train.run_config import RunConfig
from shoal.world.mesh import Mesh
from shoal.world.world import World

SECONDS = 20.0
"""Of work, for which ways to divide a model are tried; the rest are refused, since nothing is known of them."""


@dataclass
class Divisions:
    """Ways, and why others are none."""

    found: dict[Degrees, Division] = field(default_factory=dict)
    refused: dict[Degrees, str] = field(default_factory=dict)


_FEW = 4
"""Samples of a micro-batch that shows where a model can be divided; what moves is in proportion to them."""


def divide_all(config: RunConfig, model: nn.Module, whole: ModelProfile, workers: int) -> Divisions:
    """Every way to divide the model among so many workers, by tensor degree, workers of a pipeline and their stages."""
    made = Divisions()
    end = time.process_time() + SECONDS
    for degree in ways_to_divide(workers):
        text = text_of(degree)
        if time.process_time() > end:
            made.refused[degree] = (
                f"to divide the model took longer than {SECONDS:g} s; {text} was not tried."
            )
            continue
        try:
            made.found[degree] = _divide(config, model, whole, workers, text)
        except ConfigError as error:
            made.refused[degree] = str(error)
        except RuntimeError as error:
            made.refused[degree] = f"the model cannot be divided: {str(error).splitlines()[0]}"
    return made


def ways_to_divide(workers: int) -> Iterator[Degrees]:
    """By tensor degree, workers of a pipeline and stages of each.

    >>> list(ways_to_divide(2))
    [(1, 2, 1), (2, 1, 1), (1, 2, 2)]
    """
    ways = [way for way in degrees(workers) if way != (1, 1)]
    yield from ((tensor, stages, 1) for tensor, stages in ways)
    yield from ((tensor, stages, 2) for tensor, stages in ways if stages > 1)


def text_of(degree: Degrees) -> str:
    """The plan by which a way to divide a model is tried.

    >>> text_of((2, 1, 1)), text_of((1, 2, 1))
    ('ddp * tp2', 'ddp * pp2(1f1b, microbatches=2)')
    """
    tensor, stages, each = degree
    schedule = "interleaved" if each > 1 else "1f1b"
    cut = f" * tp{tensor}" if tensor > 1 else ""
    return f"ddp{cut} * pp{stages}({schedule}, microbatches={stages})" if stages > 1 else f"ddp{cut}"


def _divide(config: RunConfig, model: nn.Module, whole: ModelProfile, workers: int, text: str) -> Division:
    if config.step is not None:
        raise ConfigError("a step of your own needs whole models.")
    if tables_in(model):
        raise ConfigError("rows of a SparseEmbedding are not divided over tpN or ppN.")
    plan = check_text(text, workers)
    tensor, stages = degree_of(plan.tensor), degree_of(plan.pipeline)
    mesh = Mesh.imagine(World.alone(), workers, tensor, stages)
    check_numbers(replace(config, strategy=text, accumulate=1, balance="even"), plan, mesh)
    parts_of_step = mesh.data.size * pipeline_options(plan).microbatches
    few = min(_FEW, -(-config.global_batch // parts_of_step))
    asked = replace(config, strategy=text, accumulate=1, balance="even", global_batch=few * parts_of_step)
    feed = make_feed(asked, plan, mesh)
    settle()
    before = resident("VmRSS")
    forget_peak()
    division = find_in_model(asked, plan, mesh, model, feed)
    building = max(0, resident("VmHWM") - before)
    schedule, size = plan_schedule(plan), -(-feed.global_batch // (feed.size * feed.accumulate))
    trial = make_trial(asked, model, feed, torch.device("cpu"))
    parts: list[ModelProfile] = []
    for rank in range(tensor * stages):
        place = Mesh.imagine(World.alone(), workers, tensor, stages, rank)
        part = profile_part(whole, division, place, schedule, feed.accumulate, size)
        if rank % tensor == 0:  # what tensor ranks move is alike on all of a stage
            moved = profile_cuts(trial, division, place, tensor_options(plan), schedule)
        parts.append(replace(part, cut=moved))
    cut = _cut_share(trial, division.cuts) if division.cuts is not None else 0.0
    costs = division.split.costs if division.split is not None else ()
    total = sum(costs)
    return Division(parts, size, cut, tuple(cost / total for cost in costs), building)


def tables_in(model: nn.Module) -> list[str]:
    """The names of its SparseEmbeddings."""
    return [name for name, module in model.named_modules() if isinstance(module, SparseEmbedding)]


def _cut_share(trial: Trial, cuts: Cuts) -> float:
    """The share of a pass's operations that tensor ranks divide: all but those of modules that stay whole."""
    counter = FlopCounterMode(display=False)
    with trial.calm(), counter:
        trial.run()
    everything = counter.get_total_flops()
    counts = counter.get_flop_counts()
    name = type(trial.model).__name__
    cut = {one.module for one in cuts.cuts}
    whole = 0
    for module, kind in trial.model.named_modules():
        if module not in cut and next(iter(kind.children()), None) is None:
            whole += sum(counts.get(f"{name}.{module}", {}).values())
    return 1 - whole / everything if everything else 0.0
