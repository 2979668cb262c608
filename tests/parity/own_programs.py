"""Programs with several models or losses, each written twice: for `shoal.Run(step=...)`, and by hand in plain torch.

The second is what the first must equal: one process, the whole global batch, float64.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn, optim
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from shoal import OwnStep
from shoal.seeds import derive
from shoal.train.run_config import RunConfig

SAMPLES = 26
BATCH = 8
"""The last batch has 2 samples: of three workers, one has none."""
STEPS = 4
SEED = 3

Models = dict[str, nn.Module]
Losses = list[dict[str, float]]


def mlp(*sizes: int, out: Callable[[], nn.Module] | None = None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1], *([out()] if out else []))


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator))


def batches() -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Step, inputs and labels, as a run without shuffling has them."""
    x, y = samples().tensors
    for step in range(STEPS):
        rows = slice(step * BATCH, min((step + 1) * BATCH, SAMPLES))
        yield step, x[rows], y[rows]


def draws(step: int, number: int) -> torch.Generator:
    """What `ctx.randn` and `ctx.rand` draw from in their call of that number."""
    return torch.Generator().manual_seed(derive(SEED, "own step", step, number))


def adam(params: Any) -> optim.Optimizer:
    return optim.Adam(params, lr=1e-2, betas=(0.5, 0.9))


def sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.05, momentum=0.9)


def step_with(optimizer: optim.Optimizer, *terms: torch.Tensor, clip: float = math.inf) -> float:
    """What a program by hand does: gradients of the sum of the terms, one update."""
    optimizer.zero_grad()
    sum(terms).backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
    optimizer.step()
    return float(sum(terms).detach())


# A GAN: the generator learns through the discriminator, whose gradients it must not touch.


def gan_models() -> Models:
    return {"gen": mlp(4, 7, 6), "disc": mlp(6, 9, 1)}


def bce(logits: torch.Tensor, real: float) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, real), reduction="sum")


def gan_step(ctx: OwnStep, batch: Any) -> Any:
    x = batch[0]
    gen, disc = ctx["gen"], ctx["disc"]
    fake = gen(ctx.randn(len(x), 4))
    ctx.backward("disc", bce(disc(x), 1.0), len(x))
    ctx.backward("disc", bce(disc(fake.detach()), 0.0), len(x))
    ctx.update("disc")
    ctx.backward("gen", bce(disc(fake), 1.0), len(x))
    ctx.update("gen")
    return {"real": (torch.sigmoid(disc(x)).sum(), len(x))}


def gan_by_hand(models: Models) -> Losses:
    gen, disc = models["gen"], models["disc"]
    opt_g, opt_d, found = adam(gen.parameters()), sgd(disc.parameters()), []
    for step, x, _ in batches():
        fake, n = gen(torch.randn(len(x), 4, generator=draws(step, 1), dtype=torch.float64)), len(x)
        d = step_with(opt_d, bce(disc(x), 1.0) / n, bce(disc(fake.detach()), 0.0) / n)
        g = step_with(opt_g, bce(disc(fake), 1.0) / n)
        found.append({"loss/disc": d, "loss/gen": g, "real": torch.sigmoid(disc(x)).mean().item()})
    return found


def normalised_models() -> Models:
    """With batch normalisation over all workers. Biases before it would learn from rounding alone."""
    gen = nn.Sequential(
        nn.Linear(4, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 6, bias=False)
    )
    disc = nn.Sequential(nn.Linear(6, 9, bias=False), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 1))
    return {"gen": gen, "disc": disc}


# WGAN with gradient penalty: two updates of the critic a step, and a gradient of a gradient.


