"""Sums of compressed buckets.

    one host, or one worker a host:   encode → all-reduce or all-gather of payloads → decode
    several workers on each host:     sum within the host, each worker a slice; then the same between those who have the
                                      same slice on other hosts; then, for a whole sum, gather within the host

Payloads that can be added up are all-reduced. Others are gathered, and each worker adds up what they say, in rank
order. Where every worker wants only its own slice, each slice has a payload of its own and goes to its owner alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shoal.compress.base import Code, Compressor, Layout
from shoal.compress.feedback import Feedback
from shoal.exchange.courier import Courier, Errand
from shoal.exchange.reducer import Reducer, Residual
from shoal.world.buckets import Bucket, gaps_of
from shoal.world.world import Handle, Traffic, World


@dataclass
class Line:
    """How one vector travels: a code for each of its equal parts, and what each has not sent yet."""

    bucket: Bucket
    codes: list[Code]
    feedbacks: list[Feedback | None]
    starts: list[int]
    """Where each slice of it begins in the bucket; a code may be for all of them."""
    width: int
    """Of a slice."""
    turn: int = 0
    payload: torch.Tensor | None = None

    def parts(self, feedback: Feedback) -> tuple[torch.Tensor, ...]:
        """What has not been sent, slice by slice."""
        return feedback.residual.chunk(len(self.starts) // len(self.codes))

    def __post_init__(self) -> None:
        self.gaps = [gaps_within(self.bucket, start, start + self.width) for start in self.starts]

    def clear(self, vectors: Sequence[torch.Tensor]) -> None:
        """Between parameters there is nothing, though a code may say something of it; one vector for each slice."""
        for vector, gaps in zip(vectors, self.gaps, strict=True):
            for start, stop in gaps:
                vector[start:stop].zero_()

    def keep(self) -> None:
        """The turn is over: what was not sent of gaps never was."""
        kept = [part for feedback in self.feedbacks if feedback is not None for part in self.parts(feedback)]
        if kept:
            self.clear(kept)

    def encode(self, vector: torch.Tensor) -> torch.Tensor:
        """The payloads of all parts, one after the other; the vector gets what was left over from earlier turns."""
        if self.payload is None:
            self.payload = torch.cat([code.payload() for code in self.codes])
        parts, payloads = vector.chunk(len(self.codes)), self.payload.chunk(len(self.codes))
        for code, feedback, part, payload in zip(self.codes, self.feedbacks, parts, payloads, strict=True):
            if feedback is not None:
                feedback.before(part)
            code.encode(part, payload, self.turn)
            if feedback is not None and code.rounds == 1:
                feedback.after(payload, 1)
        self.keep()
        self.turn += 1
        return self.payload


class Compressed(Reducer):
    """Sums of what a compressor leaves of each bucket; a courier does them while backward goes on."""

    def __init__(self, world: World, compressor: Compressor) -> None:
        self._whole, self._compressor = world, compressor
        self._hosts = _equal_hosts(world)
        columns = [list(ranks) for ranks in zip(*self._hosts, strict=True)]
        if len(columns) > 1 and len(self._hosts) > 1:
            self._local, self._across = world.cut(self._hosts), world.cut(columns)
        else:
            self._local, self._across = World.alone(world.device), world.apart()
        self._traffic = Traffic()  # the courier counts for itself
        self._local.traffic = self._across.traffic = self._traffic
        self._courier = Courier(world.device)
        self._lines: list[Line] = []

    def lay_out(self, buckets: Sequence[Bucket], shapes: Mapping[str, torch.Size], scattered: bool) -> None:
        self._lines = [self._make_line(bucket, shapes, scattered) for bucket in buckets]

    def all_reduce(self, bucket: Bucket, vector: torch.Tensor) -> Handle:
        line = self._lines[bucket.index]
        return self._send(lambda: self._sum_all(line, vector))

    def reduce_scatter(self, bucket: Bucket, out: torch.Tensor, vector: torch.Tensor) -> Handle:
        line = self._lines[bucket.index]
        return self._send(lambda: self._sum_slice(line, out, vector))

    def drop(self) -> None:
        for feedback in self._feedbacks():
            feedback.reset()

    def rescale(self, by: float) -> None:
        for feedback in self._feedbacks():
            feedback.scale(by)

    def residuals(self) -> list[Residual]:
        found = []
        for line in self._lines:
            kept = [
                part for feedback in line.feedbacks if feedback is not None for part in line.parts(feedback)
            ]
            found += [
                Residual(line.bucket, start, part, self._across.size)
                for start, part in zip(line.starts if kept else (), kept, strict=True)
            ]
        return found

    def warm(self) -> dict[str, torch.Tensor]:
        found = {
            f"{line.bucket.index}.{number}.{key}": value
            for line in self._lines
            for number, code in enumerate(line.codes)
            for key, value in code.state().items()
        }
        return {"turns": torch.tensor([line.turn for line in self._lines]), **found}

    def warm_up(self, found: Mapping[str, torch.Tensor]) -> None:
        now = self.warm()
        if now.keys() != found.keys() or any(now[key].shape != found[key].shape for key in now):
            return  # of other buckets, or another compressor
        for line, turn in zip(self._lines, found["turns"].tolist(), strict=True):
            line.turn = turn
            for number, code in enumerate(line.codes):
                path = f"{line.bucket.index}.{number}."
                code.load_state({key: found[path + key] for key in code.state()})

    def close(self) -> None:
        self._courier.close()

    # What happens to a vector, on the courier's thread.

    def _sum_all(self, line: Line, vector: torch.Tensor) -> None:
        part = vector
        if self._local.size > 1:
            part = torch.empty_like(vector[: vector.numel() // self._local.size])
            self._local.reduce_scatter(part, vector).wait()
        self._sum(line, part)
        if self._local.size > 1:
            self._local.all_gather(vector, part).wait()

    def _sum_slice(self, line: Line, out: torch.Tensor, vector: torch.Tensor) -> None:
        part = vector
        if self._local.size > 1:
            slices = vector.chunk(self._whole.size)
            columns = [slices[rank] for ranks in zip(*self._hosts, strict=True) for rank in ranks]
            part = torch.empty_like(vector[: vector.numel() // self._local.size])
            self._local.reduce_scatter(part, torch.cat(columns)).wait()
        if len(line.codes) < self._across.size:
            self._sum(line, part)
            out.copy_(part.chunk(self._across.size)[self._across.rank])
            return  # its gaps are clear
        code, payload = line.codes[self._across.rank], line.encode(part)
        if code.summable:
            mine = code.payload()
            self._across.reduce_scatter(mine, payload).wait()
            code.decode(mine, out, add=False)
        else:
            received = torch.empty_like(payload)
            self._across.all_to_all(received, payload).wait()
            for number, theirs in enumerate(received.chunk(self._across.size)):
                code.decode(theirs, out, add=number > 0)
        for start, stop in line.gaps[self._across.rank]:
            out[start:stop].zero_()

    def _sum(self, line: Line, part: torch.Tensor) -> None:
        """The sum of a part between hosts, in place."""
        (code,), (feedback,) = line.codes, line.feedbacks
        payload, among = line.encode(part), self._across.size
        if not code.summable:
            received = torch.empty(payload.numel() * among, dtype=payload.dtype, device=payload.device)
            self._across.all_gather(received, payload).wait()
            for number, theirs in enumerate(received.chunk(among)):
                code.decode(theirs, part, add=number > 0)
        else:
            self._across.all_reduce(payload).wait()
            if code.rounds == 2:
                payload = code.second(part, payload)
                self._across.all_reduce(payload).wait()
            code.decode(payload, part, add=False)
            if feedback is not None and code.rounds == 2:
                feedback.after(payload, among)
                line.keep()
        line.clear(part.chunk(len(line.starts)))

    # What there is for a vector.

    def _make_line(self, bucket: Bucket, shapes: Mapping[str, torch.Size], scattered: bool) -> Line:
        local, within = self._local, self._local.size > 1
        if not scattered:
            width = bucket.size // local.size
            return self._line(
                bucket, [local.rank * width], width, () if within else _matrices(bucket, shapes)
            )
        width = bucket.size // self._whole.size
        mine = [ranks[local.rank] for ranks in self._hosts] if within else range(self._whole.size)
        starts = [rank * width for rank in mine]
        line = self._line(bucket, starts, width, ())
        if line.codes[0].rounds == 1:
            return line
        # Everybody must know all sums of the first round: one code for all slices.
        matrices = () if within else _matrices(bucket, shapes)
        return replace(self._line(bucket, [0], width * len(starts), matrices), starts=starts, width=width)

    def _line(
        self, bucket: Bucket, starts: list[int], width: int, matrices: tuple[tuple[int, int, int], ...]
    ) -> Line:
        layout = Layout(width, bucket.dtype, self._whole.device, matrices)
        codes = [self._compressor.code(layout) for _ in starts]
        feedbacks = [Feedback(code, layout) if self._compressor.feedback else None for code in codes]
        return Line(bucket, codes, feedbacks, starts, width)

    def _feedbacks(self) -> list[Feedback]:
        return [feedback for line in self._lines for feedback in line.feedbacks if feedback is not None]

    def _send(self, action: Callable[[], None]) -> Handle:
        return _Counted(self._courier.send(action), self._traffic, self._whole.traffic)


class _Counted:
    """An errand whose bytes count for the worker when it is done."""

    def __init__(self, errand: Errand, counted: Traffic, into: Traffic) -> None:
        self._errand, self._counted, self._into = errand, counted, into

    def wait(self) -> None:
        self._errand.wait()
        sent = self._counted.bytes_sent
        self._counted.bytes_sent -= sent
        self._into.bytes_sent += sent


def gaps_within(bucket: Bucket, start: int, stop: int) -> list[tuple[int, int]]:
    """Where no parameter lies in a range of a bucket, counted from its start.

    >>> from shoal.world.buckets import lay_out
    >>> bucket = lay_out([("b", 3, torch.float32), ("a", 100, torch.float32)], slices=2, capacity=4096)[0]
    >>> gaps_within(bucket, 0, 128), gaps_within(bucket, 128, 256)
    ([(3, 64)], [(36, 128)])
    """
    cut = [(max(low, start) - start, min(high, stop) - start) for low, high in gaps_of(bucket)]
    return [(low, high) for low, high in cut if low < high]


def _equal_hosts(world: World) -> list[list[int]]:
    """The ranks of each host; all as one host where hosts have different numbers of them."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(world.hosts):
        by_host.setdefault(host, []).append(rank)
    hosts = list(by_host.values())
    return hosts if len({len(ranks) for ranks in hosts}) == 1 else [list(range(world.size))]


def _matrices(bucket: Bucket, shapes: Mapping[str, torch.Size]) -> tuple[tuple[int, int, int], ...]:
    return tuple(
        (place.start, shapes[place.name][0], place.numel // shapes[place.name][0])
        for place in bucket.places
        if len(shapes[place.name]) > 1 and place.numel
    )
