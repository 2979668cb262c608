"""Tensors that are sealed: what was sealed comes out, nothing else does, and senders' orders are kept meanwhile."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.server.protocol.messages import Message, MessageKind
from shoal.server.transport import cipher
from shoal.server.transport.cipher import PIECE, TICKET, Coming, Part, can_seal, new_ticket, seal
from shoal.server.transport.frames import BadFrame, decode, encode, payload_of, sealed_size
from shoal.server.transport.inbox import PATIENCE, Inbox

A, B = 5, 6
"""Two senders."""


def test_this_machine_can_seal() -> None:
    """The dev extra installs `cryptography`. Without it CURVE carries tensors, and the tests below mean nothing."""
    assert can_seal()


class OldCipher:
    """AES-GCM as a `cryptography` from before `encrypt_into` has it."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def encrypt(self, nonce: bytes, clear: bytes, associated: bytes) -> bytes:
        return self._cipher.encrypt(nonce, clear, associated)

    def decrypt(self, nonce: bytes, sealed: bytes, associated: bytes) -> bytes:
        return self._cipher.decrypt(nonce, sealed, associated)


def test_versions_of_the_library_open_each_others_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket, payload = new_ticket(), random.Random(1).randbytes(PIECE + 9)
    for sealing, opening in ((AESGCM, OldCipher), (OldCipher, AESGCM)):
        monkeypatch.setattr(cipher, "_aesgcm", lambda kind=sealing: kind)
        pieces = [bytes(piece) for piece in seal(payload, ticket)]
        monkeypatch.setattr(cipher, "_aesgcm", lambda kind=opening: kind)
        coming = Coming(ticket, len(payload))
        assert not coming.take(pieces[0][:-1] + bytes([pieces[0][-1] ^ 1]))
        assert [coming.take(piece) for piece in pieces] == [True, True]
        assert bytes(coming.payload) == payload


