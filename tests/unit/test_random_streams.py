"""Whether modules have random streams of their own, as a worker decides it that comes late."""

from __future__ import annotations

import torch
from torch import nn

from shoal.exchange.contract import JoinState
from shoal.exchange.ps_worker.claim import from_plain, to_plain
from shoal.train.model.random_streams import RandomStreams
from shoal.world.world import World


def dropped(model: nn.Module, streams: RandomStreams, step: int) -> torch.Tensor:
    streams.begin(step, 0)
    made: torch.Tensor = model(torch.ones(64))
    if streams.watching:
        streams.settle()
    return made


def test_a_worker_whose_first_step_others_have_computed_draws_as_they_do() -> None:
    models = [nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)) for _ in range(3)]
    first, late, told = (RandomStreams(model, (), seed=3) for model in models)
    dropped(models[0], first, 1)
    first.decide(World.alone())
    assert first.by_module is True
    late.decide(World.alone())
    assert late.by_module is None, "it has seen nothing"
    state = from_plain(to_plain(JoinState(1.0, 1.0, 0, first.by_module)))
    assert state is not None
    assert state.by_module is True
    told.go_on(state.by_module)
    wanted = dropped(models[0], first, 2)
    for model, streams in zip(models[1:], (late, told), strict=True):
        assert torch.equal(dropped(model, streams, 2), wanted)
    late.decide(World.alone())
    assert late.by_module is True
    assert torch.equal(dropped(models[1], late, 3), dropped(models[0], first, 3))
