"""Randomness keyed by name: what is drawn depends on what it is for, never on who drew before.

A run has one seed. Everything random in it gets a key of its own, derived from that seed and a path of
names: the order of an epoch, the initial values of `encoder.0.weight`, the dropout of a micro-batch of step
1200. So a layer added, a layer built on another worker or a step repeated after a crash changes nothing
else.

PyTorch has one global generator instead, and a tensor has no name yet when it is filled. `build_by_name`
therefore runs the builder again. The first run watches: it numbers the operations that draw from the global
generator and follows each draw, from storage to storage, into the parameters and buffers it reaches. The
next run seeds the generator before each draw by the name of the first tensor that the draw reaches.
Building again, rather than patching tensors afterwards, keeps true whatever the builder made true: copies
stay equal, an orthogonal matrix stays orthogonal, a norm still belongs to its weight.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import TypeAlias, TypeVar

import torch
import xxhash
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from shoal.torch_private import OpOverload, TorchDispatchMode, schema_of, storage_address


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit key for one use of a seed. Stable across versions, machines and processes.

    >>> derive(0, "order", 3)
    2140218902847123268
    >>> derive(0, "ab", "c") == derive(0, "a", "bc")
    False
    """
    # Length before text, and a letter for the type: no two paths share an encoding.
    parts = [f"i{name:d};" if isinstance(name, int) else f"s{len(name)}:{name};" for name in (seed, *names)]
    return xxhash.xxh3_64_intdigest("".join(parts).encode()) >> 1


def set_stream(seed: int, *names: str | int) -> None:
    """Let torch's global generators continue from a key, so that what follows depends on the key alone.

    Cheap enough to call before every micro-batch. Seeds the CPU and, once CUDA is in use, its current device.

    >>> set_stream(0, "step", 7, "position", 0)
    >>> first = torch.rand(3)
    >>> set_stream(0, "step", 7, "position", 0)
    >>> torch.equal(first, torch.rand(3))
    True
    """
    continue_from(derive(seed, *names))


@contextmanager
def stream(seed: int, *names: str | int) -> Iterator[None]:
    """`set_stream` for as long as this lasts; afterwards the generators go on where they stood.

    >>> with stream(0, "optimizer", 7):
    ...     first = torch.rand(3)
    >>> with stream(0, "optimizer", 7):
    ...     torch.equal(first, torch.rand(3))
    True
    """
    with generators_kept():
        set_stream(seed, *names)
        yield


def set_step_stream(seed: int, step: int, micro: int) -> None:
    """`set_stream(seed, "step", step, micro)`, with the path written out: this one runs in every step.

    >>> set_step_stream(3, 7, 0)
    >>> first = torch.rand(3)
    >>> set_stream(3, "step", 7, 0)
    >>> torch.equal(first, torch.rand(3))
    True
    """
    continue_from(xxhash.xxh3_64_intdigest(f"i{seed:d};s4:step;i{step:d};i{micro:d};".encode()) >> 1)


def sample_key(seed: int, epoch: int, sample: int, again: int = 0) -> int:
    """A key for what one sample draws in an epoch; `again`: how often the epoch has had it before.

    >>> sample_key(0, 1, 7) == derive(0, "sample", 1, 7, 0)
    True
    """
    text = f"i{seed:d};s6:sample;i{epoch:d};i{sample:d};i{again:d};"
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1


def continue_from(key: int) -> None:
    """Let torch's global generators continue from a key that `derive` or `sample_key` gave.

    >>> continue_from(sample_key(0, epoch=1, sample=7))
    >>> first = torch.rand(1)
    >>> continue_from(sample_key(0, epoch=1, sample=7))
    >>> torch.equal(first, torch.rand(1))
    True
    """
    # torch.manual_seed also visits every other kind of device, which costs fifty times as much. The CPU
    # generator uses the low 32 bits of a seed only; those of a key are as well mixed as the rest.
    torch.default_generator.manual_seed(key)
    if _cuda_in_use():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(key)


