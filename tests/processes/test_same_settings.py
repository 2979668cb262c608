"""Settings that differ between ranks are refused before anything else is done."""

from __future__ import annotations

import contextlib
import functools
import io
from typing import Any

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.testing.spawn import spawn
from shoal.train.calls.same_settings import agree_on_settings
from shoal.train.run_config import RunConfig
from shoal.world.world import World

OTHER: list[dict[str, Any]] = [
    {},
    {"log": None, "progress": False},
    {"metrics": {"acc": max}},
    {"penalty": max},
    {"accumulate": 2},
    {"data": [(torch.zeros(2), 0)] * 7},
]


def weighted(weight: float) -> Any:
    return lambda output, _: output.sum() * weight


def guessed(rank: int) -> dict[str, Any]:
    """Functions of one name, as a script defines them in an `if rank`."""
    if rank:

        def loss(output: Any, _: Any) -> Any:
            return output.abs().mean()
    else:

        def loss(output: Any, _: Any) -> Any:
            return output.square().mean()

    return {"loss": loss}


def helped(rank: int) -> dict[str, Any]:
    power = (lambda x: x * x) if rank else (lambda x: x)

    def loss(output: Any, _: Any) -> Any:
        return power(output).mean()

    return {"loss": loss}


def defaulted(rank: int) -> dict[str, Any]:
    def loss(output: Any, _: Any, scale: float = 1.0 + rank) -> Any:
        return output.mean() * scale

    return {"loss": loss}


class Scaled:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, output: Any, _: Any) -> Any:
        return output.mean() * self.scale


def known(rank: int) -> dict[str, Any]:
    """What a rank may know of itself."""
    main, device = rank == 0, f"cpu:{rank}"

    def loss(output: Any, _: Any) -> Any:
        return print(rank, device) if main else output.mean()

    return {"loss": loss, "metrics": {"size": lambda output, _: (len(output), rank)}}


FUNCTIONS: dict[str, Any] = {
    "same": lambda _: {"loss": weighted(0.5), "metrics": {"acc": lambda o, b: (len(b), {1, 2} and o)}},
    "known": known,
    "guessed": guessed,
    "helped": helped,
    "defaulted": defaulted,
    "metrics": lambda rank: {"metrics": {"acc": min if rank else max}},
    "partial": lambda rank: {"inputs": functools.partial(max, default=rank + 5)},
    "optimizer": lambda rank: {"optimizer": torch.optim.SGD if rank else torch.optim.Adam},
    "closure": lambda rank: {"loss": weighted(0.5 + rank)},
    "object": lambda rank: {"loss": Scaled(0.5 + rank)},
    "tensor": lambda rank: {"loss": weighted(torch.full((2,), 0.5 + rank))},  # type: ignore[arg-type]
}


def compare_functions(world: World) -> dict[str, str]:
    found = {}
    for name, make in FUNCTIONS.items():
        said = io.StringIO()
        try:
            given = {"loss": max, "optimizer": torch.optim.SGD, "data": [0], **make(world.rank)}
            with contextlib.redirect_stderr(said):
                agree_on_settings(vars(RunConfig(model=nn.Linear, global_batch=4, **given)), world)
            found[name] = said.getvalue()
        except ConfigError as error:
            found[name] = str(error)
    return found


def test_ranks_have_the_same_functions() -> None:
    """Their code, not only their names; and of the values around them, what differs is said."""
    ranks = spawn(compare_functions, 2)
    refused = {name: words for name, words in ranks[0].items() if words == ranks[1][name] and words}
    said = {name: words for name, words in ranks[0].items() if words and words != ranks[1][name]}
    assert {name for name, words in ranks[0].items() if not words} == {"same", "known"}
    assert set(said) == {"closure", "object", "tensor"}
    assert said["closure"] == (
        "shoal: loss= sees weight = 0.5 on rank 0 and 1.5 on rank 1; if it computes with that, ranks train different "
        "things.\n"
    )
    assert "loss= sees scale = 0.5 on rank 0 and 1.5 on rank 1" in said["object"]
    assert "loss= sees weight = a tensor of shape [2] (" in said["tensor"]
    assert all(words.startswith("ranks disagree on ") for words in refused.values())
    assert "rank 0 has loss of " in refused["guessed"]
    assert "whose code is another; give Run the same functions" in refused["guessed"]
    assert refused["defaulted"].startswith(
        "ranks disagree on loss=: its scale is 1.0 on rank 0 and 2.0 on rank 1;"
    )
    assert "rank 0 has max, rank 1 has min" in refused["metrics"]
    assert refused["partial"].startswith(
        "ranks disagree on inputs=: its default is 5 on rank 0 and 6 on rank 1;"
    )


def compare(world: World) -> list[str]:
    found = []
    for settings in OTHER:
        given: dict[str, Any] = {"data": [(torch.zeros(2), 0)] * 8, **(settings if world.rank else {})}
        try:
            config = RunConfig(model=nn.Linear, loss=max, optimizer=torch.optim.SGD, global_batch=4, **given)
            agree_on_settings(vars(config), world)
            found.append("")
        except ConfigError as error:
            found.append(str(error).partition(";")[0])
    return found


def test_ranks_have_the_same_settings() -> None:
    for found in spawn(compare, 2):
        assert found == [
            "",
            "",
            "ranks disagree on metrics=: rank 0 has none, rank 1 has acc",
            "ranks disagree on penalty=: rank 0 has None, rank 1 has a function",
            "ranks disagree on accumulate=: rank 0 has 1, rank 1 has 2",
            "ranks disagree on data=: rank 0 has 8 entries, rank 1 has 7 entries",
        ]
