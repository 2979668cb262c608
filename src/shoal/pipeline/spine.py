"""What one trial pass of a model shows: which modules it calls, in which order, and where each weight is used.

Nothing is traced. The model's own Python forward runs on a real micro-batch while each call of a module is
noted on entry and exit, and each operation is asked which parameters and buffers it reads.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from shoal.call import arguments, call_model
from shoal.seeds import Args, Kwargs, Operation
from shoal.torch_private import (
    COMPILED_CALL,
    TorchDispatchMode,
    buffers_of,
    call_impl,
    parameters_of,
    storage_address,
    tree_leaves,
    version_of,
)

Calls = Callable[..., object]
Entry = TypeVar("Entry")


class Interception:
    """While it lasts, calls of some modules go to functions instead, past the modules' own hooks.

    >>> double = nn.Identity()
    >>> with Interception({double: lambda x: x * 2}):
    ...     double(21)
    42
    >>> double(21)
    21
    """

    # torch's Module.__call__ asks this attribute before any hook runs; Module.compile() lives on it too. A hook
    # would come after those of tensor parallel and FSDP, which change what is passed on between stages.
    SLOT = COMPILED_CALL

    def __init__(self, functions: Mapping[nn.Module, Calls]) -> None:
        self._before = [(module, module.__dict__.get(self.SLOT)) for module in functions]
        for module, function in functions.items():
            module.__dict__[self.SLOT] = function

    def __enter__(self) -> Interception:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Put everything back; a second time does nothing."""
        while self._before:
            module, function = self._before.pop()
            if function is None:
                module.__dict__.pop(self.SLOT, None)
            else:
                module.__dict__[self.SLOT] = function


def call_of(module: nn.Module) -> Calls:
    """What a call of the module does now, to be kept before it is intercepted."""
    function: Calls = module.__dict__.get(Interception.SLOT) or call_impl(module)
    return function


@dataclass(frozen=True)
class Echo:
    """How the output of a module follows in shape from its first tensor: some last sizes dropped, one added."""

    dropped: int
    added: int | None
    dtype: torch.dtype
    rest: tuple[object, ...] | None
    """What follows the tensor in a tuple, which holds no further tensor; None if the output is the tensor alone."""

    def shape(self, first: Tensor) -> tuple[int, ...]:
        """The shape of the output for this tensor."""
        kept = first.shape[: first.dim() - self.dropped]
        return tuple(kept) if self.added is None else (*kept, self.added)


def find_echo(shape: tuple[int, ...], output: object) -> Echo | None:
    """The echo of a tensor of this shape in an output, if there is one.

    >>> find_echo((4, 7), torch.zeros(4, 7, 16))
    Echo(dropped=0, added=16, dtype=torch.float32, rest=None)
    """
    tensor = output
    rest: tuple[object, ...] | None = None
    if type(output) is tuple and output:
        tensor = output[0]
        rest = output[1:]
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return None
    if next(_tensors(rest), None) is not None:
        return None
    found = tuple(tensor.shape)
    if found == shape:
        return Echo(0, None, tensor.dtype, rest)
    if found and found[:-1] == shape:
        return Echo(0, found[-1], tensor.dtype, rest)
    if found and shape and found[:-1] == shape[:-1]:
        return Echo(1, found[-1], tensor.dtype, rest)
    return None


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module in the trial pass. Calls are numbered in the order in which they begin."""

    module: str
    caller: int
    """The number of the call in which it happened; -1 for the model itself."""
    stop: int
    """How many calls had begun when it ended: all from its own number to this one happened inside it."""
    fed: tuple[tuple[int, ...], torch.dtype] | None
    """Shape and dtype of its leading argument, if that is a floating-point tensor."""
    echo: Echo | None


@dataclass(frozen=True)
class Spine:
    """A trial pass: its calls, and for each parameter and buffer how many calls had begun at each of its uses."""

    calls: tuple[ModuleCall, ...]
    uses: Mapping[str, tuple[int, ...]]
    batch: int
    """Samples in the batch: the first dimension of its first tensor."""
    changed: frozenset[str]
    """Buffers that the pass has changed; each change is among the uses."""

    def numbers(self, module: str) -> tuple[int, ...]:
        """The calls of one module."""
        return tuple(number for number, call in enumerate(self.calls) if call.module == module)

    def inside(self, number: int) -> tuple[int, ...]:
        """The calls that one call makes itself."""
        inner = range(number + 1, self.calls[number].stop)
        return tuple(i for i in inner if self.calls[i].caller == number)

    def around(self, number: int) -> tuple[int, ...]:
        """The calls in which a call happens, from the nearest to the model itself."""
        found = []
        while (number := self.calls[number].caller) >= 0:
            found.append(number)
        return tuple(found)


def slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Every place that holds a parameter or buffer: its name, module, attribute and tensor. Tied ones come twice."""
    for prefix, module in model.named_modules():
        for table in (parameters_of(module), buffers_of(module)):
            for key, tensor in table.items():
                if tensor is not None:
                    yield (f"{prefix}.{key}" if prefix else key), module, key, tensor


