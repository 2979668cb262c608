"""Settings that differ between ranks are refused before anything else is done."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.testing.spawn import spawn
from shoal.train.model.same_settings import agree_on_settings
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
