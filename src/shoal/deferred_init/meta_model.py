"""A model on the meta device that knows the initial value of each of its tensors."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage, nn

from shoal.deferred_init.defer import Deferring
from shoal.deferred_init.log import Log, TensorView
from shoal.deferred_init.outline import CannotDefer
from shoal.seeds import Name, build_until_named, generators_kept
from shoal.torch_private import buffers_of, has_hooks, make_subclass, parameters_of, storage_address


@dataclass(frozen=True)
class DeferredModel:
    """A model without memory, and the way to the value of each parameter and buffer."""

    model: nn.Module
    """Every parameter and buffer is on the meta device; the rest is as the factory left it."""
    _log: Log = field(repr=False)
    _known: dict[str, TensorView | Tensor] = field(repr=False)

    def value(self, name: str) -> Tensor:
        """The initial value of one parameter or buffer: new memory, computed now, on its own.

        Each qualified name works, also the second one of a tied parameter. The storage cannot be resized.
        """
        known = self._known[name]
        if isinstance(known, Tensor):
            return known.clone()
        with generators_kept():
            value = known.on(self._log.content([known.storage])[known.storage])
        whole = value.numel() * value.itemsize == value.untyped_storage().nbytes()
        return value if whole else value.clone()


def build_deferred(make: Callable[[], nn.Module], seed: int) -> DeferredModel:
    """The model of `build_by_name(make, seed)`, without its memory.

    Runs the factory as often as `build_by_name` does, but only notes what it would do to each tensor. Raises
    `CannotDefer` if the factory does something that cannot be noted; then build the whole model.

    >>> from shoal.seeds import build_by_name
    >>> deferred = build_deferred(lambda: nn.Linear(1000, 1000), seed=0)
    >>> deferred.model.weight.device.type
    'meta'
    >>> torch.equal(deferred.value("weight"), build_by_name(lambda: nn.Linear(1000, 1000), seed=0).weight)
    True
    """
    watches: list[Deferring] = []

    def watch(names: Sequence[Name]) -> Deferring:
        watches.append(Deferring(names, seed))
        return watches[-1]

    with generators_kept():
        try:
            model, deferring = _build(make, watch)
        except Exception as error:
            # What the factory keeps, such as a model in a cache, must not stay without its values.
            traceback.clear_frames(error.__traceback__)
            watches[-1].discard()
            if isinstance(error, CannotDefer):
                raise
            raise CannotDefer(f"the factory raised {type(error).__name__}: {error}") from error
        known = {name: deferring.view(t) or t.detach() for name, t in _tensors(model)}
        _to_meta(model)
        deferring.discard()
    return DeferredModel(model, deferring.log, known)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _build(
    make: Callable[[], nn.Module], watch: Callable[[Sequence[Name]], Deferring]
) -> tuple[nn.Module, Deferring]:
    """The model, which must be the factory's own and of tensors that the meta device can imitate."""
    model, deferring = build_until_named(make, watch)
    for name, tensor in _tensors(model):
        if nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided:
            raise CannotDefer(f"{name} has no plain storage")
        if not deferring.was_made(tensor):
            raise CannotDefer(f"{name} existed before the factory was called")
        if tensor.grad is not None or has_hooks(tensor):
            raise CannotDefer(f"{name} has a gradient or a hook")
    return model, deferring


def _to_meta(model: nn.Module) -> None:
    """Move parameters and buffers to the meta device; each stays the same object where torch allows it."""
    storages: dict[int, UntypedStorage] = {}
    moved: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
            if tensor is None or tensor.is_meta:
                continue
            if id(tensor) not in moved:
                moved[id(tensor)] = tensor, _twin(tensor, storages)
                try:
                    torch.utils.swap_tensors(*moved[id(tensor)])  # type: ignore[no-untyped-call]
                except RuntimeError:  # somebody holds a weak reference, as nn.LSTM does
                    pass
                else:
                    del moved[id(tensor)]
                    continue
            setattr(module, name, moved[id(tensor)][1])


def _twin(tensor: Tensor, storages: dict[int, UntypedStorage]) -> Tensor:
    """A copy on the meta device; tensors that share a storage still do."""
    storage = tensor.untyped_storage()
    address = storage_address(storage)
    if address not in storages:
        meta = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        storages[address] = meta.untyped_storage()
    twin = TensorView.of(tensor, 0).on(storages[address])
    twin = make_subclass(type(tensor), twin, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin
