"""Which parts of a model are its blocks: what zero3 gathers as one unit and what recompute runs again.

Blocks are the layers that repeat. Where nothing repeats, or only a small part of the model, its large children are
blocks too. Only the structure is read: nothing runs, so a model on the meta device will do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.utils import parametrize

SMALL = 0.05
"""A part below this share, of its model or of its largest neighbour, is not worth being a block."""

OPEN = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)
"""Those of torch's own modules that call their children. The others may use a child's weight without calling it."""


def find_blocks(model: nn.Module, largest: int = 2**30) -> tuple[str, ...]:
    """The dotted names of a model's blocks, in the order in which the model holds them; there may be none.

    No two blocks overlap or share a parameter, and none shares one with the rest of the model: tied weights stay
    outside. Every block has a forward of its own. A block of more than `largest` parameters is divided if it can be.
    That a module is called cannot be seen from the structure; it is taken to be if it has a forward.

    >>> layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3))
    >>> find_blocks(nn.ModuleDict({"embed": nn.Embedding(10, 8), "layers": layers}))
    ('layers.0', 'layers.1', 'layers.2')
    >>> find_blocks(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)))
    ('0', '2')
    >>> find_blocks(nn.Linear(8, 8))
    ()
    """
    search = _Search(model, largest)
    found = set(search.inside("", model))
    return tuple(name for name, _ in model.named_modules() if name in found)


class _Search:
    """One search: where parameters occur in the whole model, and what was asked for."""

    def __init__(self, model: nn.Module, largest: int) -> None:
        self._everywhere = _occurrences(model)
        self._largest = largest

    def inside(self, name: str, module: nn.Module) -> list[str]:
        """The blocks inside one module, itself not among them."""
        if not _is_open(module):
            return []
        repeated = dict(self._repeated(name, module))
        whole = _size(module)
        found = [block for each, member in repeated.items() for block in self._fitting(each, member)]
        if sum(map(_size, repeated.values())) < SMALL * whole:  # none, or a detail
            found += list(self._large(name, module, whole, taken=tuple(found)))
        return found

    def _repeated(self, name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The members of the outermost lists that have members alike."""
        members = self._alike(module) if isinstance(module, nn.Sequential | nn.ModuleList) else []
        for key, child in module.named_children():
            place = _join(name, key)
            if child in members:
                yield from ((each, part) for each, part in _called(place, child) if self._is_closed(part))
            elif _is_open(child):
                yield from self._repeated(place, child)

    def _alike(self, sequence: nn.Module) -> list[nn.Module]:
        """The members of a list that are blocks, if two are alike: one class, and shapes that one has are the other's.

        So one may have something more. A member of that class and quite other shapes is a block too: the first layer
        often differs.
        """
        closed = [child for child in sequence.children() if self._is_closed(child)]
        enough = SMALL * max(map(_size, closed), default=0)
        members = [child for child in closed if _size(child) >= enough]
        kinds = Counter((_class(member), _shapes(member)) for member in members)
        repeated = {
            kind
            for (kind, shapes), count in kinds.items()
            if count > 1 or any(kind is other and shapes < more for other, more in kinds)
        }
        return [member for member in members if _class(member) in repeated]

    def _large(self, name: str, module: nn.Module, whole: int, taken: tuple[str, ...]) -> Iterator[str]:
        """The large children; one that holds more than half of `whole`, or blocks already, is looked into first."""
        for key, child in module.named_children():
            place = _join(name, key)
            size = _size(child)
            if place in taken:
                continue
            mixed = any(each.startswith(f"{place}.") for each in taken)
            within: list[str] = []
            if _is_open(child) and (mixed or 2 * size > whole or not _has_forward(child)):
                within = list(self._large(place, child, whole, taken))
            if within or mixed:
                yield from within
            elif size >= SMALL * whole and _has_forward(child) and self._is_closed(child):
                yield from self._fitting(place, child)

    def _fitting(self, name: str, module: nn.Module) -> list[str]:
        too_large = _size(module) > self._largest
        return (self.inside(name, module) if too_large else []) or [name]

    def _is_closed(self, module: nn.Module) -> bool:
        """Whether it has parameters, and nothing outside has one of them."""
        here = _occurrences(module)
        return bool(here) and all(count == self._everywhere[key] for key, count in here.items())


def _occurrences(module: nn.Module) -> Counter[int]:
    return Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _class(module: nn.Module) -> type[nn.Module]:
    kind: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return kind


def _shapes(module: nn.Module) -> frozenset[tuple[str, torch.Size]]:
    return frozenset((name, parameter.shape) for name, parameter in module.named_parameters())


def _has_forward(module: nn.Module) -> bool:
    """Containers such as nn.ModuleList have none."""
    return type(module).forward is not nn.Module.forward


def _is_open(module: nn.Module) -> bool:
    """Whether its children are called as modules, as far as one can tell."""
    theirs = type(module).__module__.startswith("torch.nn.")
    return isinstance(module, OPEN) or not (theirs or parametrize.is_parametrized(module))


def _called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module, or if it only holds others, those of them that are called."""
    if _has_forward(module):
        yield name, module
        return
    for key, child in module.named_children():
        if any(True for _ in child.parameters()):
            yield from _called(_join(name, key), child)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
