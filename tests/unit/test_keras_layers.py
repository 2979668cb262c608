"""Layers of Keras are trained as they are, or refused: with the real Keras where it is installed."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.train.model.make import check_keras

os.environ.setdefault("KERAS_BACKEND", "torch")


@pytest.mark.parametrize("kind", ["dropout", "statistics", "regulariser", "inside"])
def test_what_a_run_would_leave_out_is_refused(kind: str) -> None:
    keras = pytest.importorskip("keras", reason="keras is not installed: scripts/setup dev")
    layer = {
        "dropout": lambda: keras.layers.Dropout(0.5),
        "statistics": lambda: keras.layers.BatchNormalization(),
        "regulariser": lambda: keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.01)),
        "inside": lambda: keras.Sequential([keras.layers.Dense(3), keras.layers.Dropout(0.5)]),
    }[kind]()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), layer])
    with pytest.raises(ConfigError, match="the model has layers of Keras"):
        check_keras(model)
    with pytest.raises(ConfigError, match=r"layers of Keras \(1\)"):
        check_keras(nn.Sequential(nn.Linear(8, 8), model))


def test_what_is_a_module_like_any_passes() -> None:
    check_keras(nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2)))
    keras = pytest.importorskip("keras", reason="keras is not installed: scripts/setup dev")
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(2)]
    )
    check_keras(model)
    assert model(torch.ones(3, 8)).shape == (3, 2)
