"""A message as bytes: a header of fixed size, a plain value in msgpack, and the bytes of a tensor if there is one.

Whatever arrives is taken apart as if an enemy had sent it. Each length is checked before it is used, each name is
looked up in a table, and a checksum covers all of it: what `decode` gives is a message, and all else is a `BadFrame`.
Numbers are little endian.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import NoReturn

import msgpack
import numpy as np
import torch
import xxhash

from shoal.server.protocol.messages import Message, MessageKind, Plain, Where
from shoal.server.transport.cipher import TICKET, Part

MAGIC = b"SHOL"
VERSION = 4
RAW, CODED = 0, 1
"""Codecs: tensors that travel as they are, and what the compressor of a shard makes of them."""
META_LIMIT = 64 << 20
"""Bytes of a plain value."""
PAYLOAD_LIMIT = 16 << 30
"""Bytes of a tensor."""
ITEM_LIMIT = 1 << 20
"""Entries of one list or dict: msgpack makes room for as many as are announced before it has seen them."""
DEPTH_LIMIT = 64
"""Lists in lists: far below the depth at which Python gives up."""

HEAD = struct.Struct("<4sBBBBIIQQQQqQI")
"""Magic, version, kind, dtype, codec, flags, shard, epoch, client, seq, place, clock, bytes of payload and of meta."""
SUM = struct.Struct("<Q")
"""xxh3 of the head, the meta and the payload; it is the end of the first frame."""

DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.float16,
    4: torch.bfloat16,
    5: torch.float8_e4m3fn,
    6: torch.float8_e5m2,
    16: torch.int64,
    17: torch.int32,
    18: torch.int8,
    19: torch.uint8,
}
"""0 is no tensor. Bool is missing: a byte that is neither 0 nor 1 would be undefined."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_KINDS = {int(kind): kind for kind in MessageKind}
_CONTAINERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])
"""The bytes with which a list or dict of msgpack begins."""
_PATH = re.compile(r"/proc/[0-9]{1,10}/fd/[0-9]{1,10}")

SEALED = 1
"""Flag: the tensor comes over the bulk socket, and its ticket (cipher.py) is in its place."""


class BadFrame(Exception):
    """Frames that are no message, or a message that cannot become frames; the text says why."""


class _Borrowed:
    """Bytes that arrived, shown to numpy as memory that may be written.

    torch has no tensors for reading only and warns of each such buffer once per process. That nobody writes here is
    part of `decode`'s contract instead.
    """

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, owner: Part, address: int, size: int) -> None:
        self._owner = owner
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }


def encode(message: Message, ticket: bytes = b"") -> list[Part]:
    """The frames of a message. The last one is the tensor's own memory: leave it alone until it has been sent.

    With a `ticket`, that is in its place.

    If the message says where its tensor is, the bytes stay there. The plain value is read back once, so that what
    nobody would take fails here and not at the other end, in silence.
    """
    meta = _pack(message.meta, message.where)
    payload: Part = b""
    code = 0
    if message.tensor is not None and message.where is None:
        code = _code(message.tensor.dtype)
        payload = payload_of(message)
    try:
        head = HEAD.pack(
            MAGIC,
            VERSION,
            message.kind,
            code,
            message.codec,
            SEALED if ticket else 0,
            message.shard,
            message.epoch,
            message.client,
            message.seq,
            message.place,
            message.clock,
            len(payload),
            len(meta),
        )
    except struct.error as error:
        raise BadFrame(f"a number does not fit into the header of a {message.kind.name}: {error}") from None
    # TCP's checksum is weak, and a tensor that changes while it is being sent would arrive as a mixture: xxh3 finds
    # both.
    head += SUM.pack(checksum(head, meta, ticket or payload))
    return [head, meta, ticket or payload] if code else [head, meta]


def payload_of(message: Message) -> Part:
    """The bytes of a message's tensor, where they lie."""
    tensor = message.tensor
    if tensor is None:
        return b""
    if tensor.dim() != 1 or tensor.device.type != "cpu":
        raise BadFrame(
            f"a tensor of shape {tuple(tensor.shape)} on {tensor.device}; send it flat, from the CPU"
        )
    if tensor.nbytes > PAYLOAD_LIMIT:
        raise BadFrame(f"a tensor of {tensor.nbytes} bytes; at most {PAYLOAD_LIMIT} are sent at once")
    if not tensor.numel():
        return b""
    # A view of the tensor's memory, which zmq sends without a copy.
    return tensor.detach().contiguous().view(torch.uint8).numpy().data


def kind_of(frames: Sequence[Part]) -> int:
    """What frames say that they are, before anything of them is believed; 0 if they say nothing."""
    return HEAD.unpack_from(frames[0])[2] if frames and len(frames[0]) >= HEAD.size else 0


def sealed_size(frames: Sequence[Part]) -> int | None:
    """The bytes of the tensor that a message promises and does not carry; None if it carries what it has."""
    if len(frames) != 3 or len(frames[0]) != HEAD.size + SUM.size or HEAD.unpack_from(frames[0])[5] != SEALED:
        return None
    if len(frames[2]) != TICKET.size or SUM.unpack_from(frames[0], HEAD.size)[0] != _sum_of(frames):
        raise BadFrame("the checksum does not match, or the ticket is none")
    size: int = HEAD.unpack_from(frames[0])[12]
    if size > PAYLOAD_LIMIT:
        raise BadFrame(f"a tensor of {size} bytes; at most {PAYLOAD_LIMIT} are taken")
    return size


