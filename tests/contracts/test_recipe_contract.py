"""Every recipe of the table: what it computes under each strategy is what one process computes, or it is refused.

In float64, on toys whose sizes nothing divides, with clipped gradients. Checkpoints hold the state of recipes: one that
is written in the middle of a schedule by any strategy goes on under any other, and under its own bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from shoal import exchange, recipe
from shoal.checkpoint.convert.export import export_file
from shoal.checkpoint.layout.tensor_stream import Leaf
from shoal.config import parse_strategy
from shoal.data.source import Source
from shoal.errors import ConfigError, PeerLost, TornStep
from shoal.exchange.contract import Tally
from shoal.recipe.contract import REASONS, refusal
from shoal.recipe.ewc import Ewc
from shoal.recipe.prune import Pruning
from shoal.recipe.teacher.distil import Distil
from shoal.testing.parity import ParityTrace, largest_difference, take_step, toy_order, trace_run
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.build import build
from shoal.train.run_config import RunConfig
from shoal.train.state.checkpoints import CheckpointConfig, Checkpoints
from shoal.train.state.progress import Progress
from shoal.train.step_context import StepContext
from shoal.types import Promise
from shoal.world.world import World


def old_data(toy: str) -> Source:
    data: Any = TOYS[toy].data()
    return TensorDataset(*(tensor.flip(0) for tensor in data.tensors))


STEPS = 6
HALF = 3


def make_teacher() -> torch.nn.Module:
    """Of the shape of the toy, with other weights."""
    return torch.nn.Sequential(TOYS["odd"].model(), torch.nn.Tanh())


RECIPES: dict[str, object] = {
    "prune": "prune(0.6, begin=2, end=5, every=1)",
    "prune of layers by movement": "prune(0.5, end=4, every=2, kind=movement, scope=layer)",
    "prune at random": "prune(0.7, begin=2, kind=random)",
    "prune two of four": "prune(0.5, begin=3, pattern='2:4')",
    "prune blocks": "prune(0.5, begin=1, end=4, every=1, pattern=block, block=3)",
    "freeze": "freeze('*.weight', until=3)",
    "freeze for good": "freeze('*bias') & prune(0.3, begin=4)",
    "rate": "rate('*.weight', 0.25)",
    "layer_decay": "layer_decay(0.5) & ema(0.5)",
    "layer_decay of halves": "layer_decay(0.5)",
    "ema": "ema(0.9)",
    "swa": "swa(start=2) & prune(0.5, begin=3)",
    "start": "start('{root}/old.safetensors', drop='old.') & freeze(first, until=2)",
    "lora": "lora(3, alpha=6, train=last)",
    "lora of a transformer": "lora(2, targets='*linear1', train='*norm*')",
    "ewc": [Ewc(50.0, data=old_data("odd"), samples=7)],
    "distil": Distil(make_teacher, alpha=0.7, temperature=3.0, ignore=-1),
    "lwf": "lwf(0.3, ignore=-1)",
    "qat": "qat(int8, begin=1)",
    "qat of weights": "qat(int4, activations=false)",
    "replay": "replay(0.3, old=9)",
}
"""The first word is the recipe in question."""
STATEFUL = "prune(0.5, begin=2, end=5, every=1, kind=movement) & freeze('*bias', until=4) & ema(0.9)"
STRATEGIES = {
    2: [
        "ddp",
        "zero1(bucket_mb=0.002)",
        "zero2",
        "zero3",
        "shared",
        "ddp * tp2",
        "ddp * pp2(microbatches=2)",
    ],
    4: ["zero1 * tp2", "zero3 * pp2(microbatches=2)", "zero3(replicas=2)", "shared * tp2"],
}
SERVERS = "ps(servers=1)"
WHERE = {
    "uses_servers": "ps",
    "updates_alone": "local(4)",
    "cuts_parameters": "zero3",
    "compresses": "ddp + int8",
}
WHERE |= {"tensor": "ddp * tp2", "pipeline": "ddp * pp2"}


def config_of(toy: str, strategy: str, recipes: object) -> RunConfig:
    return replace(toy_order(TOYS[toy], strategy), recipes=recipes, clip=0.3)  # type: ignore[arg-type]


def toy_for(title: str) -> str:
    return "stack" if "four" in title or "transformer" in title else "odd"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With weights to start from."""
    found = tmp_path_factory.mktemp("recipes")
    generator = torch.Generator().manual_seed(7)
    named = TOYS["odd"].model().state_dict()
    weights = {
        f"old.{n}": torch.randn(t.shape, generator=generator) for n, t in named.items() if "last" not in n
    }
    export_file({name: Leaf.of(tensor) for name, tensor in weights.items()}, found / "old.safetensors")
    return str(found)


def asked(title: str, root: str) -> object:
    found = RECIPES[title]
    return found.replace("{root}", root) if isinstance(found, str) else found


@cache
def alone(title: str, root: str) -> ParityTrace:
    return trace_run(World.alone(), config_of(toy_for(title), "solo", asked(title, root)), STEPS)


