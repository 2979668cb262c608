"""Every choice of every slot says what it costs, and is held to what real workers hold and send.

Bytes sent are those of a step's report, exactly. A pipeline's messages and the sums of tensor parallel are not in the
report: they are counted where torch sends them. Bytes held are those of all tensors that are alive when the update of
a step begins, by kind, to 5 %. Working memory that is gone by then is measured at its peak.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import compress, exchange, pipeline
from shoal.cost import Cost
from shoal.errors import ConfigError
from shoal.exchange.contract import Exchange
from shoal.exchange.local_tensor import local
from shoal.exchange.shared import Shared
from shoal.plan.check import check_text
from shoal.tensor import moves
from shoal.testing.parity import take_step, toy_order
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.testing.toys import adamw, classify
from shoal.train.build import build
from shoal.train.profile_run import cost_of
from shoal.train.run_config import RunConfig
from shoal.train.step_context import StepContext
from shoal.world.shm.collectives import Staging
from shoal.world.traffic import ring_bytes, share_of
from shoal.world.world import World

WITHIN = 0.05
FRAMES = 4096
"""Bytes of all that a worker asks of servers in a step, besides gradients: these vary with the numbers in them."""
STEPS = 4
WIDTH = 320
LENGTH = 16
"""Positions of a sample: enough that activations weigh something."""


class Block(nn.Module):
    """A pair of projections, which tensor parallel cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Deep(nn.Module):
    """About 7 MB in 4 blocks: with sizes that nothing divides, a number alone, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, 301)
        self.last = nn.Linear(301, 3)
        self.frozen.requires_grad_(False)
        self.mask = nn.Buffer(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.scale * self.first(x)) * self.mask
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.last(torch.tanh(self.frozen(self.norm(x))).flatten(0, 1))
        return out


def config(strategy: str, **changes: Any) -> RunConfig:
    generator = torch.Generator().manual_seed(5)
    data = TensorDataset(
        torch.randn(48, LENGTH, 5, generator=generator),
        torch.randint(0, 3, (48, LENGTH), generator=generator),
    )
    order = RunConfig(
        model=Deep,
        loss=classify,
        optimizer=adamw,
        data=data,  # type: ignore[arg-type]
        global_batch=24,
        strategy=strategy,
        clip=0.5,
        seed=3,
    )
    return replace(order, **changes)


@dataclass(frozen=True)
class Found:
    """One worker under one strategy."""

    said: Cost
    sent: list[int]
    """Bytes by the report of each step."""
    messages: int
    """Bytes of the last step that are in no report."""
    held: dict[str, int]


def measure(world: World, strategy: str, changes: dict[str, Any], steps: int = STEPS) -> Found:
    order = config(strategy, **changes)
    said = cost_of(order, world.size, world.rank, world.hosts)
    gc.collect()
    there = tensors()  # kept, so that nothing new can be where something old was
    before = set(storages(there))
    context = build(order, world, record="")[1]
    try:
        sent = [take_step(context, number).bytes_sent for number in range(steps - 1)]
        with watched(context, before) as held, counted(context) as messages:
            sent.append(take_step(context, steps - 1).bytes_sent)
        return Found(said, sent, sum(messages), held)
    finally:
        world.barrier()
        context.exchange.close()


def leave_out_what_is_here() -> None:
    """It belongs to no cell, and to look at it again in each would take most of the time."""
    gc.collect()
    gc.freeze()


def tensors() -> list[torch.Tensor]:
    """All that are alive."""
    # isinstance would wake up what only pretends to be a tensor.
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [local(t) for t in found if not t.is_meta]


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The memory under tensors: its address and bytes."""
    kept = [local(t).untyped_storage() for t in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in kept if storage.nbytes()}


@contextmanager
def watched(context: StepContext, before: set[int]) -> Iterator[dict[str, int]]:
    """What a worker holds when the update begins, and at its peak what it lets go of before or after."""
    found: dict[str, int] = {}
    made, peaks = context.exchange, [0]
    apply = made.apply

    def looking(factor: float, clamp: float | None) -> None:
        gc.collect()
        found.update(by_kind(context, before))
        apply(factor, clamp)

    hooks = [
        module.register_forward_hook(lambda *_: peaks.append(passing(made)))
        for module in context.model.modules()
    ]
    waiting = [0]
    with mock.patch.object(made, "apply", looking), meetings(made, peaks), stashes(context, waiting):
        yield found
    for hook in hooks:
        hook.remove()
    found["working"] += max(peaks)
    found["activations"] = max(waiting)


