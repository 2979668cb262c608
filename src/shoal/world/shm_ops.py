"""Collectives over shared memory, written as rounds.

Each rank has a staging area with two halves. In round k a rank writes into half k % 2 of its own area,
publishes, waits until all have published round k, and then reads from anybody's half k % 2. One counter is
enough: a rank publishes round k only after it has read all it needs of round k - 1, so whoever has seen
everybody's round k may write over round k - 1 in round k + 1.

Every collective here is a generator that yields where its part of a round is written; whoever drives it
publishes, waits for all, and resumes it. It never waits itself, so the first part can be published the moment
the collective is issued, and the rest be done by another thread.

Reductions always run in rank order, ((r0 + r1) + r2) + …, whatever the collective and the size. So all ranks
hold the same bits, and an all-reduce has the same bits as a reduce-scatter followed by an all-gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.world.flags import control_bytes
from shoal.world.memory import SharedRegion

Rounds = Iterator[None]
"""A collective under way: each item says "my part of this round is written"."""
Combine = Callable[..., Tensor]

HALF = 2 << 20
"""Bytes of one half of one rank's staging area."""
SMALL = 64 << 10
"""Up to so many bytes per rank an all-reduce is one round in which everybody reduces everything."""
CHUNK_PAIR = 512 << 10
"""Bytes of a large all-reduce that two ranks handle per round."""
CHUNK_SUM = 256 << 10
"""Bytes reduced per step, so that the running result of more than two parts stays in the L2 cache."""

_COMBINE: dict[ReduceOp.RedOpType, Combine] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
_SUM = ReduceOp(ReduceOp.SUM)


def region_bytes(size: int) -> int:
    """Bytes a group of `size` ranks shares: its control page and everybody's staging area."""
    return control_bytes(size) + size * 2 * HALF