def decode(frames: Sequence[Part], payload: Part | None = None) -> Message:
    """The message that these frames are. Its tensor lies in the third, or in the `payload` that came another way, and
    is only to be read."""
    if not 2 <= len(frames) <= 3:
        raise BadFrame(f"{len(frames)} frames; a message has 2, or 3 with a tensor")
    first = frames[0]
    meta = frames[1]
    if len(first) != HEAD.size + SUM.size:
        raise BadFrame(f"a header of {len(first)} bytes; it has {HEAD.size + SUM.size}")
    (
        magic,
        version,
        kind,
        code,
        codec,
        flags,
        shard,
        epoch,
        client,
        seq,
        place,
        clock,
        payload_size,
        meta_size,
    ) = HEAD.unpack_from(first)
    # Before the checksum, which another version may take of other bytes.
    if magic != MAGIC or version != VERSION:
        raise BadFrame(f"not of this protocol: {magic!r}, version {version}; expected {MAGIC!r}, {VERSION}")
    found = payload if payload is not None else frames[2] if len(frames) == 3 else b""
    if meta_size != len(meta) or payload_size != len(found):
        raise BadFrame(f"{len(meta)} and {len(found)} bytes; the header says {meta_size} and {payload_size}")
    # Of a sealed tensor the sum covers the ticket only; AES-GCM has authenticated the bytes.
    if SUM.unpack_from(first, HEAD.size)[0] != _sum_of(frames):
        raise BadFrame("the checksum does not match")
    if kind not in _KINDS or codec not in (RAW, CODED) or flags != (SEALED if payload is not None else 0):
        raise BadFrame(f"kind {kind}, codec {codec}, flags {flags}: one of them is unknown")
    if bool(code) != (len(frames) == 3):
        raise BadFrame(f"{len(frames)} frames with dtype {code}")
    value, where = _unpack(meta)
    if code and where is not None:
        raise BadFrame("a tensor that is both here and elsewhere")
    tensor = _tensor(found, _dtype(code)) if code else None
    return Message(_KINDS[kind], epoch, shard, client, seq, place, clock, value, tensor, where, codec)


def _sum_of(frames: Sequence[Part]) -> int:
    return checksum(frames[0][: HEAD.size], *frames[1:])


def checksum(head: Part, meta: Part, *payload: Part) -> int:
    """xxh3 of all, one after the other: above 10 GB/s on one core."""
    sum_ = xxhash.xxh3_64(head)
    for part in (meta, *payload):
        sum_.update(part)
    return sum_.intdigest()


def _pack(meta: Plain, where: Where | None) -> bytes:
    value: list[Plain] = [meta]
    if where is not None:
        value.append([where.path, where.offset, where.count, _code(where.dtype)])
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadFrame(f"not a plain value: {error}") from None
    _unpack(packed)
    return packed


def _unpack(packed: Part) -> tuple[Plain, Where | None]:
    if len(packed) > META_LIMIT:
        raise BadFrame(f"a plain value of {len(packed)} bytes; at most {META_LIMIT} are taken")
    try:
        value = msgpack.unpackb(
            packed,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_array_len=ITEM_LIMIT,
            max_map_len=ITEM_LIMIT,
            max_ext_len=0,
            ext_hook=_no_extension,
        )
    except (ValueError, TypeError, OverflowError, MemoryError, msgpack.UnpackException) as error:
        raise BadFrame(f"not a plain value: {error or type(error).__name__}") from None
    if not isinstance(value, list) or not 1 <= len(value) <= 2:
        raise BadFrame("the second frame is not a list of one or two")
    _check_depth(packed, value)
    return value[0], _where(value[1]) if len(value) == 2 else None


def _no_extension(code: int, _: bytes) -> NoReturn:
    raise ValueError(f"extension type {code}")


def _check_depth(packed: Part, value: Plain) -> None:
    # Each level takes one of these bytes; where there are few, which is the rule, there is nothing to walk through.
    if len(packed) - len(bytes(packed).translate(None, _CONTAINERS)) <= DEPTH_LIMIT:
        return
    level: list[Plain] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > DEPTH_LIMIT:
            raise BadFrame(f"a plain value of more than {DEPTH_LIMIT} levels")
        lists = [child for item in level if type(item) is list for child in item]
        level = lists + [child for item in level if type(item) is dict for child in item.values()]


def _where(parts: Plain) -> Where:
    match parts:
        case [str(path), int(offset), int(count), int(code)] if not any(type(part) is bool for part in parts):
            pass
        case _:
            raise BadFrame("the place of a tensor is not a path and three numbers")
    dtype = _dtype(code)
    if not _PATH.fullmatch(path):
        raise BadFrame(f"{path[:80]!r} is not a path of shared memory")
    if offset < 0 or count < 0 or offset % dtype.itemsize or offset + count * dtype.itemsize >= 1 << 63:
        raise BadFrame(f"no place for a tensor: {count} elements of {dtype} at byte {offset}")
    return Where(path, offset, count, dtype)


def _code(dtype: torch.dtype) -> int:
    if dtype not in _CODES:
        raise BadFrame(f"{dtype} is not a dtype that is sent")
    return _CODES[dtype]


def _dtype(code: int) -> torch.dtype:
    if code not in DTYPES:
        raise BadFrame(f"dtype {code} is unknown")
    return DTYPES[code]


def _tensor(payload: Part, dtype: torch.dtype) -> torch.Tensor:
    size = len(payload)
    if size % dtype.itemsize or size > PAYLOAD_LIMIT:
        raise BadFrame(f"{size} bytes are no tensor of {dtype}")
    if not size:
        return torch.empty(0, dtype=dtype)
    address = np.frombuffer(payload, np.uint8).__array_interface__["data"][0]
    if address % dtype.itemsize:
        # Small messages may lie anywhere in the buffer of a socket.
        return torch.frombuffer(bytearray(payload), dtype=dtype)
    return torch.from_numpy(np.asarray(_Borrowed(payload, address, size))).view(dtype)