def penalty(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((slope.norm(2, 1) - 1) ** 2).sum()


def wgan_step(ctx: OwnStep, batch: Any) -> None:
    x = batch[0]
    gen, disc, n = ctx["gen"], ctx["disc"], len(x)
    for _ in range(2):
        fake = gen(ctx.randn(n, 4)).detach()
        ctx.backward("disc", disc(fake).sum() - disc(x).sum(), n)
        ctx.backward("disc", 10 * penalty(disc, x, fake, ctx.rand(n, 1)), n)
        ctx.update("disc")
    if ctx.number % 2 == 0:
        ctx.backward("gen", -disc(gen(ctx.randn(n, 4))).mean())
        ctx.update("gen")


def wgan_by_hand(models: Models) -> Losses:
    gen, disc = models["gen"], models["disc"]
    opt_g, opt_d, found = adam(gen.parameters()), adam(disc.parameters()), []
    for step, x, _ in batches():
        wide, losses = {"dtype": torch.float64}, []
        for turn in range(2):
            fake = gen(torch.randn(len(x), 4, generator=draws(step, 2 * turn + 1), **wide)).detach()
            mix = torch.rand(len(x), 1, generator=draws(step, 2 * turn + 2), **wide)
            gap = disc(fake).mean() - disc(x).mean()
            losses.append(step_with(opt_d, gap, 10 * penalty(disc, x, fake, mix) / len(x)))
        found.append({"loss/disc": sum(losses) / 2})
        if step % 2 == 0:
            z = torch.randn(len(x), 4, generator=draws(step, 5), **wide)
            found[-1]["loss/gen"] = step_with(opt_g, -disc(gen(z)).mean())
    return found


# The first WGAN: the critic's weights are clipped by hand.


def clipped_step(ctx: OwnStep, batch: Any) -> None:
    x = batch[0]
    ctx.backward("disc", (ctx["disc"](ctx["gen"](ctx.randn(len(x), 4)).detach()) - ctx["disc"](x)).mean())
    ctx.update("disc")
    with ctx.change("disc") as disc:
        for p in disc.parameters():
            p.clamp_(-0.1, 0.1)
    ctx.backward("gen", -ctx["disc"](ctx["gen"](ctx.randn(len(x), 4))).mean())
    ctx.update("gen")


def clipped_by_hand(models: Models) -> Losses:
    gen, disc = models["gen"], models["disc"]
    opt_g, opt_d, found = adam(gen.parameters()), sgd(disc.parameters()), []
    for step, x, _ in batches():
        z = [torch.randn(len(x), 4, generator=draws(step, k), dtype=torch.float64) for k in (1, 2)]
        d = step_with(opt_d, (disc(gen(z[0]).detach()) - disc(x)).mean())
        for p in disc.parameters():
            p.data.clamp_(-0.1, 0.1)
        found.append({"loss/disc": d, "loss/gen": step_with(opt_g, -disc(gen(z[1])).mean())})
    return found


# Actor and critic on one trunk: two losses with counts of their own, one of them other than the samples'.


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = mlp(6, 8, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.policy(hidden), self.value(hidden).squeeze(1)


def actor_critic_losses(net: nn.Module, x: torch.Tensor, action: torch.Tensor) -> Any:
    """Policy loss over the steps that are not masked, with their number; value loss."""
    logits, value = net(x)
    reward, acts = x.sum(1), (action > 0).double()
    gain = (reward - value).detach() * acts
    chosen = logits.log_softmax(1).gather(1, action[:, None]).squeeze(1)
    return -(chosen * gain).sum(), acts.sum(), ((reward - value) ** 2).sum()


def actor_critic_step(ctx: OwnStep, batch: Any) -> Any:
    x, action = batch
    policy, acts, value = actor_critic_losses(ctx["net"], x, action)
    ctx.backward("net", policy, acts, retain_graph=True)
    ctx.backward("net", 0.5 * value, len(x))
    ctx.update("net")
    ctx.mean("value", value, len(x))


def actor_critic_by_hand(models: Models) -> Losses:
    net = models["net"]
    optimizer, found = adam(net.parameters()), []
    for _, x, action in batches():
        policy, acts, value = actor_critic_losses(net, x, action)
        loss = step_with(optimizer, policy / acts, 0.5 * value / len(x))
        found.append({"loss/net": loss, "value": value.item() / len(x)})
    return found


# Distillation: the teacher does not learn, and its dropout stays off.


def teacher_and_student() -> Models:
    teacher = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 3)).eval()
    return {"teacher": teacher, "student": mlp(6, 5, 3)}


def distil(models: Any, x: torch.Tensor) -> torch.Tensor:
    wanted = models["teacher"](x).softmax(1)
    return F.kl_div(models["student"](x).log_softmax(1), wanted, reduction="sum")


def distil_step(ctx: OwnStep, batch: Any) -> None:
    x, y = batch
    ctx.backward("student", distil(ctx, x), len(x))
    ctx.backward("student", F.cross_entropy(ctx["student"](x), y))
    ctx.update("student")


def distil_by_hand(models: Models) -> Losses:
    models["teacher"].requires_grad_(False)
    optimizer, found = sgd(models["student"].parameters()), []
    for _, x, y in batches():
        terms = distil(models, x) / len(x), F.cross_entropy(models["student"](x), y)
        found.append({"loss/student": step_with(optimizer, *terms, clip=0.1)})
    return found