class Staging:
    """The staging areas of a group, and every collective as a generator over them. All tensors are flat."""

    def __init__(self, region: SharedRegion, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.peers = [(rank + step) % size for step in range(1, size)]
        self._region = region
        self._half = 0
        self._areas: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self._scratch = torch.empty(CHUNK_SUM, dtype=torch.uint8)

    def is_one_round(self, nbytes: int) -> bool:
        """Whether a collective that stages `nbytes` per pair of ranks is over after one round."""
        return nbytes <= min(SMALL, HALF // self.size)

    # Reductions

    def all_reduce(self, tensor: Tensor, op: ReduceOp) -> Rounds:
        """Every rank's `tensor` becomes the reduction of all."""
        size = tensor.element_size()
        if self.size == 1:
            return
        if self.size == 2 or tensor.numel() * size <= SMALL:
            for chunk in pieces(tensor, CHUNK_PAIR // size):
                areas = self._next(tensor.dtype)
                count = chunk.numel()
                parts = [area[:count] for area in areas]
                parts[self.rank].copy_(chunk)
                yield
                self._reduce(op, parts, chunk)
        else:
            yield from self._all_reduce_by_owner(tensor, op)

    def _all_reduce_by_owner(self, tensor: Tensor, op: ReduceOp) -> Rounds:
        """Each rank reduces one slice of every chunk for all.

        Round i carries both the contributions to chunk i and the reduced slices of chunk i - 1, so it costs
        one wait per chunk. A half holds one slice per owner, and after them the slice this rank has reduced.
        """
        n, me = self.size, self.rank
        slice_ = HALF // tensor.element_size() // (n + 1) // 64 * 64
        chunks = pieces(tensor, slice_ * n)
        slice_ = min(slice_, -(-chunks[0].numel() // n))
        before: Sequence[Tensor] = ()
        areas = self._next(tensor.dtype)
        for chunk in chunks:
            mine, lower, upper = _around(chunk, me * slice_, (me + 1) * slice_)
            areas[me][: lower.numel()].copy_(lower)
            areas[me][(me + 1) * slice_ : (me + 1) * slice_ + upper.numel()].copy_(upper)
            yield
            self._copy_reduced(before, areas, n * slice_)
            parts = [area[me * slice_ : me * slice_ + mine.numel()] for area in areas]
            parts[me] = mine
            areas = self._next(tensor.dtype)
            reduced = areas[me][n * slice_ : n * slice_ + mine.numel()]
            self._reduce(op, parts, reduced)
            mine.copy_(reduced)
            before = [chunk[owner * slice_ : (owner + 1) * slice_] for owner in range(n)]
        yield
        self._copy_reduced(before, areas, n * slice_)

    def _copy_reduced(self, slices: Sequence[Tensor], areas: list[Tensor], offset: int) -> None:
        for owner, slice_ in enumerate(slices):
            if owner != self.rank:
                slice_.copy_(areas[owner][offset : offset + slice_.numel()])

    def reduce_scatter(self, out: Tensor, inputs: Sequence[Tensor], op: ReduceOp) -> Rounds:
        """`out` becomes the reduction of everybody's `inputs[rank]`; all tensors have as many elements."""
        step = HALF // out.element_size() // self.size
        for start in range(0, out.numel(), step):
            areas = self._next(out.dtype)
            target = out[start : start + step]
            count = target.numel()
            for peer in self.peers:
                areas[self.rank][peer * step : peer * step + count].copy_(inputs[peer][start : start + step])
            yield
            parts = [area[self.rank * step : self.rank * step + count] for area in areas]
            parts[self.rank] = inputs[self.rank][start : start + step]
            self._reduce(op, parts, target)

    def reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Rounds:
        """`tensor` of `root` becomes the reduction of all; the others keep theirs."""
        for chunk in pieces(tensor, HALF // tensor.element_size()):
            areas = self._next(tensor.dtype)
            areas[self.rank][: chunk.numel()].copy_(chunk)
            yield
            if self.rank == root:
                self._reduce(op, [area[: chunk.numel()] for area in areas], chunk)

    def reduce_parts(self, parts: Sequence[Tensor], out: Tensor) -> Rounds:
        """`out` becomes the sum of `parts`, which all ranks can see, once all ranks have written theirs."""
        self._next(torch.uint8)
        yield
        self._reduce(_SUM, parts, out)

    # Movements: everything is bytes

    def broadcast(self, data: Tensor, root: int) -> Rounds:
        """Every rank's `data` becomes that of `root`."""
        for chunk in pieces(data, HALF):
            area = self._next(torch.uint8)[root][: chunk.numel()]
            if self.rank == root:
                area.copy_(chunk)
            yield
            if self.rank != root:
                chunk.copy_(area)

    def gather(self, outputs: Sequence[Tensor], data: Tensor, most: int) -> Rounds:
        """`outputs[i]` becomes `data` of rank i, on ranks that pass outputs. `most`: the longest data."""
        if outputs and outputs[self.rank].data_ptr() != data.data_ptr():
            outputs[self.rank].copy_(data)
        for start in range(0, most, HALF):
            areas = self._next(torch.uint8)
            piece = data[start : start + HALF]
            areas[self.rank][: piece.numel()].copy_(piece)
            yield
            if outputs:
                for peer in self.peers:
                    target = outputs[peer][start : start + HALF]
                    target.copy_(areas[peer][: target.numel()])

    def scatter(self, out: Tensor, inputs: Sequence[Tensor], root: int) -> Rounds:
        """`out` of rank i becomes `inputs[i]` of `root`; all have as many bytes."""
        step = HALF // self.size // 64 * 64
        for start in range(0, out.numel(), step):
            area = self._next(torch.uint8)[root]
            target = out[start : start + step]
            if self.rank == root:
                for peer in self.peers:
                    area[peer * step : peer * step + target.numel()].copy_(inputs[peer][start : start + step])
            yield
            if self.rank == root:
                target.copy_(inputs[root][start : start + step])
            else:
                target.copy_(area[self.rank * step : self.rank * step + target.numel()])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], uneven: bool) -> Rounds:
        """`outputs[i]` becomes `inputs[rank]` of rank i. `uneven`: a first round finds the longest of all."""
        most = max(piece.numel() for piece in inputs)
        if uneven:
            areas = self._next(torch.int64)
            areas[self.rank][0] = most
            yield
            most = max(int(area[0]) for area in areas)
        step = HALF // self.size // 64 * 64
        outputs[self.rank].copy_(inputs[self.rank])
        for start in range(0, most, step):
            areas = self._next(torch.uint8)
            for peer in self.peers:
                piece = inputs[peer][start : start + step]
                areas[self.rank][peer * step : peer * step + piece.numel()].copy_(piece)
            yield
            for peer in self.peers:
                target = outputs[peer][start : start + step]
                target.copy_(areas[peer][self.rank * step : self.rank * step + target.numel()])

    def barrier(self) -> Rounds:
        """Nobody goes on before all have come."""
        self._next(torch.uint8)
        yield

    # The halves

    def _next(self, dtype: torch.dtype) -> list[Tensor]:
        """Everybody's half for the next round, by rank."""
        areas = self._areas.get(dtype)
        if areas is None:
            areas = self._areas[dtype] = (self._map(dtype, 0), self._map(dtype, 1))
        self._half ^= 1
        return areas[self._half]

    def _map(self, dtype: torch.dtype, half: int) -> list[Tensor]:
        start = control_bytes(self.size) + half * HALF
        count = HALF // dtype.itemsize
        return [self._region.tensor(dtype, start + rank * 2 * HALF, count) for rank in range(self.size)]

    def _reduce(self, op: ReduceOp, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduce in order, in steps whose running result stays in the cache.

        A scratch tensor holds it where writing `out` early would spoil a later part.
        """
        aliased = any(_overlap(out, part) for part in parts[2:])
        if not aliased and (len(parts) == 2 or out.nbytes <= CHUNK_SUM):
            reduce_in_order(op, parts, out)
            return
        step = CHUNK_SUM // out.element_size()
        scratch = self._scratch.view(out.dtype)
        for start in range(0, out.numel(), step):
            target = out[start : start + step]
            total = scratch[: target.numel()] if aliased else target
            reduce_in_order(op, [part[start : start + step] for part in parts], total)
            if aliased:
                target.copy_(total)


def reduce_in_order(op: ReduceOp, parts: Sequence[Tensor], out: Tensor) -> None:
    """out = ((p0 ∘ p1) ∘ p2) ∘ …; `out` may be p0 or p1, but no later part."""
    kind = _kind(op)
    combine = _COMBINE[kind]
    if len(parts) == 1:
        out.copy_(parts[0])
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)
    if kind == ReduceOp.AVG:
        whole = not (out.is_floating_point() or out.is_complex())  # whole numbers are cut off, as NCCL does
        out.div_(len(parts), rounding_mode="trunc" if whole else None)


def check_op(op: ReduceOp) -> None:
    """Refuse a reduction that shared memory does not offer, before anything is sent."""
    if _kind(op) not in _COMBINE:
        raise NotImplementedError(
            f"the shoal backend cannot reduce with {_kind(op)}; use SUM and scale yourself."
        )


def pieces(tensor: Tensor, step: int) -> Sequence[Tensor]:
    """`tensor` cut into pieces of `step` elements, the last one shorter."""
    count = tensor.numel()
    if 0 < count <= step:
        return (tensor,)
    return [tensor[start : start + step] for start in range(0, count, step)]


def _kind(op: ReduceOp) -> ReduceOp.RedOpType:
    kind: ReduceOp.RedOpType = op.op  # type: ignore[attr-defined]  # missing in torch's declarations
    return kind


def _around(chunk: Tensor, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """The slice from `start` to `end`, what comes before it and what comes after."""
    return chunk[start:end], chunk[:start], chunk[end:]


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors share bytes."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes
