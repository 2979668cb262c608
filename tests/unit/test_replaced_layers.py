"""A layer that the script replaces while it trains: nothing would train it, so the run ends in a sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import shoal
from shoal.errors import ConfigError


def make_run(**more: object) -> shoal.Run:
    x = torch.randn(48, 5, generator=torch.Generator().manual_seed(0))
    settings: dict[str, object] = {
        "model": lambda: nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)),
        "loss": lambda output, batch: (output.square().sum(), len(batch[0])),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.01),
        "data": torch.utils.data.TensorDataset(x),
        "global_batch": 4,
        "progress": False,
        "log": None,
    }
    return shoal.Run(**{**settings, **more})  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["layer", "parameter", "pruned"])
def test_what_is_replaced_is_named(what: str) -> None:
    run = make_run()
    steps = run.steps(12)
    next(steps)
    layers = run.module
    assert isinstance(layers, nn.Sequential)
    if what == "layer":
        layers[2] = nn.Linear(7, 2)
    elif what == "parameter":
        layers[2].weight = nn.Parameter(torch.zeros(2, 7))
    else:
        prune.random_unstructured(layers[2], "weight", 0.5)
    with pytest.raises(ConfigError, match=r"'2(\.weight)?' is not what it was when Run was made"):
        list(steps)


def test_values_changed_in_place_are_the_runs() -> None:
    run = make_run()
    for step in run.steps(12):
        if step.number == 2:
            with torch.no_grad():
                run.module[2].weight.zero_()
    assert run.module[2].weight.abs().max() < 1


def test_tied_and_parametrised_layers_stay() -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        model[2].weight = model[0].weight
        return model

    for make in (tied, lambda: nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5)))):
        assert len(list(make_run(model=make).steps(12))) == 12