def by_kind(context: StepContext, before: set[int]) -> dict[str, int]:
    made = context.exchange
    kinds = {
        "parameters": storages(context.model.parameters()),
        "buffers": storages(context.model.buffers()),
        "gradients": storages(gradients(made)),
        "optimizer": storages(
            t for s in made.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
        ),
        "residuals": storages(residuals(made)),
        "outer": storages([*getattr(made, "_anchors", ()), *getattr(made, "_momenta", ())]),
    }
    known = {address for kind in kinds.values() for address in kind} | before | set(storages(staging()))
    rest = sum(
        nbytes
        for address, nbytes in storages(tensors()).items()
        if address not in known and not is_mapped(address)
    )
    held = {kind: sum(found.values()) for kind, found in kinds.items()}
    if isinstance(made, Shared):  # a host has one copy of them
        held["parameters"] -= sum(v.nbytes for v in made.vectors) * (made.owners.size - 1) // made.owners.size
    return {**held, "working": rest + sum(storages(payloads(made)).values())}


def is_mapped(address: int) -> bool:
    """Memory that processes share: others' vectors, and where groups pass data on, are not this worker's."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, _, high = line.split()[0].partition("-")
            if int(low, 16) <= address < int(high, 16):
                return "memfd:" in line
    return False


def staging() -> list[torch.Tensor]:
    """What process groups keep for themselves."""
    groups = [thing for thing in gc.get_objects() if type(thing) is Staging]
    return [value for group in groups for value in vars(group).values() if isinstance(value, torch.Tensor)]


def payloads(made: Exchange) -> list[torch.Tensor]:
    """What ps sends compressed lies in memory that servers share."""
    codings = getattr(made.__dict__.get("_outgoing"), "_encodings", {})
    return [coding.payload for coding in codings.values()]


def gradients(made: Exchange) -> list[torch.Tensor]:
    vectors = made.__dict__.get("_gradients", {})
    found = list(vectors.values() if isinstance(vectors, dict) else vectors)
    sums = made.__dict__.get("_sums")
    found += getattr(sums, "_sums", [])
    found += [p.grad for p in made.module.parameters() if p.grad is not None]
    return found


def residuals(made: Exchange) -> list[torch.Tensor]:
    reducers = [
        r for r in (made.__dict__.get("reducer"), made.__dict__.get("_sums")) if hasattr(r, "residuals")
    ]
    found = [left.tensor for reducer in reducers for left in reducer.residuals()]
    codings = getattr(made.__dict__.get("_outgoing"), "_encodings", {})
    return found + [c._feedback.residual for c in codings.values() if c._feedback is not None]


def passing(made: Exchange) -> int:
    """Parameters that are gathered at this moment, or on their way."""
    units = getattr(made, "_units", ())
    found = [t for unit in units for cell in unit.cells for t in cell.all_gather_outputs]
    coming = [group._all_gather_result for unit in units for group in unit.groups]
    found += [result.all_gather_output for result in coming if result is not None]
    return sum(storages(found).values())


@contextmanager
def meetings(made: Exchange, peaks: list[int]) -> Iterator[None]:
    """Outer gradients, when they have come."""
    take_in = getattr(made, "_take_in", None)
    if take_in is None:
        yield
        return

    def looking(fragment: Any, late: bool) -> None:
        peaks.append(sum(gradient.nbytes for _, gradient, _ in fragment.sums))
        take_in(fragment, late)

    with mock.patch.object(made, "_take_in", looking):
        yield


@contextmanager
def counted(context: StepContext) -> Iterator[list[int]]:
    """Bytes of messages between stages, and of sums and gathers between tensor ranks."""
    found: list[int] = []
    total, gathered, reduced = moves.total, moves.gathered, moves.reduced

    def noting(operations: Callable[[int], Any], micro: int) -> Any:
        made = operations(micro)
        found.extend(one.tensor.nbytes for one in made)
        return made

    def totalling(x: torch.Tensor, ring: moves.Ring) -> torch.Tensor:
        found.append(ring_bytes(x.nbytes, ring.degree))
        return total(x, ring)

    def gathering(x: torch.Tensor, ring: moves.Ring, dim: int, sizes: list[int]) -> torch.Tensor:
        padded = x.nbytes // x.shape[dim] * max(sizes)
        found.append(share_of(padded * ring.degree, ring.degree))
        return gathered(x, ring, dim, sizes)

    def reducing(x: torch.Tensor, ring: moves.Ring, dim: int) -> torch.Tensor:
        found.append(share_of(x.nbytes, ring.degree))
        return reduced(x, ring, dim)

    with ExitStack() as patches:
        for stage in stages_of(context):
            for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
                patches.enter_context(mock.patch.object(stage, name, partial(noting, getattr(stage, name))))
        for name, instead in (("total", totalling), ("gathered", gathering), ("reduced", reducing)):
            patches.enter_context(mock.patch.object(moves, name, instead))
        yield found


def stages_of(context: StepContext) -> list[Any]:
    """Torch's own stages."""
    return [] if context.pipeline is None else context.pipeline._stages


