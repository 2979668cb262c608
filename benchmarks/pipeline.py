"""A pipeline beside the formula: how close is a step to what its stages' own times allow?

    scripts/bench pipeline [--schedule 1f1b] [--stages 2] [--microbatches 8] [--rounds 6]

Every worker first times its stage alone, forward and backward of one micro-batch, all workers at once and with
nothing sent. From these times the schedule says how long a step must take, bubble included (pipeline/check.py
simulates it). The same workers then run real steps; the two alternate. Goal: within 10 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
from exchange import SIZES, Case, Transformer, adamw, dataset, loss

from shoal import pipeline
from shoal.pipeline.base import Costs
from shoal.pipeline.check import simulate
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.order import Order
from shoal.train.pipelined import Chunk
from shoal.world.world import World

GOAL = 1.10


def time_stage(chunk: Chunk, received: torch.Tensor, micro: int) -> tuple[float, float]:
    """Seconds of one stage's forward and backward passes over one micro-batch."""
    received = received.detach().requires_grad_(received.is_floating_point())
    begun = time.perf_counter()
    output = chunk(received, micro=micro)
    middle = time.perf_counter()
    output.backward(torch.ones_like(output))
    return middle - begun, time.perf_counter() - middle


def contest(world: World, strategy: str, size: str, batch: int, rounds: int) -> dict[str, list[list[float]]]:
    """Per round: seconds of this worker's stages (forward, backward), and of whole steps."""
    torch.set_num_threads(1)
    case = Case(size, batch, rounds, 1, ())
    order = Order(
        model=lambda: Transformer(*SIZES[size]),
        loss=loss,
        optimizer=adamw,
        data=dataset(world, case),
        global_batch=batch,
        strategy=strategy,
    )
    _, parts = build(order, world, record="")
    line = parts.pipeline
    assert line is not None
    found: dict[str, list[list[float]]] = {"forward": [], "backward": [], "step": []}
    for turn in range(rounds + 1):
        portion = parts.loader.take(turn)
        forward, backward = [], []
        for number, chunk in line._chunks.items():
            line._job.loads = [line._job.load(b, True, turn, 0) for b in portion.batches]
            example = line._example(number - 1)
            received = torch.zeros(example.shape, dtype=example.dtype)
            world.barrier()
            pairs = [time_stage(chunk, received, i) for i in range(len(portion.batches))]
            forward.append(statistics.median(f for f, _ in pairs))
            backward.append(statistics.median(b for _, b in pairs))
        for p in parts.model.parameters():
            p.grad = None
        parts.exchange.begin()
        world.barrier()
        begun = time.perf_counter()
        line.run(turn, portion, 1.0)
        world.barrier()
        taken = time.perf_counter() - begun
        parts.exchange.finish(_nothing())
        parts.exchange.drop()
        if turn:  # the first round warms up
            found["forward"].append(forward)
            found["backward"].append(backward)
            found["step"].append([taken])
    return found


def _nothing() -> object:
    from shoal.exchange.base import Tally

    return Tally(0.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedule", nargs="*", default=["1f1b", "gpipe", "zerobubble", "interleaved"])
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", default="20M")
    args = parser.parse_args()
    missed = 0
    print(
        f"{args.size} parameters, {args.stages} workers, {args.batch} sequences in {args.microbatches} micro-batches"
    )
    print("schedule     stages' times, forward+backward ms    formula ms   step ms   ratio   idle by formula")
    for name in args.schedule:
        strategy = f"ddp * pp{args.stages}({name}, microbatches={args.microbatches})"
        answers = spawn(contest, args.stages, strategy, args.size, args.batch, args.rounds, timeout=1800)
        schedule = pipeline.TABLE.look_up(name)
        costs = []
        for stage in range(args.stages * schedule.stages_per_rank):
            owner = answers[schedule.rank_of(stage, args.stages)]
            slot = stage // args.stages
            forward = statistics.median(row[slot] for row in owner["forward"])
            backward = statistics.median(row[slot] for row in owner["backward"])
            costs.append(Costs(forward, backward / 2, backward / 2))
        expected = simulate(schedule, args.stages, args.microbatches, costs)
        taken = statistics.median(row[0] for row in answers[0]["step"])
        ratio = taken / expected.makespan
        shown = "  ".join(f"{c.forward * 1e3:.0f}+{c.backward * 1e3:.0f}" for c in costs)
        goal = name == "1f1b"
        missed += goal and ratio > GOAL
        verdict = ("ok" if ratio <= GOAL else f"above the goal of {GOAL}") if goal else ""
        print(
            f"{name:<12} {shown:<38} {expected.makespan * 1e3:>9.1f} {taken * 1e3:>9.1f} {ratio:>7.3f} "
            f"{expected.idle:>8.1%}  {verdict}",
            flush=True,
        )
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
