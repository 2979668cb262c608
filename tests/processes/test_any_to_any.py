"""A checkpoint of any strategy at any size, in any other: complete, optimizer included, bit for bit."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from shoal.checkpoint.folder import look
from shoal.checkpoint.load import Reader
from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.testing.parity import take_step, toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.state.progress import Progress
from shoal.train.step_context import StepContext
from shoal.world.world import World

FLAT = ["ddp", "zero1(bucket_mb=0.001)", "zero2(bucket_mb=0.002)", "shared(bucket_mb=0.001)", "zero3"]
STRATEGIES = {
    1: ["solo"],
    2: [*FLAT, "ddp * tp2", "zero1 * pp2(microbatches=2)"],
    3: ["zero1(bucket_mb=0.001)", "zero3"],
    4: ["zero3(replicas=2)", "zero1 * tp2", "zero3 * tp2", "shared * pp2(interleaved, microbatches=2)"],
    8: ["zero2 * tp2 * pp2(microbatches=2)", "zero3 * tp2 * pp2(microbatches=2)"],
}


def contents(parts: StepContext) -> dict[str, torch.Tensor]:
    """Everything, put together in another way than checkpoints do it: by collectives."""
    state = parts.whole.optimizer_state()
    found = {f"optimizer/{key}/{name}": v for name, entries in state.items() for key, v in entries.items()}
    return found | {f"parameter/{name}": value for name, value in parts.whole.parameters().items()}


def save(world: World, root: str) -> list[str]:
    wrong = []
    for number, strategy in enumerate(STRATEGIES[world.size]):
        parts = toy_parts(world, TABLE["stack"], strategy)
        for step in range(2 + number % 2):
            take_step(parts, step)
        name = f"{world.size}-{number}"
        Checkpoints(parts, strategy, CheckpointConfig(Path(root))).save(name, Progress(step + 1))
        reader = Reader.of(next(found for found in look(Path(root)) if found.name == name))
        wanted = contents(parts)
        if {p for p in reader.manifest.tensors if not p.startswith("buffer")} != wanted.keys():
            wrong.append(f"{strategy}: other names")
        wrong += [f"{strategy}: {p}" for p, v in wanted.items() if not same(reader.read(p), v)]
        world.barrier()
    return wrong


def load(world: World, root: str) -> list[str]:
    """Each checkpoint in turn becomes the latest; each strategy takes it over."""
    wrong = []
    readers = [Reader.of(found) for found in look(Path(root))]
    kept = [{path: reader.read(path) for path in reader.manifest.tensors} for reader in readers]
    for strategy in STRATEGIES[world.size]:
        parts = toy_parts(world, TABLE["stack"], strategy)
        checkpoints = Checkpoints(parts, strategy, CheckpointConfig(Path(root)))
        for reader, wanted in zip(readers, kept, strict=True):
            checkpoints.take_over(reader)
            world.barrier()
            found = contents(parts)
            for path, value in wanted.items():
                if not same(found.get(path), value):
                    wrong.append(f"{reader.manifest.plan} on {reader.manifest.workers} -> {strategy}: {path}")
            world.barrier()
    return wrong


def same(found: torch.Tensor | None, wanted: torch.Tensor) -> bool:
    return found is not None and found.shape == wanted.shape and torch.equal(found, wanted)


def test_any_to_any(tmp_path: Path) -> None:
    assert save(World.alone(), str(tmp_path)) == []
    for workers in (2, 3, 4, 8):
        assert spawn(save, workers, str(tmp_path))[0] == []
    assert len(look(tmp_path)) == sum(len(s) for s in STRATEGIES.values())
    assert load(World.alone(), str(tmp_path)) == []
    for workers in (2, 3, 4, 8):
        for wrong in spawn(load, workers, str(tmp_path)):
            assert wrong == []


def first_values(world: World) -> bool:
    """Worker 1 is late to give its first values; worker 0 has read others, and looks at them again later."""
    real = BucketedExchange._adopt_parameters

    def slow(self: BucketedExchange) -> None:
        time.sleep(0.3 * world.rank)
        real(self)

    BucketedExchange._adopt_parameters = slow  # type: ignore[method-assign]
    parts = toy_parts(world, TABLE["stack"], "shared")
    found = [shard.tensor for shard in parts.exchange.parameter_shards()]
    if world.rank == 0:
        for tensor in found:
            tensor.fill_(7.0)
        time.sleep(0.6)
    world.barrier()
    return all(bool((tensor == 7).all()) for tensor in found)


def test_a_slow_worker_does_not_write_over_what_was_read_from_a_checkpoint() -> None:
    assert spawn(first_values, 2) == [True, True]
