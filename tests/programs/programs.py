"""Kinds of program that people bring, each twice: for `shoal.Run`, and as the plain torch loop that it must equal.

The plain side is written as its author would have written it: one process, the whole batch, the loss as a mean.
Nothing of Shoal is in it. Both sides begin from the same weights and take the samples
in order; the last batch is short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

SAMPLES, BATCH, STEPS = 22, 8, 5
"""An epoch is two full batches and one of six samples; training goes on into the second epoch."""

Weights = dict[str, Tensor]
Make = Callable[[], nn.Module]
Optimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Program:
    """One kind of program."""

    name: str
    says: str
    """What is special about it, for the table."""
    settings: Callable[[], Mapping[str, Any]]
    """The keyword arguments of `shoal.Run`, but for the strategy."""
    plain: Callable[[int], Weights]
    """Train so many steps by hand, and give the weights back."""
    measure: Callable[[Weights | None], float]
    """The mean loss over all samples with these weights; None: with those that it begins with."""
    steps: int = STEPS
    drive: Callable[[Any], None] | None = None
    """What its loop does beside stepping; given the Run."""
    alone_in: tuple[str, ...] = ()
    """Columns where one rank alone finds out that it cannot be done: it ends a launch."""
    weights: Callable[[Any], Weights] | None = None
    """What to compare, of a Run; every rank calls it. Default: its state_dict."""


PROGRAMS: dict[str, Program] = {}


def add(program: Program) -> None:
    """Put a program into the table."""
    assert program.name not in PROGRAMS
    PROGRAMS[program.name] = program


def fresh(make: Make, seed: int = 7) -> nn.Module:
    """The same weights each time, in float64."""
    torch.manual_seed(seed)
    return make().double()


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(count: int, *shape: int, seed: int = 2) -> Tensor:
    return torch.randint(0, count, shape, generator=torch.Generator().manual_seed(seed))


def batches(
    data: Any, steps: int = STEPS, batch: int = BATCH, collate: Any = default_collate
) -> Iterator[Any]:
    """Epoch after epoch in order; the last of an epoch is short."""
    done = 0
    while True:
        for first in range(0, len(data), batch):
            if done == steps:
                return
            yield collate([data[i] for i in range(first, min(first + batch, len(data)))])
            done += 1


def trained(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    optimizer: Optimizer,
    data: Any,
    *,
    steps: int = STEPS,
    batch: int = BATCH,
    collate: Any = default_collate,
    before_update: Callable[[nn.Module], None] | None = None,
    after_step: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
) -> Weights:
    """The loop that everybody has written."""
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    for number, part in enumerate(batches(data, steps, batch, collate)):
        made.zero_grad()
        loss(model, part).backward()
        if before_update is not None:
            before_update(model)
        made.step()
        if after_step is not None:
            after_step(number, model, made)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def measured(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    data: Any,
    weights: Weights | None,
    collate: Any = default_collate,
) -> float:
    """The loss of all samples as one batch."""
    if weights is not None:
        model.load_state_dict(weights, strict=False)
    return float(loss(model, collate([data[i] for i in range(len(data))])).detach())


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    # The default eps is below the rounding that it divides, where a gradient is nearly zero.
    return torch.optim.AdamW(params, lr=0.01, eps=1e-3)


@dataclass(frozen=True)
class Simple:
    """A program with one model, one loss over (input, target) and one optimizer."""

    make: Make
    data: Callable[[], Any]
    total: Callable[[Any, Any], tuple[Tensor, int | Tensor]]
    """As Shoal wants it: (output, batch) -> (sum, count)."""
    mean: Callable[[nn.Module, Any], Tensor]
    """As the plain loop has it: (model, batch) -> mean."""
    optimizer: Optimizer = sgd
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the Run."""
    also: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the plain loop."""

    def settings(self) -> dict[str, Any]:
        return {
            "model": fresh(self.make),
            "loss": self.total,
            "optimizer": self.optimizer,
            "data": self.data(),
            "global_batch": BATCH,
            **self.more,
        }

    def plain(self, steps: int) -> Weights:
        return trained(fresh(self.make), self.mean, self.optimizer, self.data(), steps=steps, **self.also)

    def measure(self, weights: Weights | None) -> float:
        return measured(
            fresh(self.make), self.mean, self.data(), weights, self.also.get("collate", default_collate)
        )


def simple(name: str, says: str, program: Simple, **rest: Any) -> None:
    add(Program(name, says, program.settings, program.plain, program.measure, **rest))


# Models


def mlp(inputs: int = 6, outputs: int = 3, width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)
    )


class ConvNet(nn.Module):
    """Convolutions with a normalisation of the caller's choice."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1),
            norm(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2),
            norm(4),
            nn.ReLU(),
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).flatten(1))


