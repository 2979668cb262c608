"""What `shoal plan train.py` prints: all workers of this host profile the model at once, and the first answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from shoal.plan.cache import keep, machine_key, recall
from shoal.plan.explain import explain
from shoal.plan.machine import Machine
from shoal.plan.picture import draw_plans, draw_sweep
from shoal.plan.predict import Prediction, Predictor, Setting
from shoal.plan.residuals import residuals_of
from shoal.plan.search import Found, Wanted, search
from shoal.plan.show import memory_lines, show, size, span, to_json
from shoal.plan.sweep import Point, show_sweep, sweep
from shoal.train.planning.answer_cluster import answer_cluster
from shoal.train.planning.calibrate_worker import TABLES, key_of
from shoal.train.planning.other_work import OtherWork, said
from shoal.train.planning.profile_work import Effort, profile_work
from shoal.train.planning.request import Request
from shoal.train.run_config import RunConfig
from shoal.world.free_memory import free_memory
from shoal.world.launch import Launch
from shoal.world.world import World

PREDICTIONS = "predictions"


def answer_plan(config: RunConfig, launch: Launch) -> None:
    """Profile with all others that are here; the first prints."""
    request = Request.of(launch.dry_run)
    if request.cluster:
        answer_cluster(config, request)
        return
    world = World.open(replace(launch, dry_run=""))
    free = free_memory()
    machine = machine_of(world.size)
    looking = OtherWork()
    work = profile_work(config, world, request.workers, machine, Effort(request.seconds))
    others = looking.cores(world)
    if world.rank == 0:
        setting = Setting(request.workers, config.global_batch, config.accumulate, request.hosts, request.net)
        predictor = Predictor(work, machine, setting, residuals_of(machine_key()))
        limit = request.memory or free / world.size
        wanted = Wanted(limit, request.exact, request.only, world.device.type)
        found = search(predictor, wanted)
        keep_predictions(work.key, found.plans)
        points = sweep(predictor, request.sweep, wanted) if request.sweep else []
        try:
            _print(request, predictor, found, points, others)
            sys.stdout.flush()
        except BrokenPipeError:  # whoever read it, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    world.barrier()


def machine_of(workers: int) -> Machine:
    """The tables of this machine with so many workers; empty ones if nothing was measured."""
    return Machine.from_json(recall(TABLES, key_of(workers)).get("machine")) or Machine(workers, 1)


def keep_predictions(model: str, plans: Sequence[Prediction]) -> None:
    """Keep what was predicted, so that runs of this model can be compared with it."""
    if plans:
        kept = {
            str(one.plan): [one.seconds.middle, one.total, one.accumulate, dict(one.memory)]
            for one in reversed(plans)
        }
        keep(PREDICTIONS, f"{machine_key()}-{model}-{plans[0].workers}", {"plans": kept})


def _print(request: Request, predictor: Predictor, found: Found, points: list[Point], others: float) -> None:
    if request.as_json:
        body = {
            "plans": [to_json(one) for one in found.plans],
            "too_large": [to_json(one) for one in found.too_large],
            "refused": dict(found.refused),
            "sweep": [point.to_json() for point in points],
            "other_work": others,
        }
        print(json.dumps(body))
    else:
        notes = [predictor.work.note, said(others, psutil.cpu_count() or 1)]
        print("\n".join(_lines(request, predictor, found, notes)))
        if points:
            print(f"\n{show_sweep(points)}")
    if request.plot and (found.plans or points):
        path = Path(request.plot)
        draw_sweep(points, path) if points else draw_plans(found.plans, path)
        print(f"shoal: drew {path}", file=sys.stderr)


def _lines(request: Request, predictor: Predictor, found: Found, notes: Sequence[str]) -> list[str]:
    work, setting = predictor.work, predictor.setting
    where = f"{setting.workers} workers" + (f" on {setting.hosts} hosts" if setting.hosts > 1 else "")
    lines = [f"{where}, global batch {setting.global_batch}, {size(work.parameters)} of parameters"]
    lines += [f"note: {note}" for note in notes if note]
    lines += ["", show(found, request.everything)]
    if found.plans:
        best: Prediction = found.plans[0]
        lines += ["", f"memory of {best.plan}: {memory_lines(best)}", explain(found.plans, predictor)]
        if not best.measured:
            lines.append(
                f"What {best.plan} adds to a step was not measured here; `shoal plan --calibrate` does that."
            )
    elif found.too_large:
        lines.append(f"the fastest of those would take {span(found.too_large[0].seconds.middle)} a step.")
    return lines