def test_who_cannot_open_seals_survives_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sends it any, since it has not agreed to; whoever does all the same is not believed."""
    frames, pieces = sealed(large(0))
    monkeypatch.setattr(cipher, "_aesgcm", lambda: None)
    assert not can_seal()
    inbox = Inbox()
    inbox.letter(A, frames, 0.0)
    inbox.letter(A, encode(small(1)), 0.0)
    inbox.piece(A, pieces[0], 0.0)
    assert drain(inbox) == []
    assert inbox.overdue(PATIENCE + 0.1) == [A]
    assert drain(inbox) == [(A, 1)]


def test_no_nonce_is_used_twice_under_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bytes, bytes]] = []

    class Watched(OldCipher):
        def __init__(self, key: bytes) -> None:
            super().__init__(key)
            self._key = key

        def encrypt(self, nonce: bytes, clear: bytes, associated: bytes) -> bytes:
            seen.append((self._key, nonce))
            return super().encrypt(nonce, clear, associated)

    monkeypatch.setattr(cipher, "_aesgcm", lambda: Watched)
    for _ in range(3):
        assert len(list(seal(bytes(3 * PIECE + 1), new_ticket()))) == 4
    assert len(set(seen)) == len(seen) == 12


@pytest.mark.parametrize("size", [1, 31, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_what_was_sealed_comes_out(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    ticket = new_ticket()
    pieces = [bytes(piece) for piece in seal(payload, ticket)]
    assert len(pieces) == -(-size // PIECE)
    assert payload[:31] not in b"".join(pieces) or size < 8
    coming = Coming(ticket, size)
    for piece in pieces:
        assert not coming.whole
        assert coming.take(piece)
    assert coming.whole
    assert bytes(coming.payload) == payload
    assert not coming.take(pieces[0])


def test_two_seals_of_the_same_have_nothing_in_common() -> None:
    one, two = (bytes(next(seal(bytes(1000), new_ticket()))) for _ in range(2))
    assert one[:16] != two[:16]
    assert one[20:] != two[20:]


def test_the_payload_may_change_after_it_was_sealed() -> None:
    payload, ticket = bytearray(b"x" * 1000), new_ticket()
    pieces = list(seal(memoryview(payload), ticket))
    payload[:] = b"y" * 1000
    coming = Coming(ticket, 1000)
    assert coming.take(pieces[0])
    assert bytes(coming.payload) == b"x" * 1000


def test_no_bit_of_a_piece_can_change() -> None:
    ticket = new_ticket()
    (piece,) = (bytes(piece) for piece in seal(b"sixteen letters!", ticket))
    coming = Coming(ticket, 16)
    for at in range(len(piece)):
        for bit in range(8):
            assert not coming.take(piece[:at] + bytes([piece[at] ^ 1 << bit]) + piece[at + 1 :])
    for cut in range(len(piece)):
        assert not coming.take(piece[:cut])
    assert not coming.take(piece + b"\0")
    assert not Coming(ticket, 15).take(piece)
    number, key = TICKET.unpack(ticket)
    assert not Coming(TICKET.pack(number, key[::-1]), 16).take(piece)
    assert not Coming(TICKET.pack(number[::-1], key), 16).take(piece)
    assert coming.take(piece)


def test_pieces_are_taken_in_their_order_and_once() -> None:
    ticket, payload = new_ticket(), bytes(2 * PIECE + 5)
    first, second, third = (bytes(piece) for piece in seal(payload, ticket))
    coming = Coming(ticket, len(payload))
    assert not coming.take(second)
    assert coming.take(first)
    assert not coming.take(first)
    assert not coming.take(third)
    # A piece that says it is another: its number is part of what the key opens.
    assert not coming.take(first[:16] + second[16:20] + first[20:])
    assert coming.take(second)
    assert coming.take(third)


def test_a_message_without_its_tensor() -> None:
    message, ticket = large(7), new_ticket()
    frames = encode(message, ticket)
    assert sealed_size(frames) == message.tensor.nbytes  # type: ignore[union-attr]
    assert sealed_size(encode(message)) is None
    assert sealed_size(encode(Message(MessageKind.ALIVE))) is None
    found = decode(frames, payload_of(message))
    assert found.seq == 7
    assert torch.equal(found.tensor, message.tensor)  # type: ignore[arg-type]
    with pytest.raises(BadFrame):
        decode(frames)  # the ticket is no tensor
    with pytest.raises(BadFrame):
        decode(encode(message), payload_of(message))  # it has one already
    with pytest.raises(BadFrame):
        decode(frames, bytes(8))
    with pytest.raises(BadFrame):
        sealed_size([*frames[:2], new_ticket()])
    with pytest.raises(BadFrame):
        sealed_size([*frames[:2], bytes(frames[2]) + b"\0"])


# The inbox.


def large(seq: int, elements: int = 40_000) -> Message:
    return Message(MessageKind.CALL, seq=seq, tensor=torch.full((elements,), float(seq), dtype=torch.float64))


def small(seq: int) -> Message:
    return Message(MessageKind.CALL, seq=seq)


def sealed(message: Message) -> tuple[list[Part], list[bytes]]:
    ticket = new_ticket()
    return encode(message, ticket), [bytes(piece) for piece in seal(payload_of(message), ticket)]


def drain(inbox: Inbox) -> list[tuple[int, int]]:
    """Who sent what, by number; each tensor is the one of its message."""
    found, inbox.ready = inbox.ready, []
    for _, message in found:
        if message.tensor is not None:
            assert torch.equal(message.tensor, torch.full_like(message.tensor, message.seq))
    return [(sender, message.seq) for sender, message in found]


def test_what_comes_after_a_sealed_message_waits_and_others_do_not() -> None:
    inbox = Inbox()
    frames, pieces = sealed(large(0, 300_000))
    assert len(pieces) == 3
    inbox.letter(A, frames, 0.0)
    inbox.letter(A, encode(small(1)), 0.0)
    inbox.letter(B, encode(small(2)), 0.0)
    assert drain(inbox) == [(B, 2)]
    for piece in pieces[:2]:
        inbox.piece(A, piece, 0.1)
    inbox.piece(B, pieces[2], 0.2)  # another's pieces are not one's own
    assert drain(inbox) == []
    inbox.piece(A, pieces[2], 0.3)
    assert drain(inbox) == [(A, 0), (A, 1)]


def test_pieces_may_come_before_their_message() -> None:
    inbox = Inbox()
    frames, pieces = sealed(large(3, 300_000))
    for piece in pieces:
        inbox.piece(A, piece, 0.0)
    inbox.letter(A, frames, 0.1)
    assert drain(inbox) == [(A, 3)]


def test_a_later_piece_says_that_earlier_ones_are_lost() -> None:
    inbox = Inbox()
    lost, late = sealed(large(0)), sealed(large(2))
    inbox.letter(A, lost[0], 0.0)
    inbox.letter(A, encode(small(1)), 0.0)
    inbox.letter(A, late[0], 0.0)
    inbox.piece(A, late[1][0], 0.1)
    assert drain(inbox) == [(A, 1), (A, 2)]


def test_nobody_waits_for_ever() -> None:
    inbox = Inbox()
    inbox.letter(A, sealed(large(0))[0], 0.0)
    inbox.letter(A, encode(small(1)), 0.0)
    frames, pieces = sealed(large(2, 300_000))
    inbox.letter(B, frames, 0.0)
    inbox.piece(B, pieces[0], PATIENCE - 1)  # slow, but it comes
    assert inbox.overdue(PATIENCE) == []
    assert inbox.overdue(PATIENCE + 0.1) == [A]
    assert drain(inbox) == [(A, 1)]
    assert inbox.overdue(PATIENCE + 0.2) == []
    assert inbox.overdue(2 * PATIENCE) == [B]
    inbox.letter(A, sealed(large(4))[0], 0.0)
    inbox.forget(A)
    assert inbox.overdue(PATIENCE + 1) == []


def test_all_that_waits_in_vain_goes_at_once() -> None:
    inbox = Inbox()
    for seq in range(8):
        inbox.letter(A, sealed(large(seq))[0], 0.0)
    inbox.letter(A, encode(small(8)), 0.0)
    assert inbox.overdue(PATIENCE + 0.1) == [A]
    assert drain(inbox) == [(A, 8)]
    inbox.letter(A, sealed(large(9))[0], 20.0)
    inbox.letter(A, encode(small(10)), 20.0)
    inbox.cut(A, 20.1)
    assert drain(inbox) == [(A, 10)]


def test_nonsense_is_counted_or_forgotten() -> None:
    inbox = Inbox()
    inbox.letter(A, [b"no", b"message"], 0.0)
    frames, pieces = sealed(replace(large(0), tensor=torch.zeros(9, dtype=torch.float64)))
    inbox.letter(A, [frames[0], frames[1], bytes(32)], 0.0)
    assert inbox.refused == 2
    for _ in range(1000):
        inbox.piece(A, random.randbytes(100_000), 0.0)
        inbox.piece(A, bytes(3 * PIECE), 0.0)
    assert len(inbox._early[A].pieces) == 64
    assert inbox.overdue(PATIENCE + 0.1) == []
    assert not inbox._early, "pieces of messages that never came stay in memory"
    inbox.letter(A, frames, 0.0)
    inbox.piece(A, pieces[0], 0.0)
    assert [message.seq for _, message in inbox.ready] == [0]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_any_two_orders_of_arrival(data: st.DataObject) -> None:
    """Letters in their order, pieces in theirs, mixed anyhow: all comes in order, but what has lost a piece."""
    kinds = data.draw(st.lists(st.booleans(), min_size=1, max_size=8))
    letters: list[list[Part]] = []
    pieces: list[bytes] = []
    expected = []
    for seq, is_large in enumerate(kinds):
        if not is_large:
            letters.append(encode(small(seq)))
            expected.append(seq)
            continue
        frames, made = sealed(large(seq, 150_000))
        lost = data.draw(st.sampled_from([None, None, None, *range(len(made))]))
        letters.append(frames)
        pieces += [piece for index, piece in enumerate(made) if index != lost]
        if lost is None:
            expected.append(seq)
    inbox, got, now = Inbox(), [], 0.0
    while letters or pieces:
        from_letters = data.draw(st.booleans()) if letters and pieces else bool(letters)
        if from_letters:
            inbox.letter(A, letters.pop(0), now)
        else:
            inbox.piece(A, pieces.pop(0), now)
        got += drain(inbox)
    while inbox.overdue(now := now + PATIENCE + 1):
        got += drain(inbox)
    assert [seq for _, seq in got] == expected
    assert inbox.refused == 0
