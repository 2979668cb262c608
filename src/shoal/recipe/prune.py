"""Pruning while training: weights become zero and stay so, until as many are zero as is asked for.

    prune(0.8, begin=100, end=900)               the smallest 80 % of all weights, by the cubic schedule
    prune(0.5, begin=100, scope=layer)           half of each layer at once, after step 100
    prune(0.5, begin=100, pattern="2:4")         two of every four along a row, as sparse tensor cores want it
    prune(0.9, end=500, kind=movement)           by how far training has moved each weight towards zero

The entries are those that one process would choose, bit for bit: workers agree on one threshold (select.py), and each
keeps the mask of what it updates (per_element.py). Masks act between `apply` and `publish`, so nobody ever sees a
pruned weight that is not zero; they are saved with the checkpoint, and cut anew with the parameters. What is pruned
stays pruned. Sparsity is in `step.metrics["sparsity"]`.

Zhu and Gupta, "To prune, or not to prune", 2017 (the cubic schedule); Sanh et al., "Movement Pruning: Adaptive
Sparsity by Fine-Tuning", NeurIPS 2020; Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021 (2:4).

When to use: a smaller file, or hardware and kernels that skip zeros. Dense kernels are not faster with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from shoal.errors import ConfigError
from shoal.exchange.contract import ExtraState, LocalShard
from shoal.recipe.contract import Preparation, Recipe, Running, RunView
from shoal.recipe.names import matching
from shoal.recipe.patterns import PATTERNS, chosen_in_pattern, share_of
from shoal.recipe.per_element import PerElement
from shoal.recipe.select import Scored, choose
from shoal.seeds import derive
from shoal.torch_private import foreach_mul_
from shoal.types import Promise

KINDS = ("magnitude", "movement", "random")
SCOPES = ("global", "layer")
SCHEDULES = ("cubic", "oneshot")


@dataclass(frozen=True)
class Prune(Recipe):
    """A share of the weights becomes zero in the course of training, and stays so."""

    promise: ClassVar[Promise] = Promise.EXACT
    summary: ClassVar[str] = "weights become zero step by step, the same ones as on one process"
    refuses: ClassVar[Mapping[str, str]] = {
        "uses_servers": "servers update the parameters, where no mask is; use ddp, a zero or shared",
        "updates_alone": "each worker trains alone between two meetings, and masks would differ; use ddp, a zero or "
        "shared",
    }
    sparsity: float
    kind: str = "magnitude"
    """What tells which weights go: magnitude, movement, or random."""
    scope: str = "global"
    """One threshold for all weights (global), or one for each parameter (layer)."""
    pattern: str = "unstructured"
    """Single weights, "2:4" (two of four along a row), or "block" (squares of `block` × `block`)."""
    schedule: str = ""
    """cubic, from `begin` to `end`; oneshot, at `begin`. Left out: cubic where `end` is given."""
    begin: int = 1
    """The first weights go after so many steps."""
    end: int = 0
    """After so many steps all that is asked for is gone (cubic)."""
    every: int = 10
    """Steps between two times that more weights go (cubic)."""
    block: int = 4
    names: str = "*"
    """Of which parameters, by pattern: matrices and kernels, where nothing is said."""

    def __post_init__(self) -> None:
        for what, given, known in (
            ("kind", self.kind, KINDS),
            ("scope", self.scope, SCOPES),
            ("pattern", self.pattern, PATTERNS),
            ("schedule", self.schedule or SCHEDULES[0], SCHEDULES),
        ):
            if given not in known:
                raise ConfigError(f"prune: {what}={given}; it is one of {', '.join(known)}.")
        if not 0 < self.sparsity < 1:
            raise ConfigError(
                f"prune: sparsity={self.sparsity:g}; it is the share of weights that become zero, such as 0.8."
            )
        if self.begin < 1 or self.every < 1 or self.block < 1:
            raise ConfigError(
                f"prune: begin={self.begin}, every={self.every}, block={self.block}; each is 1 or more."
            )
        if self.gradual and self.end <= self.begin:
            raise ConfigError(
                f"prune: end={self.end} after begin={self.begin}; a cubic schedule needs an end that comes later, as "
                "in prune(0.8, begin=100, end=900), or take schedule=oneshot."
            )
        if self.pattern == "2:4" and (self.sparsity != 0.5 or self.gradual):
            raise ConfigError(
                f"prune: pattern=2:4 makes half of the weights zero at once, and sparsity={self.sparsity:g} with "
                f"schedule={'cubic' if self.gradual else 'oneshot'} is asked for; use prune(0.5, begin=N, pattern=2:4)."
            )

    @property
    def gradual(self) -> bool:
        """Whether weights go little by little."""
        return self.schedule == "cubic" or (self.schedule == "" and self.end > 0)

    def level(self, done: int) -> float:
        """The share of weights that is to be gone after so many steps.

        >>> [Prune(0.8, begin=2, end=6, every=2).level(done) for done in (1, 2, 4, 5, 6, 9)]
        [0.0, 0.0, 0.7, 0.7, 0.8, 0.8]
        """
        if done < self.begin:
            return 0.0
        if not self.gradual or done >= self.end:
            return self.sparsity
        steps = (done - self.begin) // self.every * self.every
        return round(self.sparsity * (1 - (1 - steps / (self.end - self.begin)) ** 3), 12)

    def prepare(self, preparation: Preparation) -> None:
        """Refuse a model that has nothing to prune, or not in this pattern."""
        self.chosen(
            {name: tuple(p.shape) for name, p in preparation.model.named_parameters() if p.requires_grad}
        )

    def chosen(self, sizes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """The parameters of which weights go, of those that learn."""
        fitting = matching("prune", self.names, sizes)
        explicit = {name for name in fitting if self.names != "*"}
        found = [name for name in fitting if len(sizes[name]) > 1]
        if not found:
            raise ConfigError(
                f"prune: no parameter that fits '{self.names}' has two dimensions or more; vectors are not pruned."
            )
        if self.pattern == "2:4":
            odd = [name for name in found if sizes[name][-1] % 4]
            if odd and explicit:
                raise ConfigError(
                    f"prune: '{odd[0]}' of {list(sizes[odd[0]])} has no whole groups of four along its rows; leave it "
                    "out of names=, or use pattern=unstructured."
                )
            found = [name for name in found if name not in odd]
            if not found:
                raise ConfigError(
                    "prune: no parameter has whole groups of four along its rows (pattern=2:4)."
                )
        return found

    def run(self, view: RunView) -> Running:
        return Pruning(self, view)


class Pruning(Running):
    """Masks, and when there are more of them."""

    def __init__(self, asked: Prune, view: RunView) -> None:
        self._asked = asked
        self._view = view
        sizes = {name: tuple(view.sizes[name]) for name in view.learning}
        self._sizes = {name: sizes[name] for name in asked.chosen(sizes)}
        """Of the whole model, in its order: the same on every worker."""
        numels = [math.prod(size) for size in self._sizes.values()]
        self._total = sum(numels)
        self._offsets = {name: sum(numels[:place]) for place, name in enumerate(self._sizes)}
        here = {
            name for name, _ in view.exchange.module.named_parameters() if view.first(name) in self._sizes
        }
        self._mask = PerElement(view, here, torch.bool)
        self._moved = PerElement(view, here) if asked.kind == "movement" else None
        self._moves: list[torch.Tensor | None] = []
        """What this step adds to the scores, if it counts: one that overflows is discarded."""
        self._kept: list[torch.Tensor] = []
        """1 where a weight stays, in its own format: to multiply by that takes a fifth of what filling takes."""
        self._kept_of: list[torch.Tensor] | None = None
        """The flags that this was made from."""
        self._level = 0.0
        self._sparsity = 0.0

    def on_gradients(self, step: int, mean: float) -> None:
        del step
        if self._moved is None and not self._view.clips:
            return
        gradients = {(g.name, g.start): g.tensor for g in self._view.exchange.gradient_shards()}
        self._mask.follow()
        if self._moved is not None:
            self._moved.follow()
            self._moves = [
                None
                if (g := gradients.get((shard.name, shard.start))) is None
                else (shard.tensor * g).mul_(-mean)
                for shard in self._moved.shards
            ]
        for shard, flags in zip(self._mask.shards, self._mask.values, strict=True):
            gradient = gradients.get((shard.name, shard.start))
            if gradient is not None and self._view.clips and self._level > 0:
                gradient.masked_fill_(flags.view(gradient.shape), 0.0)  # what is not there is not in the norm

    def applied(self, step: int) -> None:
        if self._moved is not None:
            for score, move in zip(self._moved.values, self._moves, strict=True):
                if move is not None:
                    score += move
            self._moves = [None] * len(self._moves)
        level = self._asked.level(step + 1)
        if level == 0.0:
            return
        self._mask.follow()
        if level > self._level:
            self._prune(level)
        if self._kept_of is not self._mask.values:
            held = zip(self._mask.shards, self._mask.values, strict=True)
            self._kept = [(~flags).to(shard.tensor.dtype) for shard, flags in held]
            self._kept_of = self._mask.values
        if self._kept:
            foreach_mul_([shard.tensor for shard in self._mask.shards], self._kept)

    def report(self) -> Mapping[str, float]:
        return {"sparsity": self._sparsity}

    def extras(self) -> list[ExtraState]:
        moved = [] if self._moved is None else self._moved.extras(f"{self._view.name}-moved")
        return [*self._mask.extras(f"{self._view.name}-mask"), *moved]

    def state(self) -> dict[str, object]:
        return {"level": self._level, "sparsity": self._sparsity}

    def go_on(self, state: Mapping[str, object] | None) -> str:
        self._kept_of = None
        self._level = 0.0 if state is None else float(str(state["level"]))
        self._sparsity = 0.0 if state is None else float(str(state["sparsity"]))
        if state is not None:
            return ""
        self._mask.clear()
        if self._moved is not None:
            self._moved.clear()
        return f"it has no {self._view.name}, which begins with the weights as they are now"

    def _prune(self, level: float) -> None:
        """Let more weights go, until as many are gone as this level asks for. Collective."""
        counted = self._mask.counted()
        scored = [self._scored(*entry) for entry in zip(self._mask.shards, self._mask.values, strict=True)]
        if self._asked.pattern == "unstructured":
            groups = len(self._sizes) if self._asked.scope == "layer" else 1
            numels = [math.prod(size) for size in self._sizes.values()] if groups > 1 else [self._total]
            mine = [part for part, counts in zip(scored, counted, strict=True) if counts]
            found = choose(self._view.mesh.world, mine, [share_of(level, numel) for numel in numels])
            gone = [found[part.group].of(part.scores, part.places) for part in scored]
        else:
            gone = chosen_in_pattern(
                self._asked.pattern,
                self._asked.block,
                self._asked.scope,
                level,
                self._sizes,
                self._view.mesh.world,
                scored,
                counted,
            )
        self._kept_of = None
        number = torch.zeros(1, dtype=torch.int64, device="cpu")
        for flags, chosen, counts in zip(self._mask.values, gone, counted, strict=True):
            flags |= chosen.view(flags.shape)
            number += int(flags.sum()) if counts else 0
        self._view.mesh.world.all_reduce(number).wait()
        self._level = level
        self._sparsity = int(number) / self._total

    def _scored(self, shard: LocalShard, flags: torch.Tensor) -> Scored:
        """The scores of what is here of a parameter; what is gone comes first."""
        name = self._view.first(shard.name)
        region = self._view.region(shard)
        places = torch.arange(region.start, region.stop)
        if region.part_shape != region.shape:
            places = region.of(torch.arange(math.prod(region.shape)).view(region.shape))
        if self._asked.kind == "random":
            generator = torch.Generator().manual_seed(derive(self._view.seed, "prune", name))
            drawn = torch.rand(math.prod(region.shape), dtype=torch.float64, generator=generator)
            scores = drawn[places]
        elif self._moved is not None:
            index = [(s.name, s.start) for s in self._moved.shards].index((shard.name, shard.start))
            scores = self._moved.values[index].reshape(-1).double()
        else:
            scores = shard.tensor.detach().reshape(-1).double().abs()
        scores = scores.to(flags.device).masked_fill(flags.reshape(-1), -math.inf)
        group = list(self._sizes).index(name) if self._asked.scope == "layer" else 0
        return Scored(group, scores, (places + self._offsets[name]).to(flags.device))
