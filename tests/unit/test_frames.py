"""Messages as bytes: what is sent arrives the same, and nothing else is taken for a message."""

from __future__ import annotations

import gc
import os
import random
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import psutil
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.server.protocol.messages import Message, MessageKind, Where
from shoal.server.transport import frames as frame
from shoal.server.transport.frames import HEAD, MAGIC, SUM, BadFrame, checksum, decode, encode
from shoal.server.transport.keys import JobKeys

DTYPES = list(frame.DTYPES.values())
FIELDS = ("kind", "epoch", "shard", "client", "seq", "place", "clock")
U64 = st.integers(0, 2**64 - 1)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)
PLACES = st.builds(
    lambda pid, fd, start, count, dtype: Where(f"/proc/{pid}/fd/{fd}", start * dtype.itemsize, count, dtype),
    st.integers(1, 2**31),
    st.integers(0, 2**31),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    st.sampled_from(DTYPES),
)
TENSORS = st.builds(
    lambda data, dtype: torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype),
    st.integers(1, 32).flatmap(lambda n: st.binary(min_size=8 * n, max_size=8 * n)),
    st.sampled_from(DTYPES),
)
MESSAGES = st.builds(
    Message,
    kind=st.sampled_from(list(MessageKind)),
    epoch=U64,
    shard=st.integers(0, 2**32 - 1),
    client=U64,
    seq=U64,
    place=U64,
    clock=st.integers(-(2**63), 2**63 - 1),
    meta=PLAIN,
    tensor=st.none() | TENSORS,
)


def example(elements: int = 3, dtype: torch.dtype = torch.float32) -> Message:
    """A message of every field."""
    meta = {"args": [1, 2.5, "text", None, True], "pieces": [[0, 5, 0], [5, 7, 1]]}
    tensor = torch.arange(elements).to(dtype)
    return Message(MessageKind.CALL, 3, 1, 7, 11, 13, -1, meta, tensor)


def signed(head: bytes, meta: bytes, payload: bytes | None = None) -> list[bytes]:
    """Frames with a right checksum, whatever is in them."""
    parts = [head + SUM.pack(checksum(head, meta, payload or b"")), meta]
    return parts if payload is None else [*parts, payload]


def with_meta(meta: bytes) -> list[bytes]:
    return signed(HEAD.pack(MAGIC, frame.VERSION, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, len(meta)), meta)


def header(**changed: int | bytes) -> list[bytes]:
    """A message that is right but for the fields named."""
    names = ["magic", "version", "kind", "dtype", "codec", "flags", "shard", *FIELDS[1:2], *FIELDS[3:]]
    names += ["payload", "meta"]
    values: list[Any] = [MAGIC, frame.VERSION, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 8, 2]
    for name, value in changed.items():
        values[names.index(name)] = value
    return signed(HEAD.pack(*values), b"\x91\xc0", b"12345678")


def same(one: Message, two: Message) -> bool:
    if [getattr(one, f) for f in FIELDS] != [getattr(two, f) for f in FIELDS] or one.meta != two.meta:
        return False
    if one.where != two.where or (one.tensor is None) != (two.tensor is None):
        return False
    if one.tensor is None or two.tensor is None:
        return True
    return one.tensor.dtype == two.tensor.dtype and bytes_of(one.tensor) == bytes_of(two.tensor)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.view(torch.uint8).numpy())


@given(MESSAGES)
@settings(max_examples=300, deadline=None)
def test_what_is_sent_arrives(message: Message) -> None:
    frames = encode(message)
    assert same(decode(frames), message)
    assert same(decode([memoryview(bytes(part)) for part in frames]), message)


@given(PLACES, PLAIN)
@settings(max_examples=100, deadline=None)
def test_a_place_travels_instead_of_its_bytes(where: Where, meta: Any) -> None:
    frames = encode(Message(MessageKind.REPLY, meta=meta, tensor=torch.zeros(1000), where=where))
    assert len(frames) == 2
    got = decode(frames)
    assert (got.where, got.meta, got.tensor) == (where, meta, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 1, 100_000])
def test_every_dtype(dtype: torch.dtype, elements: int) -> None:
    message = example(elements, dtype)
    assert same(decode(encode(message)), message)