@contextmanager
def stashes(context: StepContext, peaks: list[int]) -> Iterator[None]:
    """Outputs of stages that wait for their backward pass, after each forward pass."""
    stages = stages_of(context)

    def looking(run: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = run(*args, **named)
        waiting = [cached[0] for stage in stages for cached in stage.fwd_cache.values()]
        waiting += [state[2] for stage in stages for state in stage.backward_state.values()]
        peaks.append(sum(storages(t for outputs in waiting for t in outputs).values()))
        return result

    with ExitStack() as patches:
        for stage in stages:
            run = partial(looking, stage.forward_one_chunk)
            patches.enter_context(mock.patch.object(stage, "forward_one_chunk", run))
        yield


# What is run. One test starts the workers of its size, for all cells.

BUCKETED = ("ddp", "zero1", "zero2", "shared")
WRITTEN = {"local": "local(2)", "diloco": "diloco(2, fragments=2)"}
WRITTEN |= {name: f"{name}(bucket_mb=1)" for name in BUCKETED}
EXCHANGES = [WRITTEN.get(name, name) for name in exchange.TABLE if name != "solo"]
WAYS: list[dict[str, Any]] = [{}, {"accumulate": 2}, {"accumulate": 2, "deterministic": True}]
COMPRESSING = [WRITTEN.get(name, name) for name, kind in exchange.TABLE.items() if kind.compresses]
COMPRESSORS = [name for name in compress.TABLE if name != "auto"]
SPLITS = {1: "blocks.2", 2: "blocks.1/blocks.2/blocks.3"}
SCHEDULES = {
    name: f"pp2({name}, microbatches=3, split={SPLITS[kind.stages_per_rank]})"
    for name, kind in pipeline.TABLE.items()
}
Cell = tuple[int, str, int]
"""Workers, a strategy, and one of WAYS."""


def cells() -> Iterator[tuple[Cell, bool]]:
    """Every cell, and whether it is run by default: each choice with 2 and 3 workers, not each with each."""
    for at, name in enumerate(EXCHANGES):
        for way in range(len(WAYS)):
            yield from (((n, name, way), way == (at + n) % len(WAYS)) for n in (2, 3))
    for at, name in enumerate(COMPRESSING):
        for number, compressor in enumerate(COMPRESSORS):
            strategy = f"{name} + {compressor}"
            if not refused(strategy, 2):
                for n in (2, 3):
                    yield (n, strategy, 0), (at + number) % len(COMPRESSING) == n
    for at, name in enumerate(EXCHANGES):
        hybrids = [*SCHEDULES.values(), "tp2", f"tp2 * {SCHEDULES['1f1b']}"]
        for number, hybrid in enumerate(hybrids):
            strategy = f"{name} * {hybrid}"
            if not refused(strategy, 4):
                yield (4, strategy, 0), (at + number) % len(EXCHANGES) in (0, 4)
    yield from (
        ((4, f"zero3({options})", 0), False) for options in ("replicas=2", "replicas=4", "reshard=false")
    )


def refused(strategy: str, workers: int) -> bool:
    try:
        check_text(strategy, workers)
    except ConfigError:
        return True
    return False


def measure_all(world: World, asked: list[Cell]) -> dict[Cell, Found]:
    leave_out_what_is_here()
    return {cell: measure(world, cell[1], WAYS[cell[2]]) for cell in asked}


@cache
def results(workers: int, everything: bool) -> list[dict[Cell, Found]]:
    asked = [cell for cell, default in cells() if cell[0] == workers and (default or everything)]
    return spawn(measure_all, workers, asked, timeout=900 if everything else 100)


def marked() -> list[Any]:
    return [cell if default else pytest.param(*cell, marks=pytest.mark.all_only) for cell, default in cells()]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("workers", "strategy", "way"), marked())
