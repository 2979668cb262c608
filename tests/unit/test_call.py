"""How what inputs= returns becomes a call of the model: exact where it can be known, asked for where it cannot."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.call import Call, Signature, arguments, call_model
from shoal.data.batch import ModelInputs, convert, length, tensors_of
from shoal.errors import ConfigError
from shoal.pipeline.proof import prove
from shoal.pipeline.spine import observe
from shoal.pipeline.stage import plan_stages
from shoal.testing.parity import trace_run
from shoal.train.run_config import RunConfig
from shoal.world.world import World


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x))) * scale
        return out


class Optional_(Two):
    def forward(self, x: Any, scale: Any = 2.0) -> Tensor:
        return super().forward(x, scale)


class Whole(Two):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(*(batch.values() if isinstance(batch, dict) else batch))


class Open(Two):
    def forward(self, x: Any = None, **more: Any) -> Tensor:
        return super().forward(x, more["scale"])


class Pair(NamedTuple):
    x: Any
    scale: Any


X, SCALE = torch.randn(4, 3), torch.rand(4, 1)


def shown(model: nn.Module, given: Any) -> str:
    arranged = Signature(model).arrange(given)
    return repr(arranged) if isinstance(arranged, Call) else "one"


def test_what_is_one_argument_and_what_several() -> None:
    assert shown(Two(), X) == "one"
    assert shown(Two(), (X, SCALE)) == "Call(Tensor, Tensor)"
    assert shown(Two(), {"x": X, "scale": SCALE}) == "Call(x=Tensor, scale=Tensor)"
    assert shown(Whole(), (X, SCALE)) == "one", "as ever: forward takes one argument"
    assert shown(Whole(), {"x": X, "scale": SCALE}) == "one"
    assert shown(Whole(), [X, SCALE]) == "one"
    assert shown(Two(), Pair(X, SCALE)) == "one", "a tuple with names is a value of its own"
    assert shown(Open(), {"x": X}) == "Call(x=Tensor)"
    assert shown(Optional_(), {"x": X}) == "Call(x=Tensor)"
    assert shown(nn.Linear(3, 1), {"a": X}) == "one"


@pytest.mark.parametrize(
    ("model", "given", "words"),
    [
        (Optional_(), (X, SCALE), "a tuple of 2, which may be 2 arguments of Optional_.forward or one"),
        (Open(), {"x": X, "scale": SCALE}, "a dict with scale, which Open.forward does not name"),
    ],
)
def test_what_may_be_either_is_asked_for(model: nn.Module, given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Signature(model).arrange(given)
    given = Call(*given) if isinstance(given, tuple) else Call(**given)
    assert Signature(model).arrange(given) is given
    torch.testing.assert_close(call_model(model, given).shape, torch.Size([4, 1]))


def test_a_dict_without_inputs_is_keywords_where_forward_has_their_names() -> None:
    batch = {"x": X, "scale": SCALE}
    assert repr(ModelInputs(Two(), None)(batch)) == "Call(x=Tensor, scale=Tensor)"
    assert repr(ModelInputs(Two(), None)(UserDict(batch))) == "Call(x=Tensor, scale=Tensor)"
    assert ModelInputs(Two(), None)({"inputs": X, "y": SCALE}) is X
    with pytest.raises(ConfigError, match="without 'inputs'"):
        ModelInputs(Two(), None)({**batch, "y": SCALE})


def test_mappings_are_batches() -> None:
    batch = UserDict({"x": X, "scale": SCALE})
    assert (length(batch), len(list(tensors_of(batch)))) == (4, 2)
    wide = convert(batch, torch.device("cpu"), torch.float64)
    assert isinstance(wide, UserDict)
    assert wide["x"].dtype is torch.float64
    assert batch["x"].dtype is torch.float32, "the batch that was given stays as it is"


def config_of(**changes: Any) -> RunConfig:
    rows = [{"x": torch.sin(torch.arange(3.0) + i), "scale": torch.tensor([i / 5])} for i in range(10)]
    settings: dict[str, Any] = {
        "model": Two,
        "loss": lambda output, batch: (((output - batch["scale"]) ** 2).sum(), len(output)),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
        "data": rows,
        "global_batch": 4,
        "strategy": "solo",
        "precision": "fp64",
    }
    return RunConfig(**{**settings, **changes})


def test_every_form_trains_the_same() -> None:
    world = World.alone()
    wanted = trace_run(world, config_of(inputs=lambda batch: Call(batch["x"], scale=batch["scale"])), 4)
    assert len(set(wanted.losses)) == 4
    for config in (
        config_of(),
        config_of(inputs=lambda batch: (batch["x"], batch["scale"])),
        config_of(inputs=dict),
        config_of(inputs=lambda batch: (batch["x"], batch["scale"]), model=Whole),
        config_of(inputs=lambda batch: batch, model=Whole),
        config_of(
            inputs=lambda batch: shoal.Call(
                batch,
            ),
            model=Whole,
        ),
        config_of(inputs=lambda batch: shoal.Call(**batch), model=Open, accumulate=2),
    ):
        assert trace_run(world, config, 4).losses == pytest.approx(wanted.losses, rel=1e-12)


def test_stages_take_several_arguments() -> None:
    model, call = Two(), Call(X, scale=SCALE)
    spine = observe(model, call)
    assert spine.batch == 4
    prove(model, call, plan_stages(model, spine, ["second"]))
    assert arguments(call) == ((X,), {"scale": SCALE})