def traces(
    world: World, strategies: list[str], titles: list[str], root: str
) -> dict[tuple[str, str], ParityTrace]:
    return {
        (strategy, title): trace_run(world, config_of(toy_for(title), strategy, asked(title, root)), STEPS)
        for title in titles
        for strategy in strategies
    }


def compare(strategies: list[str], titles: list[str], workers: int, root: str) -> None:
    for rank, found in enumerate(spawn(traces, workers, strategies, titles, root, timeout=300)):
        for (strategy, title), trace in found.items():
            if rank and strategy == SERVERS and not trace.losses:
                continue  # a worker that was late for every part
            wanted = alone(title, root)
            gap, where = largest_difference(wanted, trace)
            assert gap < 1e-10, f"{title} under {strategy}, rank {rank}: {gap:.2e} at {where}"
            for name, value in wanted.parameters.items():
                same = torch.equal(value == 0, trace.parameters[name] == 0)
                assert same, f"{title} under {strategy}: other entries of {name} are zero"


def test_every_recipe_is_tried() -> None:
    assert {name.split()[0] for name in RECIPES} == set(recipe.TABLE), "give RECIPES one that uses it"
    for name, kind in recipe.TABLE.items():
        assert isinstance(kind.promise, Promise)
        assert set(kind.refuses) <= set(REASONS), name


def test_recipes_do_something(root: str) -> None:
    """Or parity would prove nothing."""
    plain = trace_run(World.alone(), config_of("odd", "solo", ""), STEPS)
    for title in RECIPES:
        if toy_for(title) == "odd" and title != "ema":
            found = alone(title, root)
            known = {name: value for name, value in plain.parameters.items() if name in found.parameters}
            assert largest_difference(ParityTrace(plain.losses, known), found)[0] > 1e-4, title
    zeros = sum(int((value == 0).sum()) for value in alone("prune", root).parameters.values())
    sizes = sum(value.numel() for value in plain.parameters.values() if value.dim() > 1)
    assert zeros == int(0.6 * sizes)
    for value in alone("prune two of four", root).parameters.values():
        if value.dim() > 1 and value.shape[-1] % 4 == 0:
            assert (value.view(-1, 4) == 0).sum(1).min() >= 2


ONE_OF_EACH = [
    "prune of layers by movement",
    "prune blocks",
    "layer_decay",
    "start",
    "lora",
    "ewc",
    "distil",
    "lwf",
    "qat",
    "replay",
]


def test_two_workers_compute_what_one_does(root: str) -> None:
    compare(STRATEGIES[2], ["prune", "freeze"], 2, root)
    compare(["zero3"], ONE_OF_EACH, 2, root)  # all strategies meet all recipes with --all


def test_servers_follow_what_acts_on_workers_alone(root: str) -> None:
    compare([SERVERS], ["freeze", "rate", "layer_decay of halves", "start", "lora", "ewc"], 2, root)


@pytest.mark.all_only
@pytest.mark.parametrize("workers", [2, 4])
def test_every_recipe_under_every_strategy(workers: int, root: str) -> None:
    rounded = [title for title in RECIPES if title.startswith("qat")]
    compare(STRATEGIES[workers], [title for title in RECIPES if title not in rounded], workers, root)
    compare([s for s in STRATEGIES[workers] if "tp" not in s], rounded, workers, root)


@pytest.mark.parametrize("name", recipe.TABLE)
def test_what_a_recipe_cannot_do_is_refused_before_anything_starts(name: str) -> None:
    asked = next(given for title, given in RECIPES.items() if title.split()[0] == name)
    one = next(r for r in recipe.make_recipes(asked) if recipe.name_of(r) == name)
    for reason, strategy in WHERE.items():
        plan = parse_strategy(strategy)
        said = refusal(one, name, plan, exchange.TABLE.look_up(plan.exchange.name))
        assert bool(said) == (reason in one.refuses), f"{name} under {strategy}"
        if said and plan.tensor is None:  # one process alone is refused tp2 before anybody looks at recipes
            with pytest.raises(ConfigError, match="recipes="):
                build(config_of("odd", strategy, asked), World.alone(), "")


# State


def parts_of(world: World, strategy: str) -> StepContext:
    return build(config_of("odd", strategy, STATEFUL), world, "")[1]


def contents(parts: StepContext) -> dict[str, torch.Tensor]:
    found = {f"parameter/{name}": value for name, value in parts.whole.parameters().items()}
    with parts.recipes.in_place("ema"):
        found |= {f"ema/{name}": value for name, value in parts.whole.parameters().items()}
    return found