def test_nothing_is_copied_on_the_way() -> None:
    tensor = torch.arange(10, dtype=torch.float64)
    frames = encode(Message(MessageKind.CALL, tensor=tensor))
    assert np.frombuffer(frames[2], np.uint8).__array_interface__["data"][0] == tensor.data_ptr()
    got = decode([memoryview(part) for part in frames])
    assert got.tensor is not None
    assert got.tensor.data_ptr() == tensor.data_ptr()


def test_a_tensor_outlives_the_frames_it_lies_in() -> None:
    made = decode([zmq.Frame(bytes(part)).buffer for part in encode(example(100_000))]).tensor
    gc.collect()
    junk = [bytes(400_000) for _ in range(20)]
    assert made is not None
    assert torch.equal(made, torch.arange(100_000).float())
    del junk


def test_reading_a_message_warns_of_nothing() -> None:
    """In a process of its own: torch says once, to the first who asks, that a buffer is only for reading."""
    code = (
        "import warnings, torch; from shoal.server.transport.frames import decode, encode\n"
        "from shoal.server.protocol.messages import MessageKind, Message\n"
        "warnings.simplefilter('error')\n"
        "frames = [bytes(part) for part in encode(Message(MessageKind.CALL, tensor=torch.ones(9000)))]\n"
        "assert decode(frames).tensor.sum() == 9000\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_bytes_at_odd_addresses_become_a_tensor_all_the_same() -> None:
    head, meta, payload = encode(example(9, torch.float64))
    room = bytearray(len(payload) + 8)
    for shift in range(8):
        room[shift : shift + len(payload)] = payload
        got = decode([head, meta, memoryview(bytes(room))[shift : shift + len(payload)]]).tensor
        assert got is not None
        assert got.data_ptr() % 8 == 0
        assert torch.equal(got, torch.arange(9).double())


@pytest.mark.parametrize(
    "message",
    [
        Message(MessageKind.CALL, epoch=-1),
        Message(MessageKind.CALL, shard=2**32),
        Message(MessageKind.CALL, clock=2**63),
        Message(MessageKind.CALL, meta={1: 2}),
        Message(MessageKind.CALL, meta={"a", "b"}),
        Message(MessageKind.CALL, meta=2**64),
        Message(MessageKind.CALL, meta="\ud800"),
        Message(MessageKind.CALL, meta=msgpack.Timestamp(1)),
        Message(MessageKind.CALL, meta=[0] * (frame.ITEM_LIMIT + 1)),
        Message(MessageKind.CALL, meta=bytes(frame.META_LIMIT)),
        Message(MessageKind.CALL, tensor=torch.zeros(2, 2)),
        Message(MessageKind.CALL, tensor=torch.zeros(2, device="meta")),
        Message(MessageKind.CALL, tensor=torch.zeros(2, dtype=torch.bool)),
        Message(MessageKind.CALL, tensor=torch.zeros(2, dtype=torch.complex64)),
        Message(MessageKind.CALL, where=Where("/etc/passwd", 0, 1, torch.float32)),
        Message(MessageKind.CALL, where=Where("/proc/1/fd/2/../../../etc/passwd", 0, 1, torch.float32)),
        Message(MessageKind.CALL, where=Where("/proc/1/fd/2\n", 0, 1, torch.float32)),
        Message(MessageKind.CALL, where=Where("/proc/1/fd/٣", 0, 1, torch.float32)),
        Message(MessageKind.CALL, where=Where("/proc/1/fd/2", -4, 1, torch.float32)),
        Message(MessageKind.CALL, where=Where("/proc/1/fd/2", 0, -1, torch.float32)),
        Message(MessageKind.CALL, where=Where("/proc/1/fd/2", 2, 1, torch.float32)),
        Message(MessageKind.CALL, where=Where("/proc/1/fd/2", 0, 2**62, torch.float32)),
    ],
)
def test_what_nobody_would_take_is_not_sent(message: Message) -> None:
    with pytest.raises(BadFrame):
        encode(message)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "0 frames"),
        ([b"x"], "1 frames"),
        ([b"x"] * 4, "4 frames"),
        ([b"x"] * 3, "a header of 1 bytes"),
        ([b"", b"", b""], "a header of 0 bytes"),
        (header(magic=b"HTTP"), "not of this protocol"),
        (header(version=1), "version 1"),
        (header(kind=0), "kind 0"),
        (header(kind=200), "kind 200"),
        (header(codec=2), "codec 2"),
        (header(flags=1), "flags 1"),
        (header(dtype=0), "3 frames with dtype 0"),
        (header(dtype=99), "dtype 99"),
        (header(payload=9), "says 2 and 9"),
        (header(payload=2**63), f"says 2 and {2**63}"),
        (header(meta=2**32 - 1), f"says {2**32 - 1} and 8"),
        ([header()[0], b"\x91\xc1", b"12345678"], "checksum"),
        (
            signed(HEAD.pack(MAGIC, frame.VERSION, 1, 2, *[0] * 8, 7, 2), b"\x91\xc0", b"1234567"),
            "7 bytes are no tensor",
        ),
        (signed(HEAD.pack(MAGIC, frame.VERSION, 1, 2, *[0] * 8, 0, 2), b"\x91\xc0"), "2 frames with dtype 2"),
        (with_meta(b""), "not a plain value"),
        (with_meta(b"\xc0"), "not a list"),
        (with_meta(b"\x90"), "not a list"),
        (with_meta(b"\x93\xc0\xc0\xc0"), "not a list"),
        (with_meta(b"\x92\xc0\xc0"), "not a path and three numbers"),
        (with_meta(b"\x91\xc0\xc0"), "extra data"),
        (with_meta(b"\x91\xc1"), "not a plain value"),
        (with_meta(b"\x91\xa1\xff"), "utf-8"),
        (with_meta(b"\x91\x81\x01\x01"), "map key"),
        (with_meta(b"\x91\x81\x90\x01"), "map key"),
        (with_meta(b"\x91\xc7\x00\x05"), "extension type 5"),
        (with_meta(b"\x91" + msgpack.packb(msgpack.ExtType(5, b"abc"))), "max_ext_len"),
        (with_meta(b"\x91" + msgpack.packb(msgpack.Timestamp(5, 6))), "max_ext_len"),
        (with_meta(b"\x91" + b"\xdd\xff\xff\xff\xff"), "max_array_len"),
        (with_meta(b"\x91" + b"\xdf\xff\xff\xff\xff"), "max_map_len"),
        (with_meta(b"\x91" + b"\xdb\xff\xff\xff\xff"), "not a plain value"),
        (with_meta(b"\x91" * 65 + b"\xc0"), "more than 64 levels"),
        (with_meta(b"\x91" + b"\x81\xa0" * 64 + b"\xc0"), "more than 64 levels"),
        (with_meta(b"\x91" * 1_000_000 + b"\xc0"), "not a plain value"),
        (with_meta(msgpack.packb([None, ["/proc/1/fd/2", 0, True, 1]])), "three numbers"),
        (with_meta(msgpack.packb([None, ["/proc/1/fd/2", 0, 1.0, 1]])), "three numbers"),
        (with_meta(msgpack.packb([None, ["/proc/1/fd/2", 0, 1, 77]])), "dtype 77"),
        (with_meta(msgpack.packb([None, ["/proc/self/fd/2", 0, 1, 1]])), "not a path"),
        (with_meta(msgpack.packb([None, ["/proc/1/fd/2", 2**64 - 4, 1, 1]])), "no place for a tensor"),
        (with_meta(msgpack.packb([None, ["/proc/1/fd/2", 0, 2**64 - 1, 1]])), "no place for a tensor"),
    ],
)
def test_refusals_say_why(frames: list[bytes], reason: str) -> None:
    with pytest.raises(BadFrame) as refusal:
        decode(frames)
    assert reason in str(refusal.value)


