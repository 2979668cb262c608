"""Run a factory without computing: its tensors look real, and what should happen to them is logged.

A deferred tensor is an ordinary CPU tensor on memory that is never touched, so the kernel never provides it,
and nothing in the factory can tell the difference: device, class, strides and copying are what they always are.
What cannot wait is computed at once: small things that nothing random went into, and whatever the factory looks at
(`item()`, `numpy()`, a condition).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from shoal.deferred_init.log import (
    SMALL,
    DeferredOperation,
    Given,
    Log,
    OwnGenerator,
    TensorView,
    as_bytes,
    mapped,
    realised,
    undisturbed,
)
from shoal.deferred_init.outline import (
    CannotDefer,
    Unpredictable,
    changed,
    fills_all,
    makes_little,
    on_meta,
    only_looks,
    outline,
    untouched,
)
from shoal.seeds import Args, Kwargs, Name, NamedDraws, Operation, leaves, strided
from shoal.torch_private import DisableTorchFunction, schema_of, storage_address, storage_from_weak

READERS = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__, Tensor.__reduce_ex__})
"""What hands out a tensor's memory without asking for an operation."""


class Deferring(NamedDraws):
    """Watches a factory like NamedDraws, but logs what it does instead of doing it."""

    def __init__(self, names: Sequence[Name], seed: int) -> None:
        super().__init__(names, seed)
        self.log = Log(self.seed_draw)
        self._looks = _Looks(self)
        # By address, as in NamedDraws. The number is that of the storage in the log.
        self._made: dict[int, StorageWeakRef] = {}
        self._deferred: dict[int, tuple[StorageWeakRef, int]] = {}
        self._addresses: dict[int, int] = {}
        self._constants: dict[int, tuple[StorageWeakRef, Tensor, int]] = {}

    def __enter__(self) -> Self:
        self._looks.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._looks.__exit__(*error)  # type: ignore[no-untyped-call]
        self._init_call = None  # its frame holds tensors
        self.log.forget()

    def follow(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        """As in NamedDraws; what is done here is not the factory's doing."""
        with DisableTorchFunction():
            return super().follow(func, args, kwargs)

    def begin_draw(self) -> int:
        """The number of the draw; a new one needs nothing that was kept for the one before."""
        before = self._count
        number = super().begin_draw()
        if number >= before:
            self.log.forget()
        return number

    def was_made(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor was made while watching."""
        return storage_address(tensor) in self._made

    def view(self, tensor: Tensor) -> TensorView | None:
        """What the log knows a tensor as; None if its values are there."""
        number = self._number(tensor)
        return None if number is None else TensorView.of(tensor, number)

    def discard(self) -> None:
        """Give each deferred tensor that somebody still holds its values, in place."""
        if not all(reference.expired() for reference, _ in self._deferred.values()):  # type: ignore[no-untyped-call]
            gc.collect()
        for reference, number in list(self._deferred.values()):
            storage = storage_from_weak(reference.cdata)
            if storage is not None:
                self._fill(storage, number)

    def make_real(self, tensor: Tensor) -> None:
        """Give a tensor its values, in place."""
        number = self._number(tensor)
        if number is not None:
            self._fill(tensor.untyped_storage(), number)

    def note_made(self, tensor: Tensor) -> None:
        """The factory made this tensor's storage."""
        reference = _weak(tensor)
        self._made[reference.cdata] = reference

    def execute(self, func: Operation, args: Args, kwargs: Kwargs, draw: int | None) -> object:
        """Do it at once if it is cheap or cannot wait; else log it and return tensors that look as if."""
        tensors = strided((args, kwargs))
        touched = any(self._number(tensor) is not None for tensor in tensors)
        if only_looks(func):
            if touched and schema_of(func).name.startswith("aten::resize"):
                raise CannotDefer(f"the factory calls {func}")
            result = func(*args, **kwargs)
            lifted = func is torch.ops.aten.lift_fresh.default  # how torch.tensor and from_numpy end
            if lifted and isinstance(result, Tensor):
                self.note_made(result)
            return result
        owns = leaves((args, kwargs), torch.Generator)
        waits = touched or draw is not None or bool(owns)
        at_once = not waits and (makes_little(args, tensors) or strided(changed(func, args, kwargs)))
        if at_once or on_meta(tensors, kwargs):
            return self._done(func(*args, **kwargs), tensors)
        try:
            looks = outline(func, args, kwargs)
        except Unpredictable as reason:
            if draw is not None or owns:
                raise CannotDefer(f"the factory draws with {func}: {reason}") from None
            if touched:
                return self._compute(func, args, kwargs)
            return self._done(func(*args, **kwargs), tensors)
        if not waits and sum(new.untyped_storage().nbytes() for new in strided(looks)) <= SMALL:
            return self._done(func(*args, **kwargs), tensors)
        return self._defer(func, args, kwargs, looks, draw, owns)

    def _defer(
        self,
        func: Operation,
        args: Args,
        kwargs: Kwargs,
        looks: object,
        draw: int | None,
        owns: Sequence[torch.Generator],
    ) -> object:
        """Log an operation whose results will look like this."""
        given, needs, writes, fresh = self._describe(func, args, kwargs)
        state = None
        if owns:  # others may use it next: it has to move on now
            state = owns[0].get_state()
            content = self.log.content([view.storage for view in _views(given)])
            with undisturbed():
                now = realised(given, content, owns[0])
                func(*now[0], **now[1])
        results: list[TensorView | None] = []

        def make(look: Tensor) -> Tensor:
            if not look.is_meta:
                results.append(None)
                return look
            tensor = untouched(look)
            results.append(TensorView.of(tensor, self._begin(tensor, None)))
            self.note_made(tensor)
            return tensor

        result = mapped(looks, Tensor, make)
        made = frozenset(view.storage for view in results if view is not None)
        self.log.add(
            DeferredOperation(func, *given, tuple(results), needs, writes | made, fresh | made, draw, state)
        )
        return result

    def _compute(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        """Carry out an operation on deferred tensors; what it changes stays deferred."""
        changes = any(self._number(tensor) is not None for tensor in strided(changed(func, args, kwargs)))
        described = self._describe(func, args, kwargs) if changes else None
        deferred = {id(t): v for t in strided((args, kwargs)) if (v := self.view(t)) is not None}
        numbers = {view.storage for view in deferred.values()}
        content = self.log.content(numbers) if changes else self.log.peek(numbers, self._lives)
        back: dict[int, Tensor] = {}

        def real(tensor: Tensor) -> Tensor:
            view = deferred.get(id(tensor))
            if view is None:
                return tensor
            copy = view.on(content[view.storage])
            back[id(copy)] = tensor
            copies.append(copy)
            return copy

        copies: list[Tensor] = []  # so that each keeps its id
        now = mapped((tuple(args), kwargs), Tensor, real)
        result = func(*now[0], **now[1])
        if described is not None:
            given, needs, writes, fresh = described
            nothing = (None,) * len(leaves(result, Tensor))
            self.log.add(DeferredOperation(func, *given, nothing, needs, writes, fresh))
        result = mapped(result, Tensor, lambda tensor: back.get(id(tensor), tensor))
        return self._done(result, strided((args, kwargs)))

    def _describe(
        self, func: Operation, args: Args, kwargs: Kwargs
    ) -> tuple[Given, frozenset[int], frozenset[int], frozenset[int]]:
        """Arguments as views, and the storages that are needed, written, and filled anew."""
        changes = strided(changed(func, args, kwargs))
        fills = fills_all(func, args, kwargs)
        for tensor in changes:
            if self._number(tensor) is None:
                self._begin(tensor, None if fills else as_bytes(tensor.untyped_storage()).clone())
        writes = frozenset(self.view(tensor).storage for tensor in changes)  # type: ignore[union-attr]

        def describe(tensor: Tensor) -> TensorView:
            return self.view(tensor) or TensorView.of(tensor, self._constant(tensor))

        given = mapped((tuple(args), kwargs), Tensor, describe)
        given = mapped(given, torch.Generator, lambda _: OwnGenerator())
        fresh = writes if fills else frozenset()
        return given, frozenset(view.storage for view in _views(given)) - fresh, writes, fresh

    def _begin(self, tensor: Tensor, content: Tensor | None) -> int:
        """From now on the values of this tensor's storage are in the log only."""
        reference = _weak(tensor)
        size = tensor.untyped_storage().nbytes()
        number = self.log.storage(size) if content is None else self.log.constant(content)
        self._deferred[reference.cdata] = (reference, number)
        self._addresses[number] = reference.cdata
        return number

    def _constant(self, tensor: Tensor) -> int:
        """The number of a storage with what a real tensor's storage holds now."""
        reference = _weak(tensor)
        content = as_bytes(tensor.untyped_storage())
        _, known, number = self._constants.get(reference.cdata, (None, None, -1))
        if known is None or not torch.equal(known, content):
            known = content.clone()
            number = self.log.constant(known)
            self._constants[reference.cdata] = (reference, known, number)
        return number

    def _done(self, result: object, given: list[Tensor]) -> object:
        """Something was computed: note what is new."""
        addresses = {storage_address(tensor) for tensor in given}
        for tensor in strided(result):
            if storage_address(tensor) not in addresses:
                self.note_made(tensor)
        return result

    def _fill(self, storage: UntypedStorage, number: int) -> None:
        with undisturbed():
            as_bytes(storage).copy_(as_bytes(self.log.content([number])[number]))
        del self._deferred[storage_address(storage)]

    def _number(self, tensor: Tensor) -> int | None:
        """The number of a deferred tensor's storage."""
        if tensor.layout != torch.strided:
            return None
        _, number = self._deferred.get(storage_address(tensor), (None, None))
        return number

    def _lives(self, number: int) -> bool:
        """Whether the factory may still use a storage."""
        reference, current = self._deferred.get(self._addresses.get(number, 0), (None, None))
        if reference is None or current != number:
            return False
        return not reference.expired()  # type: ignore[no-untyped-call]


class _Looks(TorchFunctionMode):
    """Makes a deferred tensor real before the factory takes its memory."""

    def __init__(self, deferring: Deferring) -> None:
        super().__init__()
        self._deferring = deferring

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        del types
        if func in READERS and isinstance(tensor := args[0], Tensor):
            self._deferring.make_real(tensor)
        result = func(*args, **(kwargs or {}))
        if func is Tensor.__deepcopy__:  # copies the storage, which nobody else reports
            for tensor in strided(result):
                self._deferring.note_made(tensor)
        return result


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _views(tree: object) -> list[TensorView]:
    return leaves(tree, TensorView)
