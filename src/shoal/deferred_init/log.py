"""What was done to which storage, and how to do only the part of it that one tensor needs.

The log knows nothing of tensors that exist: storages are numbers, and an argument is a `TensorView` of one. To get
the content of a storage, the operations that wrote it are looked up, then those that wrote what they read, and
so on back; that slice of the log is carried out in its old order. An operation that writes a whole storage
without reading it ends the search, so a weight that was filled three times is filled once.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor, UntypedStorage

from shoal.seeds import Leaf, leaves
from shoal.torch_private import DisableTorchFunction, disable_current_modes, neg_view

SMALL = 64 * 1024
"""Bytes up to which memory is not worth a thought, and what is not random is computed at once."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor, as a window on a storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int = 0
    conj: bool = False
    neg: bool = False

    @classmethod
    def of(cls, tensor: Tensor, storage: int) -> TensorView:
        return cls(
            storage,
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def on(self, storage: UntypedStorage) -> Tensor:
        """The tensor, if this is the content of its storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conj else tensor
        return neg_view(tensor) if self.neg else tensor


Given = tuple[tuple[object, ...], dict[str, object]]
"""The arguments of an operation."""


@overload
def mapped(tree: Given, kind: type[Leaf], change: Callable[[Leaf], object]) -> Given: ...
@overload
def mapped(tree: object, kind: type[Leaf], change: Callable[[Leaf], object]) -> object: ...
def mapped(tree: object, kind: type[Leaf], change: Callable[[Leaf], object]) -> object:
    """Nested arguments or results with everything of that kind changed. `pytree` does that ten times slower."""
    if isinstance(tree, kind):
        return change(tree)
    if type(tree) is dict:
        return {key: mapped(branch, kind, change) for key, branch in tree.items()}
    if type(tree) is list:
        return [mapped(branch, kind, change) for branch in tree]
    if type(tree) is tuple:
        return tuple([mapped(branch, kind, change) for branch in tree])
    return tree


def as_bytes(storage: UntypedStorage) -> Tensor:
    """A whole storage as a tensor."""
    return TensorView(0, torch.uint8, torch.Size([storage.nbytes()]), (1,)).on(storage)


class OwnGenerator:
    """Stands in the arguments of an operation for a generator that the factory passed itself."""


def realised(given: Given, content: dict[int, UntypedStorage], own: torch.Generator | None) -> Given:
    """Arguments with a tensor for each View, and the factory's own generator where it belongs."""
    given = mapped(given, TensorView, lambda view: view.on(content[view.storage]))
    return mapped(given, OwnGenerator, lambda _: own) if own is not None else given


@dataclass(frozen=True, slots=True)
class DeferredOperation:
    """Something that was done, with a View for each tensor."""

    func: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    results: tuple[TensorView | None, ...]
    """Where each tensor that it returns is from then on; None for one of its own arguments."""
    needs: frozenset[int]
    """The storages whose content it depends on."""
    writes: frozenset[int]
    """The storages that it makes or changes."""
    fresh: frozenset[int]
    """Those of them that it makes, or fills without looking at what was there."""
    draw: int | None = None
    """The number of the draw for which it takes from the global generator."""
    generator: Tensor | None = None
    """The state of the factory's own generator before it."""
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a replay left behind, so that the next one need not start again."""

    until: int
    storages: dict[int, UntypedStorage]
    draw: int | None
    state: Tensor


class Log:
    """Every operation of one run of a factory. `seed_draw` seeds the global generators for a draw."""

    def __init__(self, seed_draw: Callable[[int], None]) -> None:
        self._seed_draw = seed_draw
        self._operations: list[DeferredOperation] = []
        self._bytes: list[int] = []
        self._writers: list[list[int]] = []
        self._draws: dict[int, list[int]] = {}
        self._kept: _Kept | None = None

    def storage(self, size: int) -> int:
        """The number of a new storage of so many bytes."""
        self._bytes.append(size)
        self._writers.append([])
        return len(self._bytes) - 1

    def add(self, operation: DeferredOperation) -> None:
        """Note what is done next."""
        number = len(self._operations)
        self._operations.append(operation)
        for storage in operation.writes:
            self._writers[storage].append(number)
        if operation.draw is not None:
            self._draws.setdefault(operation.draw, []).append(number)

    def constant(self, content: Tensor) -> int:
        """A new storage with the bytes of this tensor, which must not change any more."""
        storage = self.storage(content.nbytes)
        made = frozenset([storage])
        self.add(
            DeferredOperation(
                content.clone, (), {}, (TensorView.of(content, storage),), frozenset(), made, made
            )
        )
        return storage

    def content(self, storages: Collection[int]) -> dict[int, UntypedStorage]:
        """The content of these storages after everything so far; the caller may change it."""
        content = self._replay(self._slice(storages, None, whole=False), {*storages}, None)
        for storage in {*storages} - content.keys():  # never written
            content[storage] = memory(self._bytes[storage])
        return content

    def peek(self, storages: Collection[int], lives: Callable[[int], bool]) -> dict[int, UntypedStorage]:
        """The same, to look at only. Remembers what `lives`: a loop of drawing and looking repeats no work."""
        kept = self._kept
        numbers = self._slice(storages, kept, whole=True)
        since = kept.until if kept else 0
        if numbers and numbers[0] < since:  # it needs something older than what was kept
            kept = None
            since = 0
            numbers = self._slice(storages, None, whole=True)
        done = {*numbers}
        touched = {*(kept.storages if kept else ())}.union(*(self._operations[n].writes for n in numbers))
        current = {s for s in touched if (w := self._writers[s][-1]) in done or w < since}
        content = self._replay(numbers, {*storages}.union(filter(lives, current)), kept)
        draws = [draw for n in numbers if (draw := self._operations[n].draw) is not None]
        self._kept = _Kept(
            len(self._operations),
            {s: content[s] for s in current if s in content},
            draws[-1] if draws else kept.draw if kept else None,
            torch.default_generator.get_state() if draws or kept is None else kept.state,
        )
        return content

    def forget(self) -> None:
        """Free what peeking keeps."""
        self._kept = None

    def _slice(self, storages: Collection[int], kept: _Kept | None, *, whole: bool) -> list[int]:
        """The operations that these storages need, in order. A draw is followed from its start, or `whole`."""
        chosen: set[int] = set()
        passed: set[tuple[int, int]] = set()
        todo = [(storage, len(self._operations)) for storage in storages]
        while todo:
            storage, bound = todo.pop()
            writers = self._writers[storage]
            since = kept.until if kept and storage in kept.storages else 0
            for place in range(bisect_left(writers, bound) - 1, -1, -1):
                number = writers[place]
                if number < since or (storage, number) in passed:
                    break
                passed.add((storage, number))
                for also in (number, *self._same_draw(number, kept, whole)):
                    if also not in chosen:
                        chosen.add(also)
                        todo.extend((need, also) for need in self._operations[also].needs)
                if storage in self._operations[number].fresh:
                    break
        return sorted(chosen)

    def _same_draw(self, number: int, kept: _Kept | None, whole: bool) -> Iterator[int]:
        """The operations that move the generator to where this one finds it."""
        draw = self._operations[number].draw
        if draw is not None:
            since = kept.until if kept and kept.draw == draw else 0
            yield from (n for n in self._draws[draw] if since <= n and (whole or n < number))

    def _replay(self, numbers: list[int], keep: set[int], kept: _Kept | None) -> dict[int, UntypedStorage]:
        """Carry out these operations; the content of the storages to keep."""
        content = dict(kept.storages) if kept else {}
        last_use = {s: n for n in numbers for s in self._operations[n].needs | self._operations[n].writes}
        draw = None
        with undisturbed():
            for number in numbers:
                operation = self._operations[number]
                if operation.draw is not None and operation.draw != draw:
                    draw = operation.draw
                    if kept and kept.draw == draw:
                        torch.default_generator.set_state(kept.state)
                    else:
                        self._seed_draw(draw)
                self._perform(operation, content)
                for storage in operation.needs | operation.writes:
                    if last_use[storage] == number and storage not in keep:
                        content.pop(storage, None)
        return {storage: content[storage] for storage in keep if storage in content}

    def _perform(self, operation: DeferredOperation, content: dict[int, UntypedStorage]) -> None:
        made = {view.storage for view in operation.results if view is not None}
        for storage in operation.fresh - made:
            content[storage] = memory(self._bytes[storage])
        own = None
        if operation.generator is not None:
            own = torch.Generator().set_state(operation.generator)
        args, kwargs = realised((operation.args, operation.kwargs), content, own)
        torch.set_default_dtype(operation.default_dtype)
        returned = leaves(operation.func(*args, **kwargs), Tensor)
        for view, tensor in zip(operation.results, returned, strict=True):
            if view is not None:
                content[view.storage] = self._laid_out(tensor, view)

    def _laid_out(self, tensor: Tensor, view: TensorView) -> UntypedStorage:
        """The storage of a tensor, which is to lie in it as expected."""
        storage = tensor.untyped_storage()
        if TensorView.of(tensor, view.storage) != view or storage.nbytes() < self._bytes[view.storage]:
            storage = memory(self._bytes[view.storage])
            view.on(storage).copy_(tensor)
        return storage


def memory(size: int) -> UntypedStorage:
    """A new storage, which costs nothing until it is written and is gone from the process when it is freed.

    What malloc frees it may keep: up to 40 MB more after a few weights of 8 MB.
    """
    if size <= SMALL:
        return torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()
    linux = sys.platform == "linux"
    no_reserve = 0x4000 if linux else 0  # MAP_NORESERVE: more may be asked for than the machine has
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    if linux:
        pages.madvise(mmap.MADV_NOHUGEPAGE)  # else one stray byte costs two megabytes
    return torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Operations inside do what the log says, whatever is set around them."""
    default_dtype = torch.get_default_dtype()
    try:
        with torch.no_grad(), DisableTorchFunction(), disable_current_modes():
            yield
    finally:
        torch.set_default_dtype(default_dtype)