def test_a_tensor_is_not_both_here_and_elsewhere() -> None:
    meta = msgpack.packb([None, ["/proc/1/fd/2", 0, 1, 1]])
    with pytest.raises(BadFrame, match="both here and elsewhere"):
        decode(signed(HEAD.pack(MAGIC, frame.VERSION, 1, 1, *[0] * 8, 4, len(meta)), meta, b"1234"))


def test_the_deepest_value_that_is_taken() -> None:
    assert decode(with_meta(b"\x91" * 64 + b"\xc0")).meta is not None
    wide: Any = {"pieces": [[n, n, 0] for n in range(1000)]}  # many lists, few levels
    assert decode(encode(Message(MessageKind.CALL, meta=wide))).meta == wide


@pytest.mark.parametrize("message", [example(), Message(MessageKind.ALIVE), example(0)])
def test_no_byte_can_be_lost_or_changed(message: Message) -> None:
    frames = [bytes(part) for part in encode(message)]
    for which, part in enumerate(frames):
        for cut in range(len(part)):
            refused(frames, which, part[:cut])
        refused(frames, which, part + b"\0")
        for at in range(len(part)):
            for bit in range(8):
                refused(frames, which, part[:at] + bytes([part[at] ^ 1 << bit]) + part[at + 1 :])
    for other in ([frames[1], frames[0], *frames[2:]], frames[:-1], [*frames, b""], frames[1:]):
        with pytest.raises(BadFrame):
            decode(other)


def refused(frames: list[bytes], which: int, part: bytes) -> None:
    with pytest.raises(BadFrame):
        decode([*frames[:which], part, *frames[which + 1 :]])


# A million frames of nonsense.


def random_frames(count: int, seed: int) -> Iterator[list[bytes]]:
    """Bytes without any order, often of the size of a header and with its first bytes."""
    pool = random.Random(seed).randbytes(1 << 20)
    cuts = np.random.default_rng(seed).integers(0, (1 << 20) - 200, (count, 4)).tolist()
    for a, b, c, d in cuts:
        first = pool[a : a + HEAD.size + SUM.size] if d & 1 else pool[a : a + b % 150]
        if d & 2:
            first = MAGIC + b"\x01" + first[5:]
        yield [first, pool[b : b + c % 60], pool[c : c + d % 60]][: 1 + d % 3]


def mutated_frames(count: int, seed: int) -> Iterator[list[bytes]]:
    """Real messages with a few bytes changed, cut short, or repeated; half of them with a right checksum again."""
    where = Where("/proc/12/fd/34", 64, 100, torch.float32)
    real = [
        example(),
        example(5, torch.int64),
        Message(MessageKind.VIEW, meta={"a": [[1] * 40] * 3}, where=where),
    ]
    sources = [[bytes(part) for part in encode(message)] for message in real]
    draws = np.random.default_rng(seed).integers(0, 1 << 30, (count, 5)).tolist()
    for a, b, c, d, e in draws:
        parts = [bytearray(part) for part in sources[a % 3]]
        part = parts[b % len(parts)]
        part[c % len(part)] = d & 255
        if d & 256:
            del part[e % len(part) :]
        elif d & 512:
            at = e % len(part)
            part[at:at] = part[c % len(part) :][: d & 15]
        if d & 1024 and len(parts[0]) == HEAD.size + SUM.size:
            head, meta = parts[0][: HEAD.size], bytes(parts[1])
            payload = bytes(parts[2]) if len(parts) == 3 else None
            struct.pack_into("<QI", head, HEAD.size - 12, len(payload or b""), len(meta))
            yield signed(bytes(head), meta, payload)
        else:
            yield [bytes(part) for part in parts]


def hostile_values(count: int, seed: int) -> Iterator[list[bytes]]:
    """Sealed as they should be, with a second frame made to hurt who unpacks it."""
    shapes = [
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xdc\xff\xff" * 20,
        b"\xde\xff\xff" * 20,
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x05",
        b"\xd6\xff\x00\x00\x00\x00",
        b"\xd7\xff" + b"\xff" * 8,
        b"\xc7\x0c\xff" + b"\xff" * 12,
        b"\x91" * 200,
        b"\x81\xa0" * 200,
        b"\x81" * 100,
        b"\x9f" * 70,
        b"\x8f\xa1a" * 40,
        b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    ]
    pool = random.Random(seed).randbytes(1 << 16)
    draws = np.random.default_rng(seed).integers(0, (1 << 16) - 100, (count, 3)).tolist()
    for a, b, c in draws:
        yield with_meta(b"\x91" + shapes[a % len(shapes)] + pool[b : b + c % 40])