def leading(module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> int | str | None:
    """Which argument carries the activation: the first one, by its place or, if all have names, its name."""
    if args:
        return 0
    if "hidden_states" in kwargs or not kwargs:
        return "hidden_states" if kwargs else None
    return next((name for name in inspect.signature(module.forward).parameters if name in kwargs), None)


def activation(module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor | None:
    """The floating-point tensor that the leading argument is, if it is one."""
    place = leading(module, args, kwargs)
    value = None if place is None else args[0] if isinstance(place, int) else kwargs[place]
    return value if isinstance(value, Tensor) and value.is_floating_point() else None


def first_tensor(args: Sequence[object], kwargs: Mapping[str, object]) -> Tensor | None:
    """The first argument that is a tensor."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def observe(model: nn.Module, inputs: object) -> Spine:
    """Run the model once on `inputs` and say what happened. It leaves no trace on the model.

    >>> spine = observe(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), torch.zeros(4, 3))
    >>> [call.module for call in spine.calls], spine.batch
    (['', '0', '1', '2'], 4)
    >>> spine.uses["2.bias"]
    (4,)
    """
    cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a weight that was cast before would not be seen a second time
    try:
        with undisturbed(model):
            watch = _Watch(model)
            with Interception(watch.functions()), watch:
                call_model(model, inputs)
    finally:
        torch.set_autocast_cache_enabled(cache)
    batch = next((tensor.shape[0] for tensor in _tensors(arguments(inputs)) if tensor.dim() > 0), 0)
    uses = {name: tuple(sorted(at)) for name, at in watch.uses.items()}
    return Spine(tuple(watch.calls), uses, batch, frozenset(watch.changed))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes calls of modules, and uses of what lies in their storages."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[ModuleCall] = []
        self.uses: dict[str, set[int]] = {}
        self._model = model
        self._stack: list[int] = []
        self._names: dict[int, list[str]] = {}
        for name, _, _, tensor in slots(model):
            self._names.setdefault(storage_address(tensor), []).append(name)
        self.changed: set[str] = set()
        self._buffers = [
            (name, buffers_of(module), key)
            for name, module, key, _ in slots(model)
            if key in buffers_of(module)
        ]
        self._states = self._now()

    def functions(self) -> dict[nn.Module, Calls]:
        """For every module, the call that is noted and then made."""
        return {
            module: partial(self._call, name, module, call_of(module))
            for name, module in self._model.named_modules()
        }

    def _call(self, name: str, module: nn.Module, made: Calls, *args: object, **kwargs: object) -> object:
        self._look()
        number = len(self.calls)
        carried = activation(module, args, kwargs)
        first = first_tensor(args, kwargs)
        fed = None if carried is None else (tuple(carried.shape), carried.dtype)
        shape = None if first is None else tuple(first.shape)  # now: the call may change it in place
        self.calls.append(ModuleCall(name, self._stack[-1] if self._stack else -1, number, fed, None))
        self._stack.append(number)
        output = made(*args, **kwargs)
        self._look()
        self._stack.pop()
        echo = None if shape is None else find_echo(shape, output)
        self.calls[number] = replace(self.calls[number], stop=len(self.calls), echo=echo)
        return output

    def _now(self) -> list[tuple[Tensor | None, int]]:
        """Every buffer as it stands: a pass may write to it, or put another tensor in its place."""
        held = [table.get(key) for _, table, key in self._buffers]
        return [(tensor, -1 if tensor is None else version_of(tensor)) for tensor in held]

    def _look(self) -> None:
        """Note what has been changed since the last call began or ended."""
        now = self._now()
        for (name, *_), (was, before), (tensor, version) in zip(
            self._buffers, self._states, now, strict=True
        ):
            if tensor is not was or version != before:
                self.changed.add(name)
                self.uses.setdefault(name, set()).add(len(self.calls))
        self._states = now

    def __torch_dispatch__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        del types
        for tensor in _tensors((args, kwargs)):
            names = self._names.get(storage_address(tensor))
            if names is not None:
                for name in self._meant(names):
                    self.uses.setdefault(name, set()).add(len(self.calls))
        return func(*args, **(kwargs or {}))

    def _meant(self, names: list[str]) -> list[str]:
        """The names of one weight in modules that are running; all its names if none is."""
        if len(names) == 1:
            return names
        running = {self.calls[number].module for number in self._stack}
        return [name for name in names if name.rpartition(".")[0] in running] or names


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Passes that leave no trace: no gradients, and generators, buffers and attributes as before.

    Gives a function that puts attributes and buffers back at once, for the next pass.
    """
    before = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    with ExitStack() as copies:

        def restore() -> None:
            copies.close()
            for table, entries in before:
                table.clear()
                table.update(entries)

        def put_back() -> None:
            restore()
            copies.enter_context(copied_buffers(model))
            for table, entries in before:
                table.update({name: _copied(one) for name, one in entries.items() if name not in _OF_MODULES})

        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices), torch.no_grad():
            try:
                put_back()
                yield put_back
            finally:
                restore()  # the attributes themselves: two modules may share one


