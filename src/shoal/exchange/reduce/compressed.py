"""Sums of compressed buckets.

    one host, or one worker a host:   encode → all-reduce or all-gather of payloads → decode
    several workers on each host:     sum within the host, each worker a slice; then the same between those who have the
                                      same slice on other hosts; then, for a whole sum, gather within the host

Payloads that can be added up are all-reduced. Others are gathered, and each worker adds up what they say, in rank
order. Where every worker wants only its own slice, each slice has a payload of its own and goes to its owner alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from shoal.compress.base import Compressor, Layout
from shoal.compress.feedback import Feedback
from shoal.exchange.reduce.comm_thread import CommTask, CommThread
from shoal.exchange.reduce.compressed_bucket import CompressedBucket
from shoal.exchange.reduce.reducer import Reducer, Residual
from shoal.world.buckets import Bucket
from shoal.world.hosts import group_ranks
from shoal.world.world import Handle, Traffic, World


class Compressed(Reducer):
    """Sums of what a compressor leaves of each bucket; the communication thread makes them while backward goes on."""

    def __init__(self, world: World, compressor: Compressor) -> None:
        self._whole = world
        self._compressor = compressor
        self._hosts = equal_hosts(world)
        # Compress only between hosts: within one, shared memory is faster than encoding. A column is the workers with
        # the same place on each host; each column compresses its own part of the sum of its host.
        columns = [list(ranks) for ranks in zip(*self._hosts, strict=True)]
        if len(columns) > 1 and len(self._hosts) > 1:
            self._local = world.cut(self._hosts)
            self._across = world.cut(columns)
        else:
            self._local = World.alone(world.device)
            self._across = world.new_group()
        self._traffic = Traffic()  # the communication thread counts for itself
        self._local.traffic = self._across.traffic = self._traffic
        self._comm_thread = CommThread(world.device)
        self._buckets: list[CompressedBucket] = []
        self._last: Sum | None = None

    def lay_out(self, buckets: Sequence[Bucket], shapes: Mapping[str, torch.Size], scattered: bool) -> None:
        self._buckets = [self._make_bucket(bucket, shapes, scattered) for bucket in buckets]
        for compressed in self._buckets:
            compressed.scattered = scattered

    def all_reduce(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        compressed = self._buckets[bucket.index]
        return self._send(lambda: self._sum_all(compressed, vector))

    def reduce_scatter(self, bucket: Bucket, out: torch.Tensor, vector: torch.Tensor) -> Handle:
        compressed = self._buckets[bucket.index]
        return self._send(lambda: self._sum_slice(compressed, out, vector))

    def _send(self, begin: Begin) -> Handle:
        """Begin a sum, then complete the one before: its payloads travel while these are made."""
        sum_, before = Sum(self._comm_thread, begin, self._traffic, self._whole.traffic), self._last
        self._last = sum_
        if before is not None:
            before.complete()
        return sum_

    def drop(self) -> None:
        for feedback in self._feedbacks():
            feedback.reset()

    def rescale(self, by: float) -> None:
        for feedback in self._feedbacks():
            feedback.scale(by)

    def residuals(self) -> list[Residual]:
        return [left for compressed in self._buckets for left in self._residuals(compressed)]

    def _residuals(self, compressed: CompressedBucket) -> list[Residual]:
        kept = [
            part
            for feedback in compressed.feedbacks
            if feedback is not None
            for part in compressed.parts(feedback)
        ]
        starts = compressed.starts if kept else ()
        return [
            Residual(compressed.bucket, start, part, self._across.size)
            for start, part in zip(starts, kept, strict=True)
        ]

    def give_back(self, bucket: Bucket, start: int, stop: int, result: torch.Tensor) -> None:
        compressed = self._buckets[bucket.index]
        # A sum over `size` workers came back to each of them: together they must return it once.
        share = 1.0 if compressed.scattered else 1 / self._across.size  # a slice is one worker's alone
        for left in self._residuals(compressed):
            low, high = max(start, left.start), min(stop, left.start + left.tensor.numel())
            if low < high:
                part = left.tensor[low - left.start : high - left.start]
                part.add_(result[low - start : high - start], alpha=share)

    def warm(self) -> dict[str, torch.Tensor]:
        found = {
            f"{compressed.bucket.index}.{number}.{key}": value
            for compressed in self._buckets
            for number, code in enumerate(compressed.codes)
            for key, value in code.state().items()
        }
        return {
            "turns": torch.tensor([compressed.turn for compressed in self._buckets], device="cpu"),
            **found,
        }

    def warm_start(self, found: Mapping[str, torch.Tensor]) -> None:
        now = self.warm()
        if now.keys() != found.keys() or any(now[key].shape != found[key].shape for key in now):
            return  # of other buckets, or another compressor
        for compressed, turn in zip(self._buckets, found["turns"].tolist(), strict=True):
            compressed.turn = turn
            for number, code in enumerate(compressed.codes):
                path = f"{compressed.bucket.index}.{number}."
                code.load_state({key: found[path + key] for key in code.state()})

    def close(self) -> None:
        self._last = None
        self._comm_thread.close()

    # What happens to a vector, on the communication thread. Where completing a sum takes no collective, it may wait
    # until the next has begun; else the order of collectives would depend on when that is, so all is done at once.

    def _sum_all(self, compressed: CompressedBucket, vector: torch.Tensor) -> Complete:
        if self._local.size == 1:
            return self._sum(compressed, vector)
        part = torch.empty_like(vector[: vector.numel() // self._local.size])
        self._local.reduce_scatter(part, vector).wait()
        self._sum(compressed, part)()
        self._local.all_gather(vector, part).wait()
        return _nothing

    def _sum_slice(self, compressed: CompressedBucket, out: torch.Tensor, vector: torch.Tensor) -> Complete:
        part = vector
        if self._local.size > 1:
            slices = vector.chunk(self._whole.size)
            # The slices of one column next to each other, so that one reduce-scatter within the host gives each worker
            # the slices that its column needs.
            columns = [slices[rank] for ranks in zip(*self._hosts, strict=True) for rank in ranks]
            part = torch.empty_like(vector[: vector.numel() // self._local.size])
            self._local.reduce_scatter(part, torch.cat(columns)).wait()
        # A code of two rounds sums all slices as one vector (see `_make_bucket`): cut it afterwards.
        if len(compressed.codes) < self._across.size:
            self._sum(compressed, part)()
            out.copy_(part.chunk(self._across.size)[self._across.rank])
            return _nothing
        code, payload = compressed.codes[self._across.rank], compressed.encode(part)
        received = code.payload() if code.summable else torch.empty_like(payload)
        move = self._across.reduce_scatter if code.summable else self._across.all_to_all
        handle = move(received, payload)

        def complete() -> None:
            handle.wait()
            # In rank order, so that the sum does not depend on whose payload came first.
            for number, theirs in enumerate(received.chunk(1 if code.summable else self._across.size)):
                code.decode(theirs, out, add=number > 0)
            for start, stop in compressed.gaps[self._across.rank]:
                out[start:stop].zero_()

        return complete

    def _sum(self, compressed: CompressedBucket, part: torch.Tensor) -> Complete:
        """The sum of a part between hosts, in place."""
        (code,), payload, among = compressed.codes, compressed.encode(part), self._across.size
        if code.rounds == 2:
            self._sum_twice(compressed, part, payload)
            return _nothing
        received, count = payload, 1
        if code.summable:
            handle = self._across.all_reduce(payload)
        else:
            count = among
            received = torch.empty(payload.numel() * among, dtype=payload.dtype, device=payload.device)
            handle = self._across.all_gather(received, payload)

        def complete() -> None:
            handle.wait()
            for number, theirs in enumerate(received.chunk(count)):
                code.decode(theirs, part, add=number > 0)
            compressed.clear(part.chunk(len(compressed.starts)))

        return complete

    def _sum_twice(self, compressed: CompressedBucket, part: torch.Tensor, payload: torch.Tensor) -> None:
        """Two rounds: the second payloads need the sum of the first."""
        (code,), (feedback,) = compressed.codes, compressed.feedbacks
        self._across.all_reduce(payload).wait()
        payload = code.second(part, payload)
        self._across.all_reduce(payload).wait()
        code.decode(payload, part, add=False)
        if feedback is not None:
            feedback.after(payload, self._across.size)
            compressed.keep()
        compressed.clear(part.chunk(len(compressed.starts)))

    # Codes and residuals of a bucket.

    def _make_bucket(
        self, bucket: Bucket, shapes: Mapping[str, torch.Size], scattered: bool
    ) -> CompressedBucket:
        local, within = self._local, self._local.size > 1
        if not scattered:
            width = bucket.size // local.size
            return self._compressed_bucket(
                bucket, [local.rank * width], width, None if within else matrices_of(bucket, shapes)
            )
        width = bucket.size // self._whole.size
        mine = [ranks[local.rank] for ranks in self._hosts] if within else range(self._whole.size)
        starts = [rank * width for rank in mine]
        compressed = self._compressed_bucket(bucket, starts, width, None)
        if compressed.codes[0].rounds == 1:
            return compressed
        # Everybody must know all sums of the first round: one code for all slices.
        matrices = None if within else matrices_of(bucket, shapes)
        return replace(
            self._compressed_bucket(bucket, [0], width * len(starts), matrices), starts=starts, width=width
        )

    def _compressed_bucket(
        self, bucket: Bucket, starts: list[int], width: int, matrices: tuple[tuple[int, int, int], ...] | None
    ) -> CompressedBucket:
        layout = Layout(width, bucket.dtype, self._whole.device, matrices)
        codes = [self._compressor.code(layout) for _ in starts]
        for code in codes:
            # Stochastic rounding has to differ between workers, or their errors would add up instead of averaging out.
            code.salt = self._whole.rank
        feedbacks = [Feedback(code, layout) if self._compressor.feedback else None for code in codes]
        return CompressedBucket(bucket, codes, feedbacks, starts, width)

    def _feedbacks(self) -> list[Feedback]:
        return [
            feedback
            for compressed in self._buckets
            for feedback in compressed.feedbacks
            if feedback is not None
        ]


Complete = Callable[[], None]
Begin = Callable[[], Complete]


def _nothing() -> None:
    return


class Sum:
    """A sum that the communication thread begins, and completes when the next has begun or somebody waits for it."""

    def __init__(self, comm_thread: CommThread, begin: Begin, counted: Traffic, into: Traffic) -> None:
        self._comm_thread = comm_thread
        self._counted = counted
        self._into = into
        self._complete: Complete | None = None
        self._sent = Traffic()
        self._begun = comm_thread.send(lambda: self._begin(begin))
        self._completed: CommTask | None = None

    def complete(self) -> None:
        """Have it completed, after all that has been asked for so far."""
        if self._completed is None:
            self._completed = self._comm_thread.send(self._finish)

    def wait(self) -> None:
        self.complete()
        self._begun.wait()
        assert self._completed is not None
        self._completed.wait()
        self._into.take(self._sent)

    # On the communication thread, which alone counts.

    def _begin(self, begin: Begin) -> None:
        self._complete = begin()
        self._sent.take(self._counted)

    def _finish(self) -> None:
        if self._complete is not None:  # else it has not begun: that error is what to show
            self._complete()
            self._complete = None
            self._sent.take(self._counted)


def equal_hosts(world: World) -> list[list[int]]:
    """The ranks of each host; all as one host where hosts have different numbers of them."""
    hosts = group_ranks(world.hosts)
    return hosts if len({len(ranks) for ranks in hosts}) == 1 else [list(range(world.size))]


def matrices_of(bucket: Bucket, shapes: Mapping[str, torch.Size]) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (place.start, shapes[place.name][0], place.numel // shapes[place.name][0])
        for place in bucket.places
        if len(shapes[place.name]) > 1 and place.numel
    )