class Language(nn.Module):
    """A small decoder, with or without one weight at both ends."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.mask = nn.Buffer(nn.Transformer.generate_square_subsequent_mask(5).double(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Experts(nn.Module):
    """Some parameters have no gradient in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out[mine] = expert(x[mine]) * weights[mine, number, None]
        return out


class Named(nn.Module):
    """Its forward takes two inputs, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(left) + self.right(right)))


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(6, 8)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.base(x) + self.up(self.down(x))))


# Data


def points() -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, 6), classes(3, SAMPLES))


def values() -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, 6), numbers(SAMPLES, 3, seed=3))


def pictures() -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, 1, 6, 6), classes(3, SAMPLES))


def sequences() -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, 5, 6), classes(3, SAMPLES))


def tokens() -> TensorDataset:
    """Rows of different length: what is beyond the end counts for nothing."""
    ids, targets = classes(11, SAMPLES, 5), classes(11, SAMPLES, 5, seed=4)
    lengths = classes(4, SAMPLES, seed=5) + 2
    targets[torch.arange(5)[None] >= lengths[:, None]] = -100
    return TensorDataset(ids, targets)


# Losses, twice each


def entropy(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])


def mean_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def squares(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), batch[1].numel()


def mean_squares(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def language(output: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    total = F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), ignore_index=-100, reduction="sum")
    return total, (batch[1] != -100).sum()


def mean_language(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


# The plain face

simple("classifier", "the loss as a sum and a count", Simple(mlp, points, entropy, mean_entropy))
simple(
    "scalar mean",
    "the loss as one mean, as in most scripts",
    Simple(mlp, points, lambda output, batch: F.cross_entropy(output, batch[1]), mean_entropy),
)
simple("regression", "mean squared error over elements", Simple(mlp, values, squares, mean_squares, adamw))
simple(
    "autoencoder",
    "the input is the target",
    Simple(
        partial(mlp, 6, 6, 4),
        lambda: TensorDataset(numbers(SAMPLES, 6)),
        lambda output, batch: ((output - batch[0]).square().sum(), batch[0].numel()),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[0]),
    ),
)
simple(
    "convolutions, group norm",
    "normalised sample by sample",
    Simple(partial(ConvNet, partial(nn.GroupNorm, 2)), pictures, entropy, mean_entropy),
)
simple(
    "convolutions, batch norm",
    'batchnorm="sync": normalised over the global batch',
    Simple(partial(ConvNet, nn.BatchNorm2d), pictures, entropy, mean_entropy, more={"batchnorm": "sync"}),
)
simple(
    "language model",
    "padded rows: tokens are counted, not rows",
    Simple(Language, tokens, language, mean_language, adamw),
)
simple(
    "tied weights",
    "one weight at both ends of a language model",
    Simple(partial(Language, True), tokens, language, mean_language, adamw),
)
simple("LSTM", "recurrent layers", Simple(Recurrent, sequences, entropy, mean_entropy))
simple(
    "experts", "parameters without a gradient in some steps", Simple(Experts, points, entropy, mean_entropy)
)
simple(
    "sample weights",
    "each sample has its weight; the mean is weighted",
    Simple(
        mlp,
        lambda: TensorDataset(numbers(SAMPLES, 6), classes(3, SAMPLES), numbers(SAMPLES, seed=6).square()),
        lambda output, batch: (
            (F.cross_entropy(output, batch[1], reduction="none") * batch[2]).sum(),
            batch[2].sum(),
        ),
        lambda model, batch: (
            (F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]).sum() / batch[2].sum()
        ),
    ),
)
simple(
    "two losses",
    "a weighted sum of two means",
    Simple(
        mlp,
        values,
        lambda output, batch: (
            F.mse_loss(output, batch[1], reduction="sum")
            + 0.3 * F.l1_loss(output, batch[1], reduction="sum"),
            batch[1].numel(),
        ),
        lambda model, batch: (
            F.mse_loss(model(batch[0]), batch[1]) + 0.3 * F.l1_loss(model(batch[0]), batch[1])
        ),
    ),
)
simple(
    "two inputs, by name",
    "forward(left, right), called with keywords",
    Simple(
        Named,
        lambda: [
            {"left": a, "right": b, "y": c}
            for a, b, c in zip(
                numbers(SAMPLES, 6), numbers(SAMPLES, 4, seed=8), classes(3, SAMPLES), strict=True
            )
        ],
        lambda output, batch: (F.cross_entropy(output, batch["y"], reduction="sum"), len(batch["y"])),
        lambda model, batch: F.cross_entropy(model(batch["left"], batch["right"]), batch["y"]),
        more={"inputs": lambda batch: {"left": batch["left"], "right": batch["right"]}},
    ),
)


def _shrunk(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)


simple(
    "clipped by norm",
    "clip=0.05, which every step exceeds",
    Simple(mlp, points, entropy, mean_entropy, more={"clip": 0.05}, also={"before_update": _shrunk}),
)
simple(
    "accumulation",
    "accumulate=2: two micro-batches a worker",
    Simple(mlp, points, entropy, mean_entropy, adamw, more={"accumulate": 2}),
)
simple(
    "low rank", "most weights frozen, adapters trained", Simple(LowRank, points, entropy, mean_entropy, adamw)
)


def _halved(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del model
    optimizer.param_groups[0]["lr"] = 0.1 * 0.5 ** (number + 1)


simple(
    "scheduler",
    "a scheduler of torch's, each step",
    Simple(
        mlp,
        points,
        entropy,
        mean_entropy,
        more={"schedule": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)},
        also={"after_step": _halved},
    ),
)


def two_groups(params: Any) -> torch.optim.Optimizer:
    kept = list(params)
    matrices, vectors = [p for p in kept if p.ndim > 1], [p for p in kept if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.03}], lr=0.01, eps=1e-3
    )


simple(
    "parameter groups",
    "no decay on vectors, and their own rate",
    Simple(mlp, points, entropy, mean_entropy, two_groups),
)
simple(
    "recomputed blocks",
    'recompute="blocks"',
    Simple(Language, tokens, language, mean_language, adamw, more={"recompute": "blocks"}),
)


def ragged() -> list[tuple[Tensor, Tensor]]:
    """Samples of different length, for a collate function that pads them."""
    lengths = (classes(4, SAMPLES, seed=5) + 2).tolist()
    return [
        (classes(11, length, seed=50 + i), classes(11, length, seed=90 + i))
        for i, length in enumerate(lengths)
    ]


def padded(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    return pad([a for a, _ in samples]), pad([b for _, b in samples], padding_value=-100)


class Bag(nn.Module):
    """Averages its tokens; any length will do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


simple(
    "own collate",
    "rows padded to the longest of their batch",
    Simple(Bag, ragged, language, mean_language, adamw, more={"collate": padded}, also={"collate": padded}),
)


def _gradient_wrt_inputs(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope


class Slope(nn.Module):
    """Returns the slope of a network beside its value: a backward pass within the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.net(x), _gradient_wrt_inputs(self.net, x)], -1)


def _fit(output: Tensor, target: Tensor) -> Tensor:
    return (output[:, :1] - target[:, :1]).square() + output[:, 1:].square().sum(-1, keepdim=True)


simple(
    "double backward",
    "the loss contains a gradient, as in physics-informed nets",
    Simple(
        Slope,
        values,
        lambda output, batch: (_fit(output, batch[1]).sum(), len(output)),
        lambda model, batch: _fit(model(batch[0]), batch[1]).mean(),
    ),
)


class Distilled(nn.Module):
    """A student with its frozen teacher."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = mlp(), mlp(width=16)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def _distance(output: tuple[Tensor, Tensor], batch: Any) -> Tensor:
    student, teacher = output
    soft = F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
    return soft + 0.5 * F.cross_entropy(student, batch[1], reduction="none")


simple(
    "distillation",
    "a frozen teacher beside the student",
    Simple(
        Distilled,
        points,
        lambda output, batch: (_distance(output, batch).sum(), len(batch[1])),
        lambda model, batch: _distance(model(batch[0]), batch).mean(),
    ),
)


def spectral() -> nn.Module:
    net = mlp()
    nn.utils.parametrizations.spectral_norm(net[2])
    return net


def weighted() -> nn.Module:
    net = mlp()
    nn.utils.parametrizations.weight_norm(net[2])
    return net


simple("weight_norm", "a parametrised weight", Simple(weighted, points, entropy, mean_entropy))
simple("spectral_norm", "a parametrised weight with buffers", Simple(spectral, points, entropy, mean_entropy))


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.1, max_iter=1)


def _closed(steps: int) -> Weights:
    model, data = fresh(mlp), points()
    made = lbfgs(model.parameters())
    for part in batches(data, steps):

        def closure(part: Any = part) -> Tensor:
            made.zero_grad()
            loss = mean_entropy(model, part)
            loss.backward()
            return loss

        made.step(closure)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


_quasi_newton = Simple(mlp, points, entropy, mean_entropy, lbfgs)
add(
    Program(
        "LBFGS",
        "an optimizer that calls the loss itself",
        _quasi_newton.settings,
        _closed,
        _quasi_newton.measure,
    )
)