_OF_MODULES = frozenset(nn.Module().__dict__)
"""What torch itself keeps in every module."""


def _copied(attribute: object) -> object:
    """What a forward pass may change in place is another one with the same contents; the rest as it is."""
    if isinstance(attribute, Tensor) and not attribute.requires_grad:
        # Nobody can write to one number that stands for many, as `trim` leaves it, and its clone would have them all.
        stands_for_many = attribute.numel() > 1 and not any(attribute.stride())
        return attribute if stands_for_many else attribute.clone()
    return copy.copy(attribute) if type(attribute) in (list, dict, set, bytearray, deque) else attribute


@contextmanager
def copied_buffers(model: nn.Module) -> Iterator[None]:
    """Let the model work on copies of its buffers. The true ones are not written to: a graph may refer to them."""
    tables = [buffers_of(module) for module in model.modules()]
    copies: dict[int, Tensor] = {}
    with restored(tables):
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None:
                    table[key] = copies[id(tensor)] = copies.get(id(tensor), tensor.clone())
        yield


@contextmanager
def restored(tables: Sequence[dict[str, Entry]]) -> Iterator[None]:
    """Whatever happens to these tables, afterwards they hold what they held before."""
    before = [(table, dict(table)) for table in tables]
    try:
        yield
    finally:
        for table, entries in before:
            table.clear()
            table.update(entries)


def _tensors(tree: object) -> Iterator[Tensor]:
    """The tensors in nested arguments that have a storage."""
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided)
