"""Which buffer has which word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.train.model.buffer_rules import watched, words_for


def model() -> nn.Module:
    made = nn.Sequential(nn.BatchNorm1d(2), nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)))
    made.register_buffer("book", torch.zeros(2))
    made.register_buffer("steps", torch.tensor(0))
    made.register_buffer("mask", torch.tensor(True))
    return made


def test_spectral_norm_needs_no_word_and_batchnorm_has_its_own_setting() -> None:
    words = words_for(model(), {})
    assert words == {"1.parametrizations.weight.0._u": "first", "1.parametrizations.weight.0._v": "first"}
    assert watched(model(), words) == ["book", "steps", "mask"]


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ("mean", {"book": "mean", "steps": "first", "mask": "first"}),
        ("sum", {"book": "sum", "steps": "sum", "mask": "first"}),
        ("own", {"book": "own", "steps": "own", "mask": "own"}),
        ({"*": "first", "book": "mean"}, {"book": "mean", "steps": "first", "0.running_mean": "first"}),
    ],
)
def test_words(asked: Any, wanted: dict[str, str]) -> None:
    found = words_for(model(), asked)
    assert {name: found[name] for name in wanted} == wanted
    assert found["1.parametrizations.weight.0._u"] == "first"
    assert isinstance(asked, dict) or "0.running_mean" not in found


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("average", "'average'; it is one of sum, mean, first, own"),
        ({"book": "avg"}, "'avg'; it is one of"),
        (3, "buffers= is a int"),
        ({"code.*": "sum"}, "no buffer is called 'code.\\*'; there are 'book', 'steps'"),
        (
            {"steps": "mean"},
            "'steps' is of torch.int64, and a mean would not be a whole number; say 'first' or 'own'",
        ),
        ({"mask": "sum"}, "'mask' is of true and false, which have no sum"),
    ],
)
def test_refusals(asked: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        words_for(model(), asked)