# BYOL: a network learns to foretell what a running average of itself says of another view.


def byol_models() -> Models:
    online = mlp(6, 8, 4)
    return {"online": online, "target": copy.deepcopy(online), "head": mlp(4, 5, 4)}


def byol(models: Any, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        wanted = models["target"](two)
    return (2 - 2 * F.cosine_similarity(models["head"](models["online"](one)), wanted)).sum()


def byol_step(ctx: OwnStep, batch: Any) -> None:
    x = batch[0]
    one, two = x + 0.1 * ctx.randn(*x.shape), x + 0.1 * ctx.randn(*x.shape)
    loss = byol(ctx, one, two) + byol(ctx, two, one)
    ctx.backward("online", loss, len(x), retain_graph=True)
    ctx.backward("head", loss, len(x))
    ctx.update("online")
    ctx.update("head")
    ctx.ema("target", of="online", decay=0.9)


def byol_by_hand(models: Models) -> Losses:
    optimizers = adam(models["online"].parameters()), sgd(models["head"].parameters())
    found = []
    for step, x, _ in batches():
        one, two = [
            x + 0.1 * torch.randn(x.shape, generator=draws(step, k), dtype=torch.float64) for k in (1, 2)
        ]
        loss = (byol(models, one, two) + byol(models, two, one)) / len(x)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for p, q in zip(models["target"].parameters(), models["online"].parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
        found.append({"loss/online": loss.item(), "loss/head": loss.item()})
    return found


# Meta-learning: the loss after two inner steps, differentiated through them.


def maml(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Each sample is a task: learn its first half, be measured on the second."""
    total = x.new_zeros(())
    for task, label in zip(x, y, strict=True):
        fast = dict(net.named_parameters())
        for _ in range(2):
            inner = (functional_call(net, fast, task[:3]) - label).square().mean()
            slopes = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), slopes, strict=True)}
        total = total + (functional_call(net, fast, task[3:]) - label).square().mean()
    return total


def maml_step(ctx: OwnStep, batch: Any) -> None:
    ctx.backward("net", maml(ctx["net"], *batch), len(batch[0]))
    ctx.update("net")


def maml_by_hand(models: Models) -> Losses:
    optimizer = adam(models["net"].parameters())
    return [{"loss/net": step_with(optimizer, maml(models["net"], x, y) / len(x))} for _, x, y in batches()]


@dataclass(frozen=True)
class Program:
    models: Callable[[], Models]
    optimizers: dict[str, Any]
    step: Callable[[OwnStep, Any], Any]
    by_hand: Callable[[Models], Losses]
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the run, beside what all have."""

    def fresh(self) -> Models:
        """The models as every run begins with them."""
        torch.manual_seed(7)
        return {name: model.double() for name, model in self.models().items()}

    def reference(self) -> tuple[Losses, dict[str, torch.Tensor]]:
        """What plain torch computes."""
        models = self.fresh()
        losses = self.by_hand(models)
        return losses, {f"{n}.{k}": v.detach() for n, m in models.items() for k, v in m.state_dict().items()}

    def config(self, strategy: str) -> RunConfig:
        return RunConfig(
            models=self.fresh(),
            optimizers=self.optimizers,
            step=self.step,
            data=samples(),
            global_batch=BATCH,
            strategy=strategy,
            precision="fp64",
            shuffle=False,
            seed=SEED,
            **self.settings,
        )


PROGRAMS = {
    "gan": Program(gan_models, {"gen": adam, "disc": sgd}, gan_step, gan_by_hand),
    "normalised": Program(
        normalised_models, {"gen": adam, "disc": sgd}, gan_step, gan_by_hand, {"batchnorm": "sync"}
    ),
    "wgan_gp": Program(gan_models, {"gen": adam, "disc": adam}, wgan_step, wgan_by_hand),
    "clipped": Program(gan_models, {"gen": adam, "disc": sgd}, clipped_step, clipped_by_hand),
    "actor_critic": Program(
        lambda: {"net": ActorCritic()}, {"net": adam}, actor_critic_step, actor_critic_by_hand
    ),
    "distil": Program(teacher_and_student, {"student": sgd}, distil_step, distil_by_hand, {"clip": 0.1}),
    "byol": Program(byol_models, {"online": adam, "head": sgd}, byol_step, byol_by_hand),
    "maml": Program(lambda: {"net": mlp(3, 5, 1)}, {"net": adam}, maml_step, maml_by_hand),
}