def build_by_name(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """The model that `make` builds, each initial value a function of (seed, qualified name, how it is drawn).

    A `make` that draws anything is called at least twice; the last model is returned. Two kinds of draws have
    no name: one that reaches its tensor as a Python number (`fill_(torch.rand(()).item())`) depends on its
    place among all draws, and one from a generator that `make` passes itself is left alone. The global
    generators are left as they were.

    >>> small = build_by_name(lambda: nn.Sequential(nn.Linear(2, 2)), seed=0)
    >>> large = build_by_name(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), seed=0)
    >>> torch.equal(small[0].weight, large[0].weight)
    True
    """
    with generators_kept():
        model, _ = build_until_named(make, lambda names: NamedDraws(names, seed))
    return model


Name = tuple[str | int, ...]
"""What a draw is for; a path for `derive`."""

# A builder whose control flow depends on what it draws may draw differently once the names are right; each
# run settles at least one more draw. What has not settled by then still depends on seed and builder alone.
_MOST_RUNS = 4


def generators_kept() -> AbstractContextManager[None]:
    """Inside, the global generators may be used; afterwards they are as they were."""
    devices = range(torch.cuda.device_count()) if _cuda_in_use() else ()
    return torch.random.fork_rng(devices=devices)


Watch = TypeVar("Watch", bound="NamedDraws")


def build_until_named(
    make: Callable[[], nn.Module], watch: Callable[[Sequence[Name]], Watch]
) -> tuple[nn.Module, Watch]:
    """Call `make` until each draw had its name from the start; the last model, and what watched its making."""
    names: list[Name] = []
    runs = 0
    while True:
        with watch(names) as draws:
            model = make()
        runs += 1
        # A draw's name is known when the model is done; so the next run, with these names, draws for good.
        found = names if runs == _MOST_RUNS else draws.names(model)
        if found == names:
            return model, draws
        names = found
        del model  # before the next one takes as much memory again
        draws.discard()


Operation: TypeAlias = "OpOverload[..., object]"
"""An operation as a dispatch mode gets it, with its schema and tags."""
Args = Sequence[object]
Kwargs = dict[str, object]
"""The arguments of an operation: tensors, numbers, and lists of them."""


class NamedDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds the global generators before each draw by its name, and follows the draw wherever it goes.

    All operations inside one call of a torch.nn.init function are one draw: `trunc_normal_` draws again until
    nothing lies outside its bounds, and the number of its attempts must not shift the names of later draws.
    """

    def __init__(self, names: Sequence[Name], seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = names
        self._seed = seed
        self._count = 0
        self._init_call: FrameType | None = None
        # By address. The weak reference keeps an address from being used again, but does not keep the memory.
        self._reached: dict[int, tuple[StorageWeakRef, frozenset[int]]] = {}

    def names(self, model: nn.Module) -> list[Name]:
        """A name for each draw so far: that of the first tensor of the model it reached, with a number."""
        names: dict[int, Name] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided:
                continue  # neither has a storage of its own to follow a draw into
            fresh = sorted(self._reaching(tensor) - names.keys())
            names.update({draw: ("tensor", name, number) for number, draw in enumerate(fresh)})
        return [names.get(draw, ("build", draw)) for draw in range(self._count)]

    def __torch_dispatch__(
        self, func: Operation, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        del types
        return self.follow(func, args, kwargs or {})

    def follow(self, func: Operation, args: Args, kwargs: Kwargs) -> object:
        """Carry out an operation, and note which draws its results come from."""
        draws = frozenset[int]().union(*(self._reaching(tensor) for tensor in strided((args, kwargs))))
        draw = self.begin_draw() if _is_draw(func, args, kwargs) else None
        if draw is not None:
            draws |= {draw}
        result = self.execute(func, args, kwargs, draw)
        if draws:
            for tensor in strided((result, written(func, args, kwargs))):
                # By storage: views and in-place results of a draw share it.
                reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
                self._reached[reference.cdata] = (reference, draws)
        return result

    def execute(self, func: Operation, args: Args, kwargs: Kwargs, draw: int | None) -> object:
        """Carry out an operation; if it draws, it belongs to the draw of that number."""
        del draw
        return func(*args, **kwargs)

    def begin_draw(self) -> int:
        """The number of the draw that the coming operation belongs to; seeds the generators if it is new."""
        init_call = _outermost_init_call()
        if init_call is None or init_call is not self._init_call:
            self._count += 1
            self.seed_draw(self._count - 1)
        self._init_call = init_call
        return self._count - 1

    def seed_draw(self, number: int) -> None:
        """Seed the global generators for the draw of that number."""
        set_stream(self._seed, *(self._given[number] if number < len(self._given) else ("build", number)))

    def discard(self) -> None:
        """Called when the model that was made is given up for another."""

    def _reaching(self, tensor: Tensor) -> frozenset[int]:
        """The draws that influenced this tensor, by number."""
        _, draws = self._reached.get(storage_address(tensor), (None, frozenset()))
        return draws


def _outermost_init_call() -> FrameType | None:
    """The running call of a torch.nn.init function, if there is one."""
    found = None
    frame: FrameType | None = sys._getframe()
    # Only while a model is being built; a walk up the stack for each draw costs nothing that counts there.
    while frame is not None:
        if frame.f_code.co_filename == nn.init.__file__:
            found = frame
        frame = frame.f_back
    return found


def _is_draw(func: Operation, args: Args, kwargs: Kwargs) -> bool:
    """Whether an operation takes from a global generator."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return not leaves((args, kwargs), torch.Generator)


def written(func: Operation, args: Args, kwargs: Kwargs) -> list[object]:
    """The arguments that an operation changes in place; some (`_foreach_mul_`) do not return them."""
    return [args[at] if at < len(args) else kwargs.get(name) for at, name in _places_written(func)]


@functools.cache
def _places_written(func: Operation) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(schema_of(func).arguments)
    return tuple((at, argument.name) for at, argument in arguments if argument.is_write)


def strided(tree: object) -> list[Tensor]:
    """The tensors in nested arguments that have a storage of their own (sparse ones have none)."""
    return [tensor for tensor in leaves(tree, Tensor) if tensor.layout == torch.strided]


Leaf = TypeVar("Leaf")


def leaves(tree: object, kind: type[Leaf]) -> list[Leaf]:
    """What is of that kind in the arguments of an operation, in order.

    >>> leaves(([1, 2.0], {"key": 3}), int)
    [1, 3]
    """
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        return [leaf for branch in tree.values() for leaf in leaves(branch, kind)]
    if isinstance(tree, list | tuple):
        return [leaf for branch in tree for leaf in leaves(branch, kind)]
    return []


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
