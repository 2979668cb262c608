"""More kinds of program: those that need more of the face than a model, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from programs import (
    BATCH,
    SAMPLES,
    Program,
    Simple,
    Weights,
    adamw,
    add,
    batches,
    classes,
    entropy,
    fresh,
    mean_entropy,
    mlp,
    numbers,
    points,
    sgd,
    simple,
    trained,
    values,
)

# Data as it is


class Backwards(Sampler[int]):
    """An order of one's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from points()


def loader(data: Any, **settings: Any) -> dict[str, Any]:
    return {"data": DataLoader(data, batch_size=BATCH, **settings), "global_batch": 0}


def reversed_points() -> TensorDataset:
    return TensorDataset(*(tensor.flip(0) for tensor in points().tensors))


_classifier = Simple(mlp, points, entropy, mean_entropy)


def of_loader(name: str, says: str, make: Any, plain: Simple) -> None:
    add(Program(name, says, lambda: {**_classifier.settings(), **make()}, plain.plain, plain.measure))


of_loader("DataLoader", "data=DataLoader(...)", lambda: loader(points()), _classifier)
of_loader(
    "sampler",
    "a DataLoader with a sampler of one's own",
    lambda: loader(points(), sampler=Backwards(SAMPLES)),
    Simple(mlp, reversed_points, entropy, mean_entropy),
)
of_loader("stream", "an IterableDataset", lambda: {"data": Stream()}, _classifier)


# Models that return their own loss


def causal() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def padded_rows() -> list[dict[str, Tensor]]:
    ids, lengths = classes(11, SAMPLES, 6), (classes(4, SAMPLES, seed=5) + 3).tolist()
    kept = [torch.arange(6) < length for length in lengths]
    return [
        {"input_ids": row, "attention_mask": mask.long(), "labels": torch.where(mask, row, -100)}
        for row, mask in zip(ids, kept, strict=True)
    ]


def sequence_classifier() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"intermediate_size": 16, "max_position_embeddings": 8, "num_labels": 3}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**sizes, **more, **none))


def labelled_rows() -> list[dict[str, Tensor]]:
    return [
        {"input_ids": row, "labels": label}
        for row, label in zip(classes(11, SAMPLES, 6), classes(3, SAMPLES), strict=True)
    ]


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def hugging_face(name: str, says: str, make: Any, data: Any) -> None:
    simple(name, says, Simple(make, data, None, _own_loss, adamw, more={"loss": None}))  # type: ignore[arg-type]


hugging_face("BERT", "a Hugging Face classifier that returns its loss", sequence_classifier, labelled_rows)


def _shifted(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    labels = batch["labels"][:, 1:].flatten()
    total = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), labels, ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def _mean_shifted(model: nn.Module, batch: Any) -> Tensor:
    total, count = _shifted(
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]), batch
    )
    return total / count


simple(
    "GPT-2",
    "a Hugging Face language model with padded rows",
    Simple(
        causal,
        padded_rows,
        _shifted,
        _mean_shifted,
        adamw,
        more={"inputs": lambda batch: {name: batch[name] for name in ("input_ids", "attention_mask")}},
    ),
)


# Losses that compare samples


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = mlp(6, 4), mlp(3, 4)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1)


def contrast(left: Tensor, right: Tensor) -> Tensor:
    logits, own = 5 * left @ right.T, torch.arange(len(left))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def gathered(tensor: Tensor) -> Tensor:
    return run.gather(tensor)  # noqa: F821  (the suite sets it, as a script does)


simple(
    "CLIP",
    "two towers, run.gather in the loss",
    Simple(
        Towers,
        values,
        lambda output, _: contrast(gathered(output[0]), gathered(output[1])),  # type: ignore[arg-type,return-value]
        lambda model, batch: contrast(*model(*batch)),
        more={"inputs": lambda batch: {"image": batch[0], "text": batch[1]}},
    ),
)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.normalize(self.net(x), dim=1), F.normalize(self.net(x.flip(1)), dim=1)], 1)


def similar(views: Tensor) -> Tensor:
    rows = views.transpose(0, 1).flatten(0, 1)
    likeness = (5 * rows @ rows.T).fill_diagonal_(-torch.inf)
    half = len(rows) // 2
    return F.cross_entropy(likeness, torch.arange(2 * half).roll(half))


simple(
    "SimCLR",
    "two views of each sample, run.gather in the loss",
    Simple(
        Views,
        points,
        lambda output, _: similar(gathered(output)),  # type: ignore[arg-type,return-value]
        lambda model, batch: similar(model(batch[0])),
    ),
)


def hardest(rows: Tensor, labels: Tensor) -> Tensor:
    apart = torch.cdist(rows, rows)
    same = labels[:, None] == labels[None]
    far, near = (apart * same).amax(1), (apart + 1e3 * same).amin(1)
    return F.relu(far - near + 1.0).mean()


simple(
    "triplets",
    "the hardest pairs of a batch, run.gather in the loss",
    Simple(
        mlp,
        points,
        lambda output, batch: hardest(gathered(output), gathered(batch[1])),  # type: ignore[arg-type,return-value]
        lambda model, batch: hardest(model(batch[0]), batch[1]),
    ),
)


def shrink(model: nn.Module) -> Tensor:
    return 0.05 * torch.stack([p.square().sum() for p in model.parameters()]).sum().sqrt()


simple(
    "penalty",
    "penalty=: a norm over all weights, once per step",
    Simple(mlp, points, entropy, lambda m, b: mean_entropy(m, b) + shrink(m), more={"penalty": shrink}),
)


# Weights beside the weights, buffers, compiled blocks


def _averaged(steps: int) -> Weights:
    held: Weights = {}

    def follow(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        del number, optimizer
        for name, value in model.state_dict().items():
            held[name].lerp_(value, 0.1)

    model = fresh(mlp)
    held.update({name: value.detach().clone() for name, value in model.state_dict().items()})
    trained(model, mean_entropy, sgd, points(), steps=steps, after_step=follow)
    return held


add(
    Program(
        "EMA",
        "ema=0.9: an average of the weights",
        lambda: {**_classifier.settings(), "ema": 0.9},
        _averaged,
        _classifier.measure,
        weights=lambda run: run.state_dict(weights="ema"),
    )
)


class Codes(nn.Module):
    """A codebook that follows the samples nearest to each code, as in VQ-VAE: sums that are changed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(6, 4)
        self.codes = nn.Buffer(torch.randn(3, 4))
        self.seen = nn.Buffer(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        nearest = torch.cdist(z, self.codes.clone()).argmin(1)
        if self.training:
            with torch.no_grad():
                self.seen.index_add_(0, nearest, torch.ones(len(x), dtype=x.dtype))
                self.codes.index_add_(0, nearest, 0.01 * (z - self.codes[nearest]))
        return z


simple(
    "codebook",
    'buffers="sum": statistics of the samples, changed in forward',
    Simple(
        Codes,
        lambda: TensorDataset(numbers(SAMPLES, 6), numbers(SAMPLES, 4, seed=3)),
        lambda output, batch: ((output - batch[1]).square().sum(), output.numel()),
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        more={"buffers": "sum"},
    ),
)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.calls = nn.Buffer(torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.net(x)


simple(
    "counter",
    'buffers="first": a count of forward passes',
    Simple(Counting, points, entropy, mean_entropy, more={"buffers": "first"}),
)
simple(
    "compiled",
    'compile="aot_eager"',
    Simple(mlp, points, entropy, mean_entropy, more={"compile": "aot_eager"}),
)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens).mean(1)))


simple(
    "sparse gradients",
    "nn.Embedding(sparse=True)",
    Simple(
        Sparse,
        lambda: TensorDataset(classes(11, SAMPLES, 5), classes(3, SAMPLES)),
        entropy,
        mean_entropy,
        partial(torch.optim.SGD, lr=0.1),
    ),
)


# What changes while it trains


def _thaw(run: Any) -> None:
    run.module[2].requires_grad_(True)


def _frozen() -> nn.Module:
    net = mlp()
    net[2].requires_grad_(False)
    return net


def _thawed(steps: int) -> Weights:
    model = fresh(_frozen)

    def after(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number == 0:
            model[2].requires_grad_(True)  # type: ignore[index]
            optimizer.add_param_group({"params": list(model[2].parameters())})  # type: ignore[index]

    return trained(model, mean_entropy, sgd, points(), steps=steps, after_step=after)


_unfrozen = Simple(_frozen, points, entropy, mean_entropy)
add(
    Program(
        "unfreezing",
        "a layer begins to learn after the first step",
        _unfrozen.settings,
        _thawed,
        _unfrozen.measure,
        drive=_thaw,
        alone_in=("pp2",),
    )
)


def _hooked() -> nn.Module:
    net = mlp()
    net[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return net


simple("gradient hook", "a hook that clamps one gradient", Simple(_hooked, points, entropy, mean_entropy))


# Steps of one's own


def _step_settings(
    models: Mapping[str, Any], step: Any, learning: Mapping[str, Any], data: Any
) -> dict[str, Any]:
    return {
        "models": {name: fresh(make) for name, make in models.items()},
        "optimizers": dict(learning),
        "step": step,
        "data": data,
        "global_batch": BATCH,
    }


def own(
    name: str, says: str, models: Mapping[str, Any], step: Any, plain: Any, learning: Any, data: Any
) -> None:
    """A program with a step; `plain` is (models, optimizers, batch) -> None."""

    def by_hand(steps: int) -> Weights:
        made = {one: fresh(make) for one, make in models.items()}
        for one, model in made.items():
            model.requires_grad_(one in learning)
        optimizers = {one: learning[one](made[one].parameters()) for one in learning}
        for part in batches(data(), steps):
            plain(made, optimizers, part)
        return {
            f"{one}.{key}": v.detach().clone() for one, m in made.items() for key, v in m.state_dict().items()
        }

    def measure(weights: Weights | None) -> float:
        raise NotImplementedError("no strategy that only converges takes a step")

    add(Program(name, says, lambda: _step_settings(models, step, learning, data()), by_hand, measure))


def bce(logits: Tensor, real: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real), reduction="sum")


def noise_and_points() -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, 6), numbers(SAMPLES, 4, seed=9))


def gan_step(ctx: Any, batch: Any) -> None:
    real, noise = batch
    fake, n = ctx["gen"](noise), len(real)
    ctx.backward("disc", bce(ctx["disc"](real), 1.0), n)
    ctx.backward("disc", bce(ctx["disc"](fake.detach()), 0.0), n)
    ctx.update("disc")
    ctx.backward("gen", bce(ctx["disc"](fake), 1.0), n)
    ctx.update("gen")


def gan_by_hand(models: Any, optimizers: Any, batch: Any) -> None:
    real, noise = batch
    fake, n = models["gen"](noise), len(real)
    optimizers["disc"].zero_grad()
    ((bce(models["disc"](real), 1.0) + bce(models["disc"](fake.detach()), 0.0)) / n).backward()
    optimizers["disc"].step()
    optimizers["gen"].zero_grad()
    (bce(models["disc"](fake), 1.0) / n).backward()
    optimizers["gen"].step()


_pair = {"gen": partial(mlp, 4, 6), "disc": partial(mlp, 6, 1)}
_both = {"gen": adamw, "disc": adamw}
own("GAN", "two models against each other, step=", _pair, gan_step, gan_by_hand, _both, noise_and_points)


def slopes(disc: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    between = ((real + fake) / 2).requires_grad_(True)
    (slope,) = torch.autograd.grad(disc(between).sum(), between, create_graph=True)
    return (slope.norm(dim=1) - 1).square()


def wgan_step(ctx: Any, batch: Any) -> None:
    real, noise = batch
    gen, disc, n = ctx["gen"], ctx["disc"], len(real)
    fake = gen(noise)
    apart = disc(fake.detach()) - disc(real)
    ctx.backward("disc", apart.sum() + 10 * slopes(disc, real, fake.detach()).sum(), n)
    ctx.update("disc")
    ctx.backward("gen", -disc(fake).sum(), n)
    ctx.update("gen")


def wgan_by_hand(models: Any, optimizers: Any, batch: Any) -> None:
    real, noise = batch
    gen, disc = models["gen"], models["disc"]
    fake = gen(noise)
    optimizers["disc"].zero_grad()
    apart = (disc(fake.detach()) - disc(real)).mean()
    (apart + 10 * slopes(disc, real, fake.detach()).mean()).backward()
    optimizers["disc"].step()
    optimizers["gen"].zero_grad()
    (-disc(fake).mean()).backward()
    optimizers["gen"].step()


own("WGAN-GP", "a gradient penalty, step=", _pair, wgan_step, wgan_by_hand, _both, noise_and_points)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.trunk(x))
        return self.actor(x), self.critic(x)[:, 0]


def episodes() -> TensorDataset:
    return TensorDataset(numbers(SAMPLES, 6), classes(3, SAMPLES), numbers(SAMPLES, seed=3))


def actor_and_critic(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, Tensor]:
    logits, value = output
    gain = (batch[2] - value).detach()
    chosen = logits.log_softmax(-1).gather(1, batch[1][:, None])[:, 0]
    return -(chosen * gain).sum(), (batch[2] - value).square().sum()


def policy_step(ctx: Any, batch: Any) -> None:
    actor, critic = actor_and_critic(ctx["both"](batch[0]), batch)
    ctx.backward("both", actor, len(batch[0]), retain_graph=True)
    ctx.backward("both", 0.5 * critic, len(batch[0]))
    ctx.update("both")


def policy_by_hand(models: Any, optimizers: Any, batch: Any) -> None:
    actor, critic = actor_and_critic(models["both"](batch[0]), batch)
    optimizers["both"].zero_grad()
    ((actor + 0.5 * critic) / len(batch[0])).backward()
    optimizers["both"].step()


own(
    "actor and critic",
    "two losses on one trunk, step=",
    {"both": ActorCritic},
    policy_step,
    policy_by_hand,
    {"both": adamw},
    episodes,
)


def agreement(online: nn.Module, target: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        wanted = F.normalize(target(x.flip(1)), dim=1)
    return (2 - 2 * (F.normalize(online(x), dim=1) * wanted).sum(1)).sum()


def byol_step(ctx: Any, batch: Any) -> None:
    ctx.backward("online", agreement(ctx["online"], ctx["target"], batch[0]), len(batch[0]))
    ctx.update("online")
    ctx.ema("target", of="online", decay=0.9)


def byol_by_hand(models: Any, optimizers: Any, batch: Any) -> None:
    optimizers["online"].zero_grad()
    (agreement(models["online"], models["target"], batch[0]) / len(batch[0])).backward()
    optimizers["online"].step()
    with torch.no_grad():
        for follower, leader in zip(
            models["target"].parameters(), models["online"].parameters(), strict=True
        ):
            follower.lerp_(leader, 0.1)


own(
    "BYOL",
    "a target that follows, ctx.ema in step=",
    {"online": mlp, "target": partial(mlp, width=8)},
    byol_step,
    byol_by_hand,
    {"online": sgd},
    points,
)