def count_taken(frames: Iterator[list[bytes]]) -> tuple[int, int]:
    taken = total = 0
    for total, parts in enumerate(frames, 1):  # noqa: B007
        try:
            decode(parts)
        except BadFrame:
            continue
        taken += 1
    return taken, total


def test_a_million_frames_of_nonsense_do_no_harm() -> None:
    for make in (random_frames, mutated_frames, hostile_values):
        count_taken(make(5000, 0))  # tables and caches are full before memory is looked at
    gc.collect()
    before, begin = psutil.Process().memory_info().rss, time.perf_counter()
    found = [count_taken(random_frames(400_000, 1))]
    for seed in range(2, 6):
        found += [count_taken(mutated_frames(100_000, seed)), count_taken(hostile_values(50_000, seed))]
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    assert sum(total for _, total in found) == 1_000_000
    assert found[0][0] == 0, "random bytes were taken for a message"
    assert 0 < found[1][0] < 50_000, "of the changed and sealed ones, some are messages"
    assert grown < 100e6, f"{grown / 1e6:.0f} MB were not given back"
    assert time.perf_counter() - begin < 120


def test_a_small_message_cannot_ask_for_much_memory_or_time() -> None:
    """Lists that announce a million entries, in each other: room is made for each before it turns out to be a lie."""
    before, begin = psutil.Process().memory_info().rss, time.perf_counter()
    wide = b"\xdd" + struct.pack(">I", frame.ITEM_LIMIT)
    for _ in range(3):
        with pytest.raises(BadFrame):
            decode(with_meta((b"\x91" + wide * 1000).ljust(2 << 20, b"\xc0")))
    assert time.perf_counter() - begin < 30
    assert psutil.Process().memory_info().rss - before < 200e6


# Keys.


def test_keys_survive_as_text_and_in_a_file(tmp_path: Path) -> None:
    keys, path = JobKeys.make(), tmp_path / "keys"
    assert JobKeys.from_text(keys.to_text()) == keys
    old = os.umask(0)
    try:
        keys.write(path)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert JobKeys.read(path) == keys
    other = JobKeys.make()
    other.write(path)  # a file that only we can read may be replaced
    assert JobKeys.read(path) == other
    assert list(tmp_path.iterdir()) == [path]


def test_secret_keys_are_not_shown() -> None:
    keys = JobKeys.make()
    for secret in (keys.server_secret, keys.client_secret):
        assert secret.decode() not in repr(keys)
    with pytest.raises(ConfigError) as refusal:
        JobKeys.from_text(keys.to_text() + keys.client_secret.decode())
    assert keys.client_secret.decode() not in str(refusal.value)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    keys, path = JobKeys.make(), tmp_path / "keys"
    keys.write(path)
    for mode in (0o644, 0o640, 0o604, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"mode {mode:o}.*chmod 600"):
            JobKeys.read(path)
        with pytest.raises(ConfigError, match=f"mode {mode:o}"):
            keys.write(path)


def test_what_is_no_file_of_keys_is_refused_in_a_sentence(tmp_path: Path) -> None:
    keys, path = JobKeys.make(), tmp_path / "keys"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        JobKeys.read(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        keys.write(tmp_path / "nowhere" / "keys")
    os.mkfifo(tmp_path / "pipe", 0o600)
    for other in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ConfigError, match=r"not a plain file|Is a directory"):
            JobKeys.read(other)
        with pytest.raises(ConfigError, match="not a plain file"):
            keys.write(other)
    words = keys.to_text().split()
    for text, reason in [
        ("", "does not begin"),
        ("\0\xff", "does not begin"),
        (" ".join(words[:4]), "3 keys instead of 4"),
        (" ".join([*words[:2], words[4], *words[3:]]), "server keys are not a pair"),
        (" ".join([*words[:4], words[2]]), "client keys are not a pair"),
        (" ".join([*words[:4], "#" * 40]), "client keys are not a pair"),
        (" ".join([*words[:4], '"' * 40]), "client keys are not a pair"),
        (" ".join([*words[:4], "é" * 40]), "client keys are not a pair"),
        (" ".join([*words[:4], words[4][:35]]), "client keys are not a pair"),
    ]:
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match=reason) as refusal:
            JobKeys.read(path)
        assert str(refusal.value).count(". ") == 0
