"""What a step does to a card, found without one: where tensors are made, what the host waits for, what is copied."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from pretend_cards import Seen, Unnamed, as_on_cards, pretended

import shoal
from shoal.compress import TABLE as COMPRESSORS
from shoal.errors import ConfigError
from shoal.exchange import TABLE as EXCHANGES
from shoal.plan.check import check_device, check_text
from shoal.testing.parity import take_step, toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.world.devices import ON_CARDS, small_backend, whole_backend
from shoal.world.world import World

SOURCE = Path(shoal.__file__).parent
PAGE = (SOURCE.parents[1] / "docs" / "concepts" / "cards.md").read_text()

PIPELINE = "pp2(1f1b, microbatches=2, split=blocks.2)"
CELLS = [
    *(
        (name, "odd")
        for name in ("zero1(bucket_mb=0.002)", "zero2", "local(2)", "diloco(2)", "ps(servers=1)")
    ),
    *((f"ddp + {name}", "odd") for name in COMPRESSORS if name not in ("none", "auto", "powersgd")),
    ("ddp + powersgd(1)", "odd"),
    ("zero1 + sign", "odd"),
    ("ddp", "accumulated"),
    ("ddp", "frozen"),
    ("ddp * tp2", "stack"),
    (f"ddp * {PIPELINE}", "stack"),
]
"""With clipping and without, one micro-batch and three. Not zero3: FSDP2 asks torch for the streams of a device."""

WAITS = {
    "train/passes.py _accumulate": 1,
    "train/pipelined.py run": 1,
    "exchange/buckets/norms.py squares_of": 1,
    "exchange/ps_worker/push.py fill": 1,
}
"""Where the host may wait for a card, and how often in a step, for each bucket of these toys. The page says why."""
ALSO = ("train/pipelined.py _sum_ties",)
"""Moving a model to `meta` unties its weights, so that nobody comes by here."""
MOVES = {"data/batch.py convert", "compress/randomk.py turn_to", "world/shm/memory.py put"}
"""What may be copied from the host to a card."""
STEPS = 2


def watch(world: World) -> dict[tuple[str, str], tuple[Seen, Seen]]:
    """For each cell, what was seen while it was set up, and in later steps."""
    world = as_on_cards(world)
    found = {}
    for strategy, toy in CELLS:
        first, later = Seen(), Seen()
        with pretended(first):
            parts = toy_parts(world, TOYS[toy], strategy, precision="fp32")
            for step in range(2):
                take_step(parts, step)
        with pretended(later):
            for step in range(2, 2 + STEPS):
                take_step(parts, step)
        parts.exchange.close()
        found[strategy, toy] = first, later
    return found


@cache
def seen() -> list[dict[tuple[str, str], tuple[Seen, Seen]]]:
    return spawn(watch, 2, timeout=120)


def test_every_tensor_names_its_device() -> None:
    for mine in seen():
        for cell, (first, later) in mine.items():
            assert not first.unnamed + later.unnamed, cell


def test_the_host_waits_for_a_card_where_it_must_and_nowhere_else() -> None:
    met: Counter[str] = Counter()
    for mine in seen():
        for cell, (_, later) in mine.items():
            waits = {place: n for place, n in later.waits.items() if not place.startswith("testing/")}
            assert all(n <= STEPS * WAITS.get(place, 0) for place, n in waits.items()), f"{cell}: {waits}"
            assert set(later.moves) <= MOVES, f"{cell}: {later.moves}"
            met.update(waits)
    assert set(met) == set(WAITS), "a place that waits no more: take it off the list"


def test_a_loss_is_fetched_once_a_step() -> None:
    for mine in seen():
        for cell in (("ddp", "accumulated"), ("ddp", "frozen")):
            assert mine[cell][1].waits["train/passes.py _accumulate"] == STEPS
        assert set(mine["ddp", "frozen"][1].waits) - {"testing/toys.py classify"} == {
            "train/passes.py _accumulate"
        }


def test_collectives_of_cards_go_through_the_backend_of_cards() -> None:
    reached = {
        name.partition(": ")[2]
        for mine in seen()
        for two in mine.values()
        for s in two
        for name in s.collectives
    }
    assert reached >= {
        "allreduce_",
        "_allgather_base_",
        "_reduce_scatter_base_",
        "alltoall_base_",
        "send",
        "recv_",
    }


def test_groups_of_cards_also_agree_from_host_memory() -> None:
    card = torch.device("cuda", 0)
    assert whole_backend("auto", card) == whole_backend("nccl", card) == small_backend(card) == ON_CARDS
    assert {part.split(":")[0] for part in ON_CARDS.split(",")} == {"cpu", "cuda"}
    for name in ("shoal", "gloo"):
        with pytest.raises(
            ConfigError, match=f"backend '{name}' is for memory of the host, and this run is on cards"
        ):
            whole_backend(name, card)


@pytest.mark.parametrize("name", EXCHANGES)
def test_what_lies_in_shared_memory_is_refused_on_cards(name: str) -> None:
    plan = check_text(f"{name}(2)" if EXCHANGES[name].updates_alone else name, 1)
    check_device(plan, "cpu")
    if not EXCHANGES[name].in_host_memory:
        check_device(plan, "cuda")
        return
    with pytest.raises(
        ConfigError, match=f"{name} keeps the model in host memory; on cards use ddp, zero1 or zero2"
    ):
        check_device(plan, "cuda")


def on_cpus(world: World) -> Counter[str]:
    """Strategies that no card can be imagined for."""
    found = Seen()
    for strategy in ("zero3", "shared", f"zero3 * {PIPELINE}", "zero3 * tp2"):
        parts = toy_parts(world, TOYS["stack"], strategy)
        for step in range(2):
            take_step(parts, step)
        with Unnamed(found):
            for step in range(2, 4):
                take_step(parts, step)
        parts.exchange.close()
    return found.unnamed


def test_every_tensor_of_a_step_names_its_device_where_cards_cannot_be_imagined() -> None:
    for found in spawn(on_cpus, 2):
        assert not found


MAKERS = {"zeros", "ones", "empty", "full", "tensor", "arange", "rand", "randn", "randint", "linspace", "eye"}
WORKERS_CODE = ("compress", "data", "exchange", "pipeline", "tensor", "train", "world", "embedding.py")
"""What runs in workers, whose default device may be a card: servers and checkpoints are the host's."""


