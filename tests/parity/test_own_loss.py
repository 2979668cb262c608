"""Models of Hugging Face that return their own loss: as the hand-written torch loop trains them, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.errors import ConfigError
from shoal.plan.check import check_text
from shoal.seeds import build_by_name
from shoal.testing.parity import ParityTrace, trace_run
from shoal.testing.spawn import spawn
from shoal.train.build import build
from shoal.train.rules import check_numbers
from shoal.train.run_config import RunConfig
from shoal.train.technique.own_loss import OwnLoss, all_labels, rows, shifted_labels
from shoal.world.mesh import Mesh
from shoal.world.world import World

transformers = pytest.importorskip("transformers")

VOCABULARY, LENGTH, SAMPLES = 11, 6, 14
Row = dict[str, torch.Tensor]


def causal_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **_: Any) -> torch.Tensor:
    """What transformers' ForCausalLMLoss computes, without its cast to 32 bits."""
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
    return F.cross_entropy(logits.view(-1, vocab_size), shifted.reshape(-1))


def gpt2() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 8, "n_layer": 4, "n_head": 2}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    config = transformers.GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    model.loss_function = causal_loss
    return model


def bert(**more: Any) -> nn.Module:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 8}
    config = transformers.BertConfig(vocab_size=VOCABULARY, **sizes, **off, **more)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def classifier() -> nn.Module:
    return bert(num_labels=3)


def regressor() -> nn.Module:
    return bert(num_labels=1)


def sentences() -> list[Row]:
    """Padded to one length: some long, some short, one without any label."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(SAMPLES):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        real = torch.arange(LENGTH) < 2 + i * 3 % 5
        labels = torch.where(real & (torch.tensor(i) != 2), ids, -100)
        found.append({"input_ids": ids, "attention_mask": real.long(), "labels": labels})
    return found


def classes() -> list[Row]:
    return [{**row, "labels": torch.tensor(i % 3)} for i, row in enumerate(sentences())]


def scores() -> list[Row]:
    return [{**row, "labels": torch.tensor(i / 7, dtype=torch.float64)} for i, row in enumerate(sentences())]


def encode(samples: list[Row]) -> Any:
    """As a tokenizer's collator does."""
    stacked = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return transformers.BatchEncoding(stacked)


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    data: Callable[[], list[Row]]
    count: Callable[[torch.Tensor], torch.Tensor]


CASES = {
    "causal": Case(gpt2, sentences, shifted_labels),
    "classes": Case(classifier, classes, all_labels),
    "scores": Case(regressor, scores, rows),
}


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def config_of(name: str, strategy: str = "solo", **more: Any) -> RunConfig:
    case = CASES[name]
    settings = {
        "model": case.model,
        "optimizer": make_optimizer,
        "data": case.data(),
        "global_batch": 4,
        "strategy": strategy,
        "shuffle": False,
        "precision": "fp64",
        "collate": encode,
    }
    return RunConfig(**{**settings, **more})


STEPS = 5
"""More than an epoch; its last batch has two samples."""


def plain_loop(name: str) -> ParityTrace:
    """A script with transformers and torch alone. It begins with the weights that Shoal makes."""
    model, data = build_by_name(CASES[name].model, seed=0).double(), CASES[name].data()
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in range(STEPS):
        start = step * 4 % 16
        batch = encode(data[start : start + 4])
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return ParityTrace(losses, {n: p.detach().clone() for n, p in model.named_parameters()})


def train_all(world: World, jobs: list[tuple[str, str]]) -> list[ParityTrace]:
    return [trace_run(world, config_of(name, strategy), STEPS) for name, strategy in jobs]


def assert_same(found: ParityTrace, wanted: ParityTrace) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-11)
    for name, value in wanted.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_alone(name: str) -> None:
    wanted = plain_loop(name)
    assert_same(trace_run(World.alone(), config_of(name), STEPS), wanted)
    assert_same(trace_run(World.alone(), config_of(name, accumulate=4), STEPS), wanted)
    loss = build(config_of(name), World.alone(), record="")[1].loss
    assert isinstance(loss, OwnLoss)
    assert loss._count is CASES[name].count


def test_two_workers() -> None:
    wanted = {name: plain_loop(name) for name in CASES}
    jobs = [
        *(
            ("causal", strategy)
            for strategy in (
                "ddp",
                "zero2",
                "zero3",
                "shared",
                "ddp * tp2",
                "ddp * pp2(microbatches=2)",
                "ps",
            )
        ),
        *(
            (name, strategy)
            for name in ("classes", "scores")
            for strategy in ("ddp", "ddp * pp2(microbatches=2)")
        ),
    ]
    for found in spawn(train_all, 2, jobs):
        for (name, strategy), trace in zip(jobs, found, strict=True):
            try:
                assert_same(trace, wanted[name])
            except AssertionError as error:
                raise AssertionError(f"{name} under {strategy}") from error


class Tiny(nn.Module):
    """Returns a loss of some kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.layer(x)
        loss = F.cross_entropy(logits, labels)
        if self.kind == "penalty":
            loss = loss + x.std()
        if self.kind == "smoothed":
            loss = F.cross_entropy(logits, labels, label_smoothing=0.1)
        if self.kind == "sum":
            loss = F.cross_entropy(logits, labels, reduction="sum")
        if self.kind == "tensor":
            return logits
        if self.kind == "parts":
            return {"loss": loss, "aux_loss": loss}
        return {"loss": loss, "logits": logits}


def tiny(kind: str, **more: Any) -> RunConfig:
    generator = torch.Generator().manual_seed(0)
    data = [{"x": torch.randn(3, generator=generator), "labels": torch.tensor(i % 2)} for i in range(8)]
    settings = {"model": lambda: Tiny(kind), "optimizer": make_optimizer, "data": data, "global_batch": 4}
    return RunConfig(**{**settings, **more})  # type: ignore[arg-type]


def test_a_smoothed_loss_is_still_a_mean() -> None:
    trace_run(World.alone(), tiny("smoothed"), 1)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (tiny("penalty"), "Tiny returns a loss that is no mean over its labels or samples"),
        (tiny("sum"), "Tiny returns a loss that is no mean over its labels or samples"),
        (tiny("tensor"), "loss= is left out, so the model has to return its own, and Tensor has none"),
        (tiny("parts"), "Tiny returns aux_loss beside its loss, so that is a sum of parts"),
        (tiny("", data=[torch.zeros(3)] * 8), "the batch, a Tensor, has no tensor 'labels' to count"),
        (
            tiny("", data=[{"x": torch.zeros(3), "labels": torch.tensor(0), "id": i} for i in range(8)]),
            "the batch has id, which Tiny.forward does not name",
        ),
        (
            tiny("", strategy="ddp * tp2(loss=true)"),
            "leaves logits cut for loss=, and the model computes its own loss",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(config: RunConfig, words: str) -> None:
    world = World.alone()
    if "tp2" in config.strategy:
        with pytest.raises(ConfigError, match=words):
            check_numbers(config, check_text(config.strategy, 2), Mesh.imagine(world, 2, 2, 1))
        return
    with pytest.raises(ConfigError, match=words):
        trace_run(world, config, 1)
