"""Buffers at work: one value after every step where `buffers=` says so, and a word where workers differ unasked.

A model whose buffers have no rule costs nothing in a step. One with rules costs, each step, two small all-reduces: who
has changed what, and the changes themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.report.words import Words
from shoal.torch_private import buffers_of, version_of
from shoal.world.mesh import Mesh
from shoal.world.world import World


@dataclass
class Rule:
    """One buffer with a word, and what has become of it in the present step."""

    name: str
    word: str
    owner: dict[str, Tensor | None]
    """The module's own buffers, in which it stands under `key`: a forward pass may put another tensor there."""
    key: str
    tensor: Tensor
    """The one that holds the value between steps."""
    before: Tensor
    lent: Tensor | None = None
    """What the present forward pass works on."""
    version: int = 0
    changes: Tensor | None = None
    """The sum of what this worker's micro-batches have changed, or the value that its first one has left."""
    seen: set[int] = field(default_factory=set)
    """Micro-batches that have changed it."""

    @property
    def exact(self) -> torch.dtype:
        return torch.float64 if self.tensor.is_floating_point() else torch.int64


class Reconciled:
    """Buffers with the words sum, mean and first, over the workers of `world`, which is the data axis."""

    def __init__(self, model: nn.Module, words: Mapping[str, str], world: World) -> None:
        named = dict(model.named_buffers())
        self._rules = [
            _rule(model, name, word, named[name])
            for name, word in words.items()
            if word != "own" and name in named  # another stage of a pipeline may have it
        ]
        self._world = world.new_group() if self._rules else world
        self._numbers: dict[int, int] = {}

    @staticmethod
    def of(model: nn.Module, words: Mapping[str, str], world: World) -> Reconciled | None:
        """None where no buffer has such a word, on any stage."""
        return Reconciled(model, words, world) if any(word != "own" for word in words.values()) else None

    @torch.no_grad()
    def open_step(self) -> None:
        """Every micro-batch of the step will begin with the values of now."""
        self._numbers = {}
        for rule in self._rules:
            now = rule.owner[rule.key]
            assert now is not None
            if now is not rule.tensor and now is not rule.lent:  # the user's own assignment between two steps
                rule.tensor = now
            rule.owner[rule.key] = rule.tensor
            rule.before = rule.tensor.clone()
            rule.lent = rule.changes = None
            rule.seen = set()

    @contextmanager
    def micro_batch(self, number: int, samples: int) -> Iterator[None]:
        """Around the forward pass of a micro-batch; one of 0 samples leaves nothing behind."""
        # Another tensor for every pass: autograd may still need the one of the pass before.
        for rule in self._rules:
            rule.lent = rule.owner[rule.key] = rule.before.clone()
            rule.version = version_of(rule.lent)
        yield
        if samples:
            self._numbers[number] = samples
            with torch.no_grad():
                for rule in self._rules:
                    self._note(rule, number, samples)

    def _note(self, rule: Rule, number: int, samples: int) -> None:
        now = rule.owner[rule.key]
        assert now is not None
        if (now is rule.lent and version_of(now) == rule.version) or number in rule.seen:
            return  # unchanged; or another stage of this worker has run the same modules for the same samples
        if now.shape != rule.before.shape:
            raise ConfigError(
                f"buffers: '{rule.name}' was {list(rule.before.shape)} and is {list(now.shape)} after a forward pass; "
                "a buffer that changes its size can only be 'own'."
            )
        rule.seen.add(number)
        if rule.word == "first":
            if number == min(self._numbers):
                rule.changes = now.to(rule.exact)
            return
        change = now.to(rule.exact) - rule.before.to(rule.exact)
        change = change * samples if rule.word == "mean" else change
        rule.changes = change if rule.changes is None else rule.changes + change

    @torch.no_grad()
    def close_step(self) -> None:
        """All micro-batches of all workers become one value. Collective."""
        if not self._rules:
            return
        world = self._world
        lowest = min(self._numbers, default=math.inf)
        mine = [lowest, sum(self._numbers.values()), *(float(bool(rule.seen)) for rule in self._rules)]
        table = world.gather_numbers(mine)
        holder = int(table[:, 0].argmin())
        samples, changed = float(table[:, 1].sum()), table[:, 2:].any(0).tolist()
        moved = [rule for rule, flag in zip(self._rules, changed, strict=True) if flag]
        for kind in (torch.float64, torch.int64):
            self._sum([rule for rule in moved if rule.exact is kind], kind, holder, samples)
        for rule in self._rules:
            rule.owner[rule.key] = rule.tensor
            rule.lent = rule.changes = None

    def _sum(self, rules: list[Rule], kind: torch.dtype, holder: int, samples: float) -> None:
        if not rules:
            return
        parts = []
        for rule in rules:
            part = rule.changes
            if rule.word == "first":
                left = rule.before.to(kind) if part is None else part
                part = left if self._world.rank == holder else torch.zeros_like(left)
            parts.append((torch.zeros_like(rule.before, dtype=kind) if part is None else part).reshape(-1))
        total = torch.cat(parts)
        self._world.all_reduce(total).wait()
        start = 0
        for rule in rules:
            part = total[start : start + rule.before.numel()].view(rule.before.shape)
            start += rule.before.numel()
            if rule.word != "first":
                part = rule.before.to(kind) + (part / samples if rule.word == "mean" else part)
            rule.tensor.copy_(part)


