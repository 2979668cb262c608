"""Sums of compressed buckets: on one host and between hosts, whole and in slices; only what is declared is lost."""

from __future__ import annotations

import time

import pytest
import torch

from shoal import compress
from shoal.config import parse_call
from shoal.exchange.compressed import Compressed
from shoal.exchange.reducer import Plain
from shoal.exchange.weighing import Weighing
from shoal.testing.spawn import spawn
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
    reducer = Compressed(world, compress.make_compressor(parse_call(call, "compressor")))
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
    reducer = Compressed(world, compress.make_compressor(parse_call(call, "compressor")))
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
        ratio = compress.make_compressor(parse_call(call, "compressor")).reduction(layout)
        assert sent == int(layout.nbytes / ratio), f"{call}: {sent} bytes, a reduction of {ratio}"


def spoil(world: World, call: str) -> list[bool]:
    """A step with infinities is seen, dropped, and leaves nothing behind."""
    reducer = Compressed(world, compress.make_compressor(parse_call(call, "compressor")))
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


class Late(Plain):
    """A sum that takes its time."""

    def all_reduce(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        time.sleep(0.02)
        return super().all_reduce(bucket, vector)


def weigh(world: World, slow: bool) -> tuple[list[torch.Tensor], list[int], torch.Tensor]:
    """Steps under `auto`, where compression is slow or its absence is; sums, bytes by step, and what is left over."""
    bucket, compressor = (
        make_bucket(world.size),
        compress.make_compressor(parse_call("topk(0.1)", "compressor")),
    )
    other = Compressed(world, compressor)
    reducer = Weighing(world, Plain(world) if slow else Late(world), other, compressor, World.alone())
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