def test_a_worker_holds_and_sends_what_was_said(
    workers: int, strategy: str, way: int, everything: bool
) -> None:
    for rank, found in enumerate(results(workers, everything)):
        check_sent(found[workers, strategy, way], strategy)
        servers_are_here = strategy.startswith("ps") and rank == 0
        check_held(found[workers, strategy, way], leave_out="working" if servers_are_here else "")


def check_sent(found: Found, strategy: str) -> None:
    every = 2 if strategy.startswith(("local", "diloco")) else 1
    sent, said = sum(found.sent[-every:]) + every * found.messages, every * found.said.sent
    if "server" in found.said.wire:
        assert said < sent < said + FRAMES
    else:
        assert said == sent


def check_held(found: Found, leave_out: str = "") -> None:
    for kind in {*found.said.resident, *found.held} - {leave_out}:
        said, held = found.said.resident.get(kind, 0), found.held.get(kind, 0)
        small = 0.01 * found.said.total  # batches, losses and counts, which are of no kind
        assert abs(said - held) <= max(WITHIN * held, small), f"{kind}: said {said}, held {held}"


def test_one_process() -> None:
    found = measure(World.alone(), "solo", {})
    assert found.said.sent == 0
    check_held(found)


def test_every_choice_is_among_the_cells() -> None:
    run = [strategy for (_, strategy, _), default in cells() if default]
    names = [*exchange.TABLE, *pipeline.TABLE, *COMPRESSORS, "tp2"]
    assert [name for name in names if not any(name in strategy for strategy in run)] == ["solo"]


def send_auto(world: World) -> list[int]:
    return measure(world, "ddp + auto", {}, steps=16).sent


def test_auto_sends_what_it_has_chosen() -> None:
    """Which of the two it is, the first steps decide: its cost is that of the compressor."""
    said = {text: cost_of(config(text), 2) for text in ("ddp", "ddp + int8", "ddp + auto")}
    assert said["ddp + auto"] == said["ddp + int8"]
    for sent in spawn(send_auto, 2):
        assert sent[-1] in (said["ddp"].sent, said["ddp + int8"].sent)


HOSTS = ["a", "a", "b", "b"]
ACROSS = ("ddp", "shared", "zero1", "ddp + int8", "zero1 + sign", "ddp + powersgd", "zero2 + powersgd")


def measure_across(world: World) -> list[Found]:
    leave_out_what_is_here()
    return [measure(world, strategy, {}) for strategy in ACROSS]


def test_several_hosts() -> None:
    for mine in spawn(measure_across, 4, hosts=HOSTS):
        for strategy, found in zip(ACROSS, mine, strict=True):
            check_sent(found, strategy)


# Toys, chosen to hurt: sums that a large and regular model does not have.

TIED = "pp2(1f1b, microbatches=3, split=blocks.2)"
TOY_CELLS = [
    ("stack", f"ddp * {TIED}"),
    ("stack", f"zero3 * {TIED}"),
    ("stack", "ddp * pp2(interleaved, microbatches=3, split=blocks.1/blocks.2/blocks.3)"),
    ("stack", "ddp * tp2"),
    ("stack", "ddp * tp2(sequence=true)"),
    ("stack", f"zero1 * tp2 * {TIED}"),
    ("accumulated", "zero2(bucket_mb=0.002)"),
    ("odd", "zero3"),
    ("frozen", "zero1"),
    ("tied", "diloco(2, fragments=2, delay=0)"),
]


def send_toys(world: World) -> list[tuple[float, float]]:
    found = []
    for toy, strategy in TOY_CELLS:
        order = toy_order(TOYS[toy], strategy)
        said = cost_of(order, world.size, world.rank)
        context = build(order, world, record="")[1]
        sent = [take_step(context, number).bytes_sent for number in range(3)]
        with counted(context) as messages:
            sent.append(take_step(context, 3).bytes_sent)
        every = 2 if "diloco" in strategy else 1
        found.append((every * said.sent, sum(sent[-every:]) + every * sum(messages)))
        context.exchange.close()
    return found


def test_toys() -> None:
    for mine in spawn(send_toys, 4):
        for cell, (said, sent) in zip(TOY_CELLS, mine, strict=True):
            assert said == sent, cell
