"""Sums of compressed buckets: on one host and between hosts, whole and in slices; only what is declared is lost."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from shoal import compress
from shoal.config import parse_choice
from shoal.exchange.reduce.autotune import AutoTune
from shoal.exchange.reduce.compressed import Compressed
from shoal.exchange.reduce.reducer import Plain
from shoal.testing.parity import take_step
from shoal.testing.spawn import spawn
from shoal.testing.toys import Odd, adamw
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.technique.precision import LossScale
from shoal.types import StepReport
from shoal.world.buckets import Bucket, lay_out
from shoal.world.world import Handle, World

CALLS = [
    "fp16",
    "bf16",
    "int8",
    "int4",
    "int8(feedback=true)",
    "sign",
    "topk(0.1)",
    "randomk(0.2)",
    "powersgd(2)",
]
LOSSY = {"fp16": 2e-3, "bf16": 2e-2, "int8": 2e-2, "int4": 0.5}
"""Without feedback: how far a sum may be off, relative to its largest element."""
TURNS = 4
SHAPES = {"w": torch.Size((40, 31)), "b": torch.Size((31,)), "v": torch.Size((17, 3, 5))}

Found = dict[str, list[torch.Tensor]]


def make_bucket(workers: int) -> Bucket:
    return lay_out([(n, s.numel(), torch.float64) for n, s in SHAPES.items()], workers, 2**20)[0]


def gradient(bucket: Bucket, rank: int, turn: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(100 * turn + rank)
    vector = torch.zeros(bucket.size, dtype=bucket.dtype)
    for place in bucket.places:
        vector[place.start : place.start + place.numel] = torch.randn(
            place.numel, generator=drawn, dtype=bucket.dtype
        )
    return vector


def add_up(world: World, call: str, scattered: bool) -> Found:
    """The sums of a few turns, and what was not sent, put where it belongs."""
    bucket = make_bucket(world.size)
    reducer = Compressed(world, compress.make_compressor(parse_choice(call, "compressor")))
    reducer.lay_out([bucket], SHAPES, scattered)
    sums = []
    for turn in range(TURNS):
        vector = gradient(bucket, world.rank, turn)
        if not scattered:
            reducer.all_reduce(bucket, vector).wait()
            sums.append(vector)
            continue
        out = torch.full((bucket.size // world.size,), torch.nan, dtype=bucket.dtype)
        reducer.reduce_scatter(bucket, out, vector).wait()
        whole = torch.empty_like(vector)
        world.all_gather(whole, out).wait()
        sums.append(whole)
    left = torch.zeros(bucket.size, dtype=bucket.dtype)
    for residual in reducer.residuals():
        left[residual.start : residual.start + residual.tensor.numel()] += residual.tensor
    world.all_reduce(left).wait()
    reducer.close()
    return {"sums": sums, "left": [left]}


def add_up_all(world: World) -> dict[tuple[str, bool], Found]:
    return {
        (call, scattered): add_up(world, call, scattered) for call in CALLS for scattered in (False, True)
    }


def check(found: list[dict[tuple[str, bool], Found]]) -> None:
    workers = len(found)
    bucket = make_bucket(workers)
    wanted = [sum(gradient(bucket, rank, turn) for rank in range(workers)) for turn in range(TURNS)]
    inside = torch.zeros(bucket.size, dtype=torch.bool)
    for place in bucket.places:
        inside[place.start : place.start + place.numel] = True
    for (call, scattered), first in found[0].items():
        where = f"{call}, {'slices' if scattered else 'whole'}, {workers} workers"
        for other in found[1:]:
            for a, b in zip(first["sums"], other[call, scattered]["sums"], strict=True):
                assert torch.equal(a, b), f"{where}: workers got different sums"
        for made in first["sums"]:
            assert not made[~inside].any(), f"{where}: something between parameters"
        if call in LOSSY:
            for made, right in zip(first["sums"], wanted, strict=True):
                assert isinstance(right, torch.Tensor)
                assert (made - right).abs().max() <= LOSSY[call] * right.abs().max(), where
            continue
        given, got = torch.stack(wanted).sum(0), torch.stack(first["sums"]).sum(0)  # type: ignore[arg-type]
        assert (got - given).abs().max() > 1e-3, f"{where}: nothing was left out, so nothing was tested"
        gap = (got + first["left"][0] - given).abs().max()
        assert gap <= 2e-5 * given.abs().max(), f"{where}: {gap} was lost"


def test_of_one_host() -> None:
    check(spawn(add_up_all, 2))
    check(spawn(add_up_all, 3))


def test_between_hosts() -> None:
    check(spawn(add_up_all, 4, hosts=["a", "a", "b", "b"]))
    check(spawn(add_up_all, 4, hosts=["a", "b", "a", "b"]))


def bytes_of(world: World, call: str) -> int:
    before = world.traffic.bytes_sent
    reducer = Compressed(world, compress.make_compressor(parse_choice(call, "compressor")))
    bucket = lay_out([("w", 2**16, torch.float32)], world.size, 2**20)[0]
    reducer.lay_out([bucket], {"w": torch.Size((256, 256))}, scattered=False)
    reducer.all_reduce(bucket, torch.randn(bucket.size)).wait()
    reducer.close()
    return world.traffic.bytes_sent - before


def all_bytes(world: World) -> dict[str, int]:
    return {call: bytes_of(world, call) for call in CALLS}


def test_bytes_are_as_few_as_declared() -> None:
    """Two workers: an all-reduce of n bytes, and an all-gather of n, send n each."""
    layout = compress.base.Layout(2**16, torch.float32, torch.device("cpu"), ((0, 256, 256),))
    for call, sent in spawn(all_bytes, 2)[0].items():
        ratio = compress.make_compressor(parse_choice(call, "compressor")).reduction(layout)
        assert sent == int(layout.nbytes / ratio), f"{call}: {sent} bytes, a reduction of {ratio}"


def spoil(world: World, call: str) -> list[bool]:
    """A step with infinities is seen, dropped, and leaves nothing behind."""
    reducer = Compressed(world, compress.make_compressor(parse_choice(call, "compressor")))
    bucket = make_bucket(world.size)
    reducer.lay_out([bucket], SHAPES, scattered=False)
    finite = []
    for turn in range(3):
        vector = gradient(bucket, world.rank, turn)
        if turn == 1 and world.rank == 0:
            vector[5] = torch.inf
        reducer.all_reduce(bucket, vector).wait()
        finite.append(bool(vector.isfinite().all()))
        if not finite[-1]:
            reducer.drop()
    reducer.close()
    return finite


def spoil_all(world: World) -> dict[str, list[bool]]:
    return {call: spoil(world, call) for call in CALLS if not call.startswith("randomk")}


def test_a_spoilt_step_is_seen_and_forgotten() -> None:
    for found in spawn(spoil_all, 2):
        for call, finite in found.items():
            assert finite == [True, False, True], call


FEEDING_BACK = {f"ddp + {call}" for call in CALLS if call not in ("fp16", "bf16", "int8", "int4")} | {
    "zero1 + topk(0.1)",
    "zero2 + sign",
}
BAD = 7
"""A sample whose gradient overflows, and so on one worker only."""


def usual(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return torch.nn.functional.cross_entropy(output, batch[1], reduction="sum"), len(output)


def overflowing(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    total, count = usual(output, batch)
    return (total * 1e30 if bool((batch[2] == BAD).any()) else total), count


@dataclass(frozen=True)
class Scaled:
    """What a run in fp16 showed, step by step."""

    reports: list[StepReport]
    scales: list[float]
    """Of the loss."""
    changed: list[bool]
    kept: list[float]
    """The size of what has not been sent: the sum of its absolute values."""


def train_in_fp16(world: World, strategy: str, scale: LossScale, loss: Any = usual) -> Scaled:
    drawn = torch.Generator().manual_seed(4)
    x = torch.randn(26, 5, generator=drawn)
    order = RunConfig(
        model=Odd,
        loss=loss,
        optimizer=adamw,
        data=TensorDataset(x, (x.sum(1) > 0).long(), torch.arange(26)),  # type: ignore[arg-type]
        global_batch=6,
        strategy=strategy,
        precision="fp16",
        seed=3,
    )
    parts = build(order, world, record="")[1]
    parts.scale = scale
    found = Scaled([], [], [], [])
    try:
        for number in range(30):
            before = parts.whole.parameters()
            found.reports.append(take_step(parts, number))
            after = parts.whole.parameters()
            found.scales.append(parts.scale.value)
            found.changed.append(any(not torch.equal(after[name], before[name]) for name in before))
            left = [owned.held.tensor for owned in parts.exchange.extras(saving=False)]
            found.kept.append(sum(float(tensor.abs().sum()) for tensor in left))
        return found
    finally:
        parts.exchange.close()


def overflow_all(world: World) -> dict[str, Scaled]:
    calls = ["", *(f" + {call}" for call in CALLS if call != "fp16")]
    return {
        strategy: train_in_fp16(world, strategy, LossScale(dynamic=True, grow_after=3), overflowing)
        for strategy in [*(f"ddp{call}" for call in calls), "zero1 + topk(0.1)", "zero2 + sign"]
    }


def test_a_step_that_overflows_in_fp16_is_dropped_and_nothing_is_kept() -> None:
    ranks = spawn(overflow_all, 2)
    dropped = [report.skipped for report in ranks[0]["ddp"].reports]
    assert 5 <= sum(dropped) <= 7, "the bad sample comes once in an epoch of five steps"
    for found in ranks:
        for strategy, run in found.items():
            assert [report.skipped for report in run.reports] == dropped, strategy
            assert run.changed == [not skipped for skipped in dropped], strategy
            assert run.scales == found["ddp"].scales, strategy
            feeds_back = any(run.kept)
            assert feeds_back == (strategy in FEEDING_BACK), strategy
            for kept, skipped in zip(run.kept, dropped, strict=True):
                assert (0 < kept < math.inf) if feeds_back and not skipped else kept == 0, strategy
            good = [r.loss for r in run.reports if not r.skipped]
            assert sum(good[-4:]) < 0.7 * sum(good[:4]), f"{strategy}: training goes on"


def scale_both(world: World) -> list[tuple[Scaled, Scaled]]:
    """With a scale that grows, and with one that stays."""
    return [
        (
            train_in_fp16(world, strategy, LossScale(dynamic=True, value=16.0, grow_after=3)),
            train_in_fp16(world, strategy, LossScale(dynamic=True, value=2.0**10)),
        )
        for strategy in ("ddp + topk(0.1)", "zero1 + topk(0.1)", "ddp + int8(feedback=true)")
    ]


def test_what_is_kept_grows_with_the_scale_of_the_loss() -> None:
    """All else is proportional to the scale, so it makes no difference to what is learned."""
    for growing, staying in spawn(scale_both, 2)[0]:
        assert growing.scales[-1] == 2.0**14
        assert set(staying.scales) == {2.0**10}
        losses = [[report.loss for report in run.reports] for run in (growing, staying)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)


class Late(Plain):
    """A sum that takes its time."""

    def all_reduce(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        time.sleep(0.02)
        return super().all_reduce(bucket, vector)


def weigh(world: World, slow: bool) -> tuple[list[torch.Tensor], list[int], torch.Tensor]:
    """Steps under `auto`, where compression is slow or its absence is; sums, bytes by step, and what is left over."""
    bucket, compressor = (
        make_bucket(world.size),
        compress.make_compressor(parse_choice("topk(0.1)", "compressor")),
    )
    other = Compressed(world, compressor)
    reducer = AutoTune(world, Plain(world) if slow else Late(world), other, compressor, World.alone())
    reducer.lay_out([bucket], SHAPES, scattered=False)
    sums, sent = [], []
    for turn in range(20):
        vector, before = gradient(bucket, world.rank, turn), world.traffic.bytes_sent
        reducer.begin()
        if slow:
            time.sleep(0.02 if reducer.compresses_now else 0.0)
        reducer.all_reduce(bucket, vector).wait()
        reducer.settle()
        sums.append(vector)
        sent.append(world.traffic.bytes_sent - before)
    left = torch.zeros(bucket.size, dtype=bucket.dtype)
    for residual in reducer.residuals():
        left += residual.tensor
    world.all_reduce(left).wait()
    return sums, sent, left


@pytest.mark.parametrize("slow", [True, False])
def test_auto_keeps_the_faster_way_and_loses_nothing(slow: bool) -> None:
    found = spawn(weigh, 2, slow)
    bucket = make_bucket(2)
    given = sum(gradient(bucket, rank, turn) for rank in range(2) for turn in range(20))
    for sums, sent, left in found:
        whole, few = max(sent), min(sent)
        assert few < whole / 3
        assert sent[-5:] == [whole if slow else few] * 5, sent
        assert bool(left.any()) != slow, "given up, nothing may be left over; kept, something always is"
        torch.testing.assert_close(torch.stack(sums).sum(0) + left, given, rtol=1e-5, atol=1e-5)
