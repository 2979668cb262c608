"""What every exchange must keep, whoever adds one: tested over the table."""

from __future__ import annotations

import pytest

from shoal.config import fill_options, parse_strategy
from shoal.cost import ModelProfile, ParameterProfile, StateBytes
from shoal.exchange import TABLE
from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.testing.parity import give_parameters, take_step, toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.types import Promise
from shoal.world.mesh import Mesh
from shoal.world.world import World

NAMES = [name for name, kind in TABLE.items() if name != "solo" and kind.promise is Promise.EXACT]


FLAT = [name for name in NAMES if issubclass(TABLE[name], BucketedExchange)]


def _cut_small(name: str, megabytes: float) -> str:
    """A strategy with buckets so small that there are several of them, where there are buckets."""
    return f"{name}(bucket_mb={megabytes})" if name in FLAT else name


def hand_over(world: World) -> dict[tuple[str, str, str], float]:
    """Train 3 steps under one exchange, move the whole state into another, train 2 more; beside 5 in one go."""
    gaps = {}
    for turn, toy in enumerate(("unused", "odd", "frozen")):
        for at, first in enumerate(NAMES):
            parts = toy_parts(world, TOYS[toy], _cut_small(first, 0.002))
            for number in range(3):
                take_step(parts, number)
            held, state = parts.exchange.parameters(), parts.exchange.optimizer_state()
            for number in range(3, 5):
                take_step(parts, number)
            wanted = parts.exchange.parameters()
            for second in NAMES[(turn + at) % 3 :: 3]:  # every pair once, on one of the toys
                other = toy_parts(world, TOYS[toy], _cut_small(second, 0.004))
                give_parameters(other.exchange, held)
                world.barrier()
                other.exchange.load_optimizer_state(state)
                for number in range(3, 5):
                    take_step(other, number)
                found = other.exchange.parameters()
                gaps[toy, first, second] = max(float((found[n] - wanted[n]).abs().max()) for n in wanted)
    return gaps


def test_state_moves_between_all_exchanges() -> None:
    for gaps in spawn(hand_over, 3):
        for case, gap in gaps.items():
            assert gap < 1e-13, f"{case}: {gap:.2e}"


PROFILE = ModelProfile((ParameterProfile("weight", (1024, 1024), state=StateBytes(8), unit="block"),))
"""A million numbers in fp32 under Adam, which buckets need not pad."""


EVERY = {"local": "local(4)", "diloco": "diloco(4)"}


@pytest.mark.parametrize("name", list(TABLE))
def test_facts(name: str) -> None:
    chosen = TABLE[name]
    options = fill_options(parse_strategy(EVERY.get(name, name)).exchange, chosen.Options)
    one, four = (
        chosen.cost(options, PROFILE, Mesh.imagine(World.alone(), workers=n)).resident for n in (1, 4)
    )
    assert one["parameters"] == 4 * 2**20, "alone, a worker holds all parameters"
    if name in ("zero1", "zero2", "zero3", "shared"):
        assert four["optimizer"] == one["optimizer"] / 4, "optimizer state is cut over the workers"
    if name == "zero3":
        assert four["gradients"] == one["gradients"] / 4
    if name in ("zero3", "shared"):
        assert four["parameters"] == one["parameters"] / 4, "one copy for all of them"
    assert chosen.summary


def count_bytes(world: World, name: str) -> tuple[int, int]:
    """What a step sends by the report, and the bytes of all buckets."""
    parts = toy_parts(world, TOYS["odd"], name)
    sent = [take_step(parts, number).bytes_sent for number in range(3)][-1]
    assert isinstance(parts.exchange, BucketedExchange)
    return sent, sum(bucket.nbytes for bucket in parts.exchange.buckets)


@pytest.mark.parametrize("name", FLAT)
def test_bytes_sent_follow_the_formula(name: str) -> None:
    """Between two workers a step moves (N-1)/N of the gradient to be summed, and as much to be handed out."""
    for sent, total in spawn(count_bytes, 2, name):
        expected = total // 2 if name == "shared" else total  # shared hands out nothing: there is one copy
        # The loss, who was used, the norm, a barrier; with servers, the frames of what is said.
        assert expected <= sent <= expected + (4000 if TABLE[name].uses_servers else 400)
