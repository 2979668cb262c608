"""Gradients on their way to servers: in memory that servers of this host read where it lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.compress.base import Compressor, Layout
from shoal.compress.feedback import Feedback
from shoal.exchange.ps_worker.bucket_shards import Shard
from shoal.server.client.connection import Link
from shoal.server.client.conversations import WorkerProtocol
from shoal.server.client.requests import Request
from shoal.server.protocol.encoded_gradient import turn_of
from shoal.server.protocol.messages import Where
from shoal.server.transport.frames import CODED, RAW
from shoal.server.transport.slabs import Slab
from shoal.world.buckets import Bucket, gaps_of
from shoal.world.shm.memory import SharedMemoryUnavailable

_CPU = torch.device("cpu")
_LINE = 64
"""Bytes to which payloads are aligned."""


class Encoding:
    """One shard's code, its residual, and its payload: memory that must not change until the server has answered."""

    def __init__(self, shard: Shard, compressor: Compressor) -> None:
        layout = Layout(shard.size, shard.bucket.dtype, _CPU)
        self._code = compressor.code(layout)
        self._feedback = Feedback(self._code, layout) if compressor.feedback else None
        pieces = [(piece.start - shard.start, piece.numel) for piece in shard.pieces]
        self._gaps = gaps_of(pieces, shard.size)
        self.payload = self._code.payload()

    def encode(self, gradient: torch.Tensor, turn: int, part: int) -> None:
        """Fill the payload with a part of a step, after adding the residual to the gradient."""
        # Lots are the part's, not the worker's: who takes over a lost worker's part rounds it as that one would have.
        self._code.salt = part
        if self._feedback is not None:
            self._feedback.before(gradient)
        self._code.encode(gradient, self.payload, turn)
        if self._feedback is not None:
            self._feedback.after(self.payload, 1)
            for start, stop in self._gaps:  # nobody's: a sign is never nothing, and would add up here
                self._feedback.residual[start:stop].zero_()

    def forget(self) -> None:
        """Reset the residual: it is of a step that does not count."""
        if self._feedback is not None:
            self._feedback.reset()

    def scale(self, by: float) -> None:
        """Gradients are larger by so much from now on."""
        if self._feedback is not None:
            self._feedback.scale(by)


def make_encodings(shards: Sequence[Shard], compressor: Compressor | None) -> dict[int, Encoding]:
    """By the numbers of the shards; none where gradients travel as they are."""
    return {} if compressor is None else {shard.number: Encoding(shard, compressor) for shard in shards}


class Outgoing:
    """One vector per bucket. On the CPU, gradients are written there at once; from a card they are copied."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        shards: Sequence[Shard],
        device: torch.device,
        compressor: Compressor | None,
        there: Sequence[torch.Tensor] = (),
    ) -> None:
        """`there`: vectors to use, of which servers get bytes."""
        self._shards = shards
        self._encodings = make_encodings(shards, compressor)
        self._slab: Slab | None = None
        self._vectors: list[torch.Tensor] = list(there)
        self._wheres: dict[int, Where] = {}
        """By the number of a shard: where servers of this host find what it gets."""
        if self._encodings:
            self._place_payloads()
        elif not there:
            self._place_gradients(buckets)
        if not self._vectors:
            self._vectors = [torch.zeros(bucket.size, dtype=bucket.dtype, device="cpu") for bucket in buckets]
        self.gradients = self._vectors if device.type == "cpu" else [v.to(device) for v in self._vectors]
        """The vectors that gradients are written into."""

    def _place_gradients(self, buckets: Sequence[Bucket]) -> None:
        self._slab = slab = _slab(sum(bucket.nbytes for bucket in buckets))
        if slab is None:
            return
        offsets, offset = list[int](), 0
        for bucket in buckets:
            offsets.append(offset)
            self._vectors.append(slab.tensor(bucket.dtype, offset, bucket.size))
            offset += bucket.nbytes
        for shard in self._shards:
            dtype = shard.bucket.dtype
            at = offsets[shard.bucket.index] + shard.start * dtype.itemsize
            self._wheres[shard.number] = slab.where(dtype, at, shard.size)

    def _place_payloads(self) -> None:
        # Rounded up, so that no two payloads share a cache line.
        sizes = [-(-coded.payload.nbytes // _LINE) * _LINE for coded in self._encodings.values()]
        self._slab = slab = _slab(sum(sizes))
        if slab is None:
            return
        offset = 0
        for (number, coded), size in zip(self._encodings.items(), sizes, strict=True):
            dtype, count = coded.payload.dtype, coded.payload.numel()
            coded.payload = slab.tensor(dtype, offset, count)
            self._wheres[number] = slab.where(dtype, offset, count)
            offset += size

    def connect(self, link: Link, work: WorkerProtocol) -> None:
        """Send through these."""
        self._link = link
        self._work = work

    def fill(self, bucket: Bucket, vector: torch.Tensor) -> None:
        """A bucket is full; its gradients are in `vector`."""
        # On the CPU autograd has written into the shared memory itself.
        if vector is not self._vectors[bucket.index]:
            self._vectors[bucket.index].copy_(vector)

    def stage(self, bucket: Bucket, claim: tuple[int, int], micro: int) -> Sent:
        """Send a bucket that is full; its vector may be written again when it has arrived."""
        requests = []
        for shard in self._shards:
            if shard.bucket is bucket:
                part, codec = self._vectors[bucket.index][shard.start : shard.stop], RAW
                if shard.number in self._encodings:
                    coded = self._encodings[shard.number]
                    coded.encode(part, turn_of(claim[0], micro), claim[1])
                    part, codec = coded.payload, CODED
                where = self._wheres.get(shard.number)
                with self._link.lock:
                    requests.append(self._work.stage(shard.number, claim, micro, part, where, codec))
        return Sent(self._link, requests)

    def where(self, shard: Shard) -> Where | None:
        """Where servers of this host find what a shard gets; None: they get bytes."""
        return self._wheres.get(shard.number)

    def forget(self) -> None:
        """The step does not count: its residuals are not sent later."""
        for coded in self._encodings.values():
            coded.forget()

    def scale(self, by: float) -> None:
        """Gradients are larger by so much from now on."""
        for coded in self._encodings.values() if by != 1.0 else ():
            coded.scale(by)


class Sent:
    """A bucket on its way."""

    def __init__(self, link: Link, requests: Sequence[Request]) -> None:
        self._link = link
        self._requests = requests

    def wait(self) -> None:
        """Until all servers hold it."""
        self._link.wait(self._requests)


def _slab(nbytes: int) -> Slab | None:
    try:
        return Slab(nbytes)
    except SharedMemoryUnavailable:  # servers get bytes
        return None