def halves(world: World, strategies: list[str], root: str) -> list[str]:
    """Save in the middle, go on; and go on again from what was saved: the same bits."""
    wrong = []
    for number, strategy in enumerate(strategies):
        parts = parts_of(world, strategy)
        for step in range(HALF):
            take_step(parts, step)
        folder = Path(root) / f"{world.size}-{number}"
        Checkpoints(parts, strategy, CheckpointConfig(folder)).save("half", Progress(HALF))
        for step in range(HALF, STEPS):
            take_step(parts, step)
        wanted = contents(parts)
        for place in sorted(Path(root).iterdir()):
            again = parts_of(world, strategy)
            Checkpoints(again, strategy, CheckpointConfig(place)).resume()
            for step in range(HALF, STEPS):
                take_step(again, step)
            for name, value in contents(again).items():
                gap = float((value - wanted[name]).abs().max())
                if gap > (0.0 if place == folder else 1e-10):
                    wrong.append(f"{place.name} -> {strategy} on {world.size}: {name} differs by {gap:.2e}")
        world.barrier()
    return wrong


def test_a_run_goes_on_in_the_middle_of_a_schedule(tmp_path: Path) -> None:
    assert halves(World.alone(), ["solo"], str(tmp_path)) == []
    two = ["zero1(bucket_mb=0.002)", "zero3", "ddp * tp2"]
    for wrong in spawn(halves, 2, two, str(tmp_path), timeout=300):
        assert wrong == []


def test_a_checkpoint_without_the_recipe_begins_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = build(config_of("odd", "solo", ""), World.alone(), "")[1]
    take_step(plain, 0)
    Checkpoints(plain, "solo", CheckpointConfig(tmp_path)).save("plain", Progress(1))
    parts = build(config_of("odd", "solo", "prune(0.6, begin=2, end=5, every=1)"), World.alone(), "")[1]
    Checkpoints(parts, "solo", CheckpointConfig(tmp_path)).resume()
    assert "it has no prune, which begins with the weights as they are now" in capsys.readouterr().err
    assert take_step(parts, 4).metrics["sparsity"] == pytest.approx(0.6, abs=1e-3)


def test_a_step_that_is_discarded_is_in_no_score() -> None:
    """Gradients that overflow once."""
    text = "prune(0.5, begin=2, end=5, every=1, kind=movement)"
    parts = build(replace(config_of("odd", "solo", text), on_nan="skip"), World.alone(), "")[1]
    finish = parts.exchange.finish

    def overflow(tally: Tally) -> Tally:
        found = finish(tally)
        for shard in parts.exchange.gradient_shards():
            shard.tensor.fill_(math.inf)
        return found

    skipped = []
    for number in range(STEPS):
        parts.exchange.finish = overflow if number == 2 else finish  # type: ignore[method-assign]
        skipped.append(take_step(parts, number).skipped)
    assert skipped == [False, False, True, False, False, False]
    scores = [extra.held.tensor for extra in parts.recipes.extras() if extra.kind == "prune-moved"]
    assert scores
    assert all(bool(score.isfinite().all()) for score in scores)


def test_a_step_that_is_cut_short_among_masks_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = build(config_of("odd", "solo", RECIPES["prune"]), World.alone(), "")[1]
    take_step(parts, 0)
    take_step(parts, 1)

    def lost(*_: object) -> None:
        raise PeerLost("a peer is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Pruning, "_prune", lost)
        with pytest.raises(PeerLost):
            take_step(parts, 2)
    parts.abort()
    with pytest.raises(TornStep, match="while recipes acted on its update"):
        parts.reopen(World.alone(), World.alone())


@pytest.mark.parametrize(
    ("recipes", "words"),
    [
        ("prune", "prune needs sparsity"),
        ("prune(0.8, begin=9, end=3)", "a cubic schedule needs an end that comes later"),
        ("prune(1.5)", "it is the share of weights that become zero"),
        ("prune(0.5, kind=size)", "kind=size; it is one of magnitude, movement, random"),
        ("prune(0.8, pattern='2:4')", "pattern=2:4 makes half of the weights zero at once"),
        ("prune(0.5, names=scale)", "no parameter that fits 'scale' has two dimensions"),
        ("prune(0.5, names=first, pattern='2:4')", "'first.weight' of [131, 5] has no whole groups of four"),
        ("freeze(encoder)", "freeze: no parameter fits 'encoder'"),
        ("freeze(first, until=-1)", "until=-1; it is a number of steps"),
        ("rate(first, -1)", "a learning rate is not negative"),
        ("start(/nowhere)", "there is no /nowhere"),
        ("lora(0)", "r is 1 or more"),
        ("lora(2, targets=scale)", "lora: no linear layer fits 'scale'"),
        ("lora(2, train=nothing)", "lora: no parameter fits 'nothing'"),
        ("ewc(1)", "ewc: data= is missing"),
        ("ewc(-1)", "strength is not negative"),
        ("layer_decay(2)", "it is above 0 and at most 1"),
        ("ema(0.9) & swa(start=2)", "a run keeps one average of its weights"),
        ("ema(0.9) + prune(0.5)", "recipes 'ema(0.9) + prune(0.5)': cannot read from '+' on"),
        ("distill", "unknown recipe 'distill'; did you mean 'distil'"),
        (7, "recipes= is a int"),
    ],
)
def test_mistakes_are_said_in_a_sentence(recipes: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(config_of("odd", "solo", recipes), World.alone(), "")
    assert words in str(caught.value)