def _rule(model: nn.Module, name: str, word: str, tensor: Tensor) -> Rule:
    path, _, key = name.rpartition(".")
    return Rule(name, word, buffers_of(model.get_submodule(path)), key, tensor, tensor)


class BufferWatch:
    """Buffers that nobody has given a word. Says so once where a forward pass changes them, or workers differ."""

    def __init__(
        self,
        model: nn.Module,
        names: Iterable[str],
        own: Iterable[str],
        mesh: Mesh,
        parts: int,
        alone: str,
        words: Words,
    ) -> None:
        """`parts`: micro-batches of a step, of all replicas. `alone`: the strategy, if workers do not always meet."""
        present = {name for name, _ in model.named_buffers()}
        self._model = model
        self._world = mesh.data
        self._alone = alone
        self._words = words
        self._names = [name for name in names if name in present]
        self._own = [name for name in own if name in present]
        self._said: set[str] = set()
        self._start: list[int] = []
        self.new = bool(self._names) and parts > 1
        """Whether the first step is still to be looked at."""

    def before_first(self) -> None:
        """The first step begins."""
        self._start = self._sums()

    def after_first(self) -> None:
        """The first step is over: what forward passes change shows now. Nothing is sent."""
        self.new = False
        found = [n for n, a, b in zip(self._names, self._start, self._sums(), strict=True) if a != b]
        if found and self._alone:
            self._words.say(
                f"shoal: forward passes change {_quoted(found)}, and under {self._alone} each worker's stays its own; "
                "checkpoints and evaluate take the first worker's. Say buffers='own' if that is meant, or use ddp."
            )
        elif found:
            self._said.update(found)
            self._words.say(
                f"shoal: forward passes change {_quoted(found)}, each worker and micro-batch by itself; one process "
                f"sees all samples; checkpoints and evaluate take rank 0's. {_choose(found[0])}."
            )

    def check(self, when: str) -> None:
        """Compare all workers' buffers, and name those that differ, each once. Collective."""
        self._compare(when)
        self._words.meet()

    def _compare(self, when: str) -> None:
        if self._alone or not self._names or self._world.size == 1:
            return
        sums = self._sums()
        whole = float(xxhash.xxh32_intdigest(repr(sums).encode()))
        if len(set(self._world.gather_numbers([whole])[:, 0].tolist())) == 1:
            return
        found = {name: ranks for name, ranks in self._differing(sums).items() if name not in self._said}
        self._said |= found.keys()
        if found:
            ranks = sorted({rank for theirs in found.values() for rank in theirs})
            self._words.say(
                f"shoal: {when} ranks {ranks} differ from rank 0 in {_quoted(list(found))}; checkpoints and evaluate "
                f"take rank 0's. {_choose(next(iter(found)))}."
            )

    def _differing(self, sums: list[int]) -> dict[str, list[int]]:
        """Names, with the ranks that have another value than rank 0."""
        table = self._world.gather_values(sums)
        found = {
            name: [rank for rank, row in enumerate(table) if row[i] != table[0][i]]
            for i, name in enumerate(self._names)
        }
        return {name: ranks for name, ranks in found.items() if ranks}

    @contextmanager
    def lent(self, world: World) -> Iterator[None]:
        """While it lasts, everybody has the first worker's buffers; afterwards those without a rule are as before."""
        named = dict(self._model.named_buffers())
        kept = {name: named[name].clone() for name in (*self._names, *self._own)} if world.size > 1 else {}
        for handle in [world.broadcast(b) for b in self._model.buffers() if b.numel()]:
            handle.wait()
        try:
            yield
        finally:
            for name, value in kept.items():
                named[name].copy_(value)

    def _sums(self) -> list[int]:
        named = dict(self._model.named_buffers())
        return [_sum_of(named[name]) for name in self._names]


def _sum_of(buffer: Tensor) -> int:
    flat = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh32_intdigest(flat.numpy().data) if flat.numel() else 0


def _choose(name: str) -> str:
    return (
        f'Say buffers={{"{name}": "mean"}} for the mean of all values, "sum" for the sum of all changes, "first" for '
        'what does not look at samples, or "own" to leave it so'
    )


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:5]) + (
        f" and {len(names) - 5} more" if len(names) > 5 else ""
    )