def test_the_source_names_devices_too() -> None:
    """Also where no toy comes by."""
    for file in sorted(SOURCE.rglob("*.py")):
        place = file.relative_to(SOURCE)
        if place.parts[0] not in WORKERS_CODE:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in MAKERS
                and ast.unparse(node.func.value) == "torch"
            ):
                named = {keyword.arg for keyword in node.keywords}
                like = ast.unparse(node).startswith("torch.tensor(counts, dtype=parts[0]")
                assert "device" in named or like, (
                    f"{place}:{node.lineno} makes a tensor without naming a device"
                )


def test_the_page_names_every_wait_and_every_file_that_knows_of_cuda() -> None:
    for place in [*WAITS, *MOVES, *ALSO]:
        file, function = place.split()
        assert f"`{function}`" in PAGE, f"docs/concepts/cards.md does not explain {place}"
        assert f"src/shoal/{file})" in PAGE, f"docs/concepts/cards.md does not link {place}"
    never = PAGE.partition("## What has never run on a card")[2]
    listed = set(re.findall(r"\]\(\.\./\.\./src/shoal/([\w/]+\.py)\)", never))
    known = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if file.relative_to(SOURCE).parts[0] not in ("cli", "selftest", "testing") and asks_for_cuda(file)
    }
    assert known <= listed, f"files with code for CUDA that the page does not list: {sorted(known - listed)}"


def asks_for_cuda(file: Path) -> bool:
    """Whether code, and not only a comment or a docstring, names CUDA."""
    tree = ast.parse(file.read_text())
    attributes = (n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute))
    constants = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))
    return "cuda" in attributes or any(text == "cuda" or ":nccl" in text for text in constants)
