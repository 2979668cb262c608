"""What an operation would return and write, found without computing it."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from shoal.deferred_init.log import SMALL, TensorView, mapped, memory
from shoal.seeds import Args, Kwargs, Operation, leaves, strided, written
from shoal.torch_private import UNSAFE_VIEW, is_traceable_wrapper_subclass, schema_of, storage_address

OVERWRITERS = frozenset(
    f"aten::{name}_"
    for name in (
        *("zero", "fill", "copy", "normal", "uniform", "random", "bernoulli", "exponential"),
        *("cauchy", "log_normal", "geometric"),
    )
)
"""What fills its first argument without looking at what was there."""


class CannotDefer(Exception):
    """A factory does something that only a whole build can do; the text says what."""


class Unpredictable(Exception):
    """The result of an operation cannot be described without computing it."""


def outline(func: Operation, args: Args, kwargs: Kwargs) -> object:
    """What an operation returns, with a meta tensor for each new tensor and its own arguments as they are."""
    given = leaves((args, kwargs), Tensor)
    if any(is_traceable_wrapper_subclass(tensor) for tensor in given):
        raise CannotDefer("the factory uses a tensor subclass of its own")
    _refuse_unusual(func, given, args, kwargs)
    if schema_of(func).name in OVERWRITERS and schema_of(func).name != "aten::copy_":
        return args[0]  # the most frequent case
    looks: dict[int, Tensor] = {}
    origin: dict[int, Tensor] = {}

    def look(tensor: Tensor) -> Tensor:
        if id(tensor) not in looks:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            looks[id(tensor)] = made
            origin[id(made)] = tensor
        return looks[id(tensor)]

    meta_args, meta_kwargs = mapped((tuple(args), kwargs), Tensor, look)
    meta_args, meta_kwargs = mapped((meta_args, meta_kwargs), torch.Generator, lambda _: None)
    if any(argument.name == "device" for argument in schema_of(func).arguments):
        meta_kwargs = meta_kwargs | {"device": torch.device("meta")}
    try:
        result = func(*meta_args, **meta_kwargs)
    except Exception as error:  # no rule for meta tensors, or a real mistake: computing it will tell
        raise Unpredictable(str(error)) from None
    if any(looks[id(t)].size() != t.size() for t in strided(changed(func, args, kwargs))):
        raise CannotDefer(f"the factory changes the size of a tensor by {func}")
    aliases = {storage_address(made) for made in looks.values()}
    for leaf in _flat(result):
        if leaf is not None and id(leaf) not in origin and not _is_new(leaf, aliases):
            raise Unpredictable("it returns something other than new tensors")
    return mapped(result, Tensor, lambda leaf: origin.get(id(leaf), leaf))


def _refuse_unusual(func: Operation, given: list[Tensor], args: Args, kwargs: Kwargs) -> None:
    """Only plain tensors in CPU memory can wait, and only if no shape depends on a value."""
    index = func is torch.ops.aten.index.Tensor  # its shape depends on the values of masks only
    masks = index and any(tensor.dtype in (torch.bool, torch.uint8) for tensor in strided(args[1]))
    dynamic = torch.Tag.dynamic_output_shape in func.tags and not index
    if masks or dynamic or torch.Tag.data_dependent_output in func.tags:
        raise Unpredictable("what it returns depends on values")
    for tensor in given:
        plain = tensor.layout == torch.strided and not tensor.is_quantized
        if not plain or tensor.device.type != "cpu" or tensor.is_conj() or tensor.is_neg():
            raise Unpredictable("it takes other than plain tensors")
    if _device_type(kwargs) not in (None, "cpu") or kwargs.get("pin_memory"):
        raise Unpredictable("it returns other than plain tensors")


def changed(func: Operation, args: Args, kwargs: Kwargs) -> list[object]:
    """The arguments that an operation changes, also where its schema keeps silent about it."""
    if func is torch.ops.aten.native_batch_norm.default:
        return [args[3], args[4]] if args[5] else []  # the running statistics, in training
    return written(func, args, kwargs)


def _flat(tree: object) -> list[object]:
    return [leaf for branch in tree for leaf in _flat(branch)] if isinstance(tree, list | tuple) else [tree]


def _is_new(leaf: object, aliases: set[int]) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_quantized:
        return False
    return storage_address(leaf) not in aliases


@functools.cache
def only_looks(func: Operation) -> bool:
    """Whether an operation only makes another view, or changes how a tensor lies in its storage."""
    if torch.Tag.inplace_view in func.tags or func is UNSAFE_VIEW:
        return True
    aliases = [returned.alias_info for returned in schema_of(func).returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def makes_little(args: Args, tensors: list[Tensor]) -> bool:
    """Whether an operation is clearly small: a size is all it is given, as in `torch.empty`."""
    if tensors or not args or not isinstance(args[0], list):
        return False
    return all(type(side) is int for side in args[0]) and math.prod(args[0]) * 16 <= SMALL


def on_meta(tensors: list[Tensor], kwargs: Kwargs) -> bool:
    """Whether an operation takes no memory anyway."""
    device = _device_type(kwargs)
    if device is not None:
        return device == "meta"
    return bool(tensors) and all(tensor.is_meta for tensor in tensors)


def _device_type(kwargs: Kwargs) -> str | None:
    """The kind of device that an operation is asked to put its result on, if any."""
    device = kwargs.get("device")
    return torch.device(device).type if isinstance(device, torch.device | str | int) else None


def fills_all(func: Operation, args: Args, kwargs: Kwargs) -> bool:
    """Whether an operation writes all of a storage without reading any of it."""
    filled = args[0] if args else None
    if schema_of(func).name not in OVERWRITERS or not isinstance(filled, Tensor):
        return False
    others = strided((args[1:], kwargs))
    storage = filled.untyped_storage()
    if filled.numel() * filled.itemsize != storage.nbytes() or any(
        storage_address(other) == storage_address(storage) for other in others
    ):
        return False
    return _is_dense(filled)


def _is_dense(tensor: Tensor) -> bool:
    """Whether each element has a place of its own and there are no gaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def untouched(look: Tensor) -> Tensor:
    """A CPU tensor that lies like this one, on memory that costs nothing until somebody writes it."""
    return TensorView.of(look, 0).on(memory(look.untyped_storage().nbytes()))
