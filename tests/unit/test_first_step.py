"""What the first step of a run finds in a program that parts of a batch would compute otherwise: said, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.errors import ConfigError


def mean(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def settings(**changes: Any) -> dict[str, Any]:
    data = TensorDataset(torch.randn(16, 6), torch.randint(0, 3, (16,)))
    common: dict[str, Any] = {"model": lambda: nn.Linear(6, 3), "loss": mean, "data": data, "global_batch": 8}
    sgd: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
    quiet = {"log": None, "progress": False, "strategy": "solo", "optimizer": sgd, "accumulate": 2}
    return {**common, **quiet, **changes}


def said(capsys: pytest.CaptureFixture[str], **changes: Any) -> str:
    for _ in shoal.Run(**settings(**changes)).steps(2):
        pass
    return capsys.readouterr().err


class Centred(nn.Module):
    """Samples act on each other; `layer` comes before."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 3), *layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x - x.mean(0)


class Remembering(nn.Linear):
    """What it gives depends on the pass before, and not on other samples."""

    passes = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.passes = 1 - self.passes
        return super().forward(x) * (1 + self.passes)


@pytest.mark.parametrize(
    "more", [(), (nn.Dropout(0.5),), (nn.BatchNorm1d(3),)], ids=["", "dropout", "batchnorm"]
)
def test_samples_that_meet_in_the_model_are_said(
    capsys: pytest.CaptureFixture[str], more: tuple[nn.Module, ...]
) -> None:
    assert "other outputs for 4 samples than for the same among 8" in said(
        capsys, model=lambda: Centred(*more)
    )
    assert said(capsys, model=lambda: Centred(*more), accumulate=1) == ""


class Drawing(nn.Linear):
    """Draws in `forward` itself, in evaluation mode too; `meeting`: and samples act on each other besides."""

    meeting = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(F.dropout(x + torch.rand_like(x), 0.5))
        return x - self.meeting * x.mean(0)


def test_samples_that_meet_beside_draws_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    model = Drawing(6, 3)
    model.meeting = 1.0
    assert "act on each other" in said(capsys, model=model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout()),
        lambda: Remembering(6, 3),
        lambda: Drawing(6, 3),
    ],
)
def test_other_models_are_not(capsys: pytest.CaptureFixture[str], make: Callable[[], nn.Module]) -> None:
    assert "act on each other" not in said(capsys, model=make)


def test_nor_is_a_model_with_dropout_where_a_run_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """That it draws stands in the checkpoint: nobody looks for it again."""
    dropout = nn.Sequential(nn.Linear(6, 3), nn.Dropout())
    data = TensorDataset(torch.randn(64, 6), torch.randint(0, 3, (64,)))
    kept = {"model": dropout, "data": data, "global_batch": 32, "checkpoint": tmp_path, "checkpoint_every": 1}
    said(capsys, **kept)
    for _ in shoal.Run(**settings(**kept)).steps(4):
        pass
    assert "act on each other" not in capsys.readouterr().err


def test_what_a_loss_or_a_layer_counts_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Rising:
        calls = 0

        def __call__(self, output: Tensor, batch: Any) -> Tensor:
            self.calls += 1
            return mean(output, batch) * self.calls

    rising = Rising()
    rising.calls = 3
    assert "counts in 'calls' (3 before the first step, 5 after it)" in said(capsys, loss=rising)
    rising.calls = 3
    assert said(capsys, loss=rising, accumulate=1) == ""

    state = {"step": 0}

    def annealed(output: Tensor, batch: Any) -> Tensor:
        state["step"] += 1
        return mean(output, batch) * min(1.0, state["step"] / 10)

    assert "counts in 'state['step']'" in said(capsys, loss=annealed)


def test_learning_parameters_of_a_loss_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Arc(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, output: Tensor, batch: Any) -> Tensor:
            return mean(output @ self.weight, batch)

    assert "1 learning parameters that are not the model's, the first of shape [3, 3]" in said(
        capsys, loss=Arc()
    )
    assert said(capsys, loss=Arc().requires_grad_(False)) == ""


def test_a_teacher_that_moves_in_forward_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    class Taught(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pupil, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.pupil.weight, 0.1)
            return self.pupil(x) - self.teacher(x)

    words = "forward passes change parameter 'teacher.weight', once for each of a worker's 2 micro-batches"
    assert words in said(capsys, model=Taught)
    assert said(capsys, model=Taught, accumulate=1) == ""


def graphs(samples: list[Any]) -> dict[str, Tensor]:
    nodes = [torch.full((int(label) + 2, 6), float(label)) for _, label in samples]
    owner = torch.cat([torch.full((len(n),), i) for i, n in enumerate(nodes)])
    return {"x": torch.cat(nodes), "owner": owner, "y": torch.stack([label for _, label in samples])}


class OfGraphs(nn.Linear):
    def forward(self, x: Tensor, owner: Tensor) -> Tensor:
        return torch.zeros(int(owner.max()) + 1, 3).index_add(0, owner, super().forward(x))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {
                "model": lambda: OfGraphs(6, 3),
                "collate": graphs,
                "inputs": lambda batch: {"x": batch["x"], "owner": batch["owner"]},
                "loss": lambda output, batch: F.cross_entropy(output, batch["y"]),
            },
            "over how many samples nobody can tell",
        ),
        ({"loss": nn.CrossEntropyLoss()}, "loss= is torch's CrossEntropyLoss, which takes a target"),
        ({"loss": F.cross_entropy}, "loss= is torch's cross_entropy, which takes a target"),
        (
            {
                "model": lambda: nn.Sequential(
                    nn.Flatten(), nn.Embedding(9, 3, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(18, 3)
                ),
                "inputs": lambda batch: batch[0].abs().long(),
            },
            "'1' has scale_grad_by_freq=True",
        ),
    ],
    ids=["rows", "loss module", "loss function", "frequencies"],
)
def test_what_no_part_can_compute_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        list(shoal.Run(**settings(**changes)).steps(1))
    assert words in str(refused.value)


def test_layers_in_evaluation_mode_stay_there() -> None:
    """As a script that fine-tunes without moving statistics has it."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model[1].eval()
    run = shoal.Run(**settings(model=model))
    for _ in run.steps(2):
        run.evaluate(run.data)  # type: ignore[arg-type]
    assert [layer.training for layer in run.module] == [True, False, True]  # type: ignore[attr-defined]
    assert run.state_dict()["1.num_batches_tracked"] == 0
    still = shoal.Run(**settings(model=nn.Sequential(nn.Linear(6, 3), nn.Dropout()).eval()))
    assert all(layer.training for layer in still.module.modules())  # as pretrained models come


def test_the_look_leaves_generators_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run = shoal.Run(**settings(model=lambda: Centred(nn.Dropout(0.5))))
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[2]
    list(run.steps(1))
    assert "act on each other" in capsys.readouterr().err
    assert (random.getstate(), np.random.get_state()[2]) == before
