"""What `torch.save` has written, read without unpickling: dicts, lists, numbers and tensors, and nothing else.

Such a file is a zip archive: `data.pkl`, which is a pickle, says what there is, and `data/0`, `data/1`, … are the
numbers. The file is mapped, and tensors lie in it where they are: only what is looked at is read.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shoal.checkpoint.convert.pickled import Made, Name, read, whole_numbers

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
DTYPES = {
    str(dtype): dtype
    for dtype in [*_STORAGES.values(), torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32]
}
"""Formats of numbers by the names that files have for them."""
_NO_ARCHIVE = (
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
    OSError,
    struct.error,
    zlib.error,
)
"""What zipfile raises over bytes that are not quite an archive."""
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_PARAMETER = "torch._utils._rebuild_parameter"
_ALLOWED = frozenset(
    [
        "collections.OrderedDict",
        "torch.Size",
        "torch.storage.UntypedStorage",
        *(f"torch.{name}" for name in _STORAGES),
        *DTYPES,
        *_TENSORS,
        _PARAMETER,
    ]
)


def dtype_named(text: str) -> torch.dtype:
    """The number format of a name such as torch.float32; ValueError for one that is not known."""
    if text not in DTYPES:
        raise ValueError(f"{text} is no format of numbers that is known here")
    return DTYPES[text]


def map_file(path: Path) -> torch.Tensor:
    """The bytes of a file, where they are."""
    with open(path, "rb") as file:
        # A private map: torch takes no memory that cannot be written to, and nothing written would reach the file.
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)


def load(data: torch.Tensor) -> object:
    """The value in the bytes of such a file; ValueError, with a reason, if they are not of one.

    >>> file = io.BytesIO()
    >>> torch.save({"weight": torch.arange(6.0).view(2, 3), "epoch": 3}, file)
    >>> load(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
    {'weight': tensor([[0., 1., 2.],
            [3., 4., 5.]]), 'epoch': 3}
    """
    try:
        with zipfile.ZipFile(_Window(memoryview(data.numpy().data))) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "data.pkl" not in members:
                raise ValueError("it holds no data.pkl")
            order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
            if order != b"little":
                raise ValueError(f"its bytes are in {order.decode(errors='replace')}-endian order")
            value = read(archive.read(members["data.pkl"]), _ALLOWED)
    except _NO_ARCHIVE as error:
        raise ValueError(f"it is no file of torch.save since version 1.6 ({error})") from error
    return _Builder(data, members).build(value)


class _Window(io.RawIOBase):
    """Bytes in memory as a file, without a copy of them."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")  # as a file does; zipfile takes it for "no archive"
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer)
        part = self._data[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)


class _Builder:
    """From notes of what would have been called to tensors."""

    def __init__(self, data: torch.Tensor, members: dict[str, zipfile.ZipInfo]) -> None:
        self._data = data
        self._members = members
        self._built: dict[int, object] = {}

    def build(self, value: object, depth: int = 0) -> object:
        """What is mentioned several times is built once."""
        if depth > 50:
            raise ValueError("it is nested more than 50 deep")
        if id(value) not in self._built:
            self._built[id(value)] = self._build(value, depth)
        return self._built[id(value)]

    def _build(self, value: object, depth: int) -> object:
        if isinstance(value, dict):
            return {key: self.build(entry, depth + 1) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.build(entry, depth + 1) for entry in value)
        if isinstance(value, Name):
            return dtype_named(value.text)
        if not isinstance(value, Made):
            return value
        if value.name == _PARAMETER:
            return self.build(value.args[0], depth + 1)
        if value.name not in _TENSORS:
            raise ValueError(f"it calls {value.name or 'nothing'} where a tensor belongs")
        try:
            return self._tensor(value)
        except (TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"a tensor in it is described wrongly ({error})") from error

    def _tensor(self, made: Made) -> torch.Tensor:
        storage = made.args[0]
        if not isinstance(storage, Made):
            raise TypeError("it has no numbers")
        (offset,) = whole_numbers(made.args[1:2])
        size = whole_numbers(made.args[2])
        stride = whole_numbers(made.args[3])
        dtype = dtype_named(_text(made.args[6])) if made.name == _TENSORS[1] else None
        numbers = self._numbers(storage.args, dtype)
        if not _fits(numbers.numel(), offset, size, stride):
            raise ValueError(f"a tensor of shape {list(size)} in it is larger than its numbers")
        return numbers.as_strided(size, stride, int(numbers.storage_offset()) + offset)

    def _numbers(self, storage: Sequence[object], dtype: torch.dtype | None) -> torch.Tensor:
        """What ('storage', kind, key, device, count) names, flat."""
        _, kind, key, _, _ = storage
        dtype = dtype or _STORAGES.get(_text(kind).rpartition(".")[2], torch.uint8)
        info = self._members.get(f"data/{key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"the numbers data/{key} are missing in it")
        begin = info.header_offset + 30  # what stands before them: 30 bytes, the name, something more
        lengths = bytes(self._data[begin - 4 : begin].tolist())
        begin += int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        if begin + info.file_size > self._data.numel() or info.file_size % dtype.itemsize:
            raise ValueError(f"the numbers data/{key} in it are cut off")
        found = self._data[begin : begin + info.file_size]
        return (found if found.data_ptr() % dtype.itemsize == 0 else found.clone()).view(dtype)


def _text(name: object) -> str:
    if not isinstance(name, Name):
        raise TypeError(f"{name!r} is no name")
    return name.text


def _fits(count: int, offset: int, size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor stays within its numbers."""
    if offset < 0 or len(size) != len(stride) or min((*size, *stride), default=0) < 0:
        return False
    if 0 in size:
        return True
    return offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) < count
