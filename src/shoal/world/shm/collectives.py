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

What goes into a staging area is written by torch's `copy_`, with plain stores, because the peers should find it
in the cache. What comes out goes through `memory.copy`, libc's memcpy, which may stream past the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.world.shm.calls import CollectiveMismatch
from shoal.world.shm.flags import Needs, control_bytes
from shoal.world.shm.memory import SharedRegion, copy
from shoal.world.shm.reductions import SUM, Reduction, combiner, overlap, reduce_in_order

Rounds = Iterator[Needs | None]
"""A collective under way: each item says "my part of this round is written", and whom to wait for."""

HALF = 2 << 20
"""Bytes of one half of one rank's staging area."""
SMALL = 64 << 10
"""Up to so many bytes per pair of ranks a collective is over after one round."""
ALL_READ_ALL = 4 << 20
"""Up to so many bytes times ranks, everybody reads everything in an all-reduce; beyond, ranks line up."""
CHUNK_PAIR = 1 << 20
"""Bytes per round where everybody reads everything: less would wait more often, more leave the L2 cache."""
MOST_VIEWS = 64
"""Sizes of small tensors, in each half, whose views are kept: making them costs as much as adding the numbers."""
LINE = 768 << 10
"""Bytes of the largest chunk of a large all-reduce: what its ranks have under way at once must stay in the L3
cache, or every chunk is fetched a second time when its result is copied over it."""
LINE_STEPS = 16
"""Chunks it is cut into, if not too large: more would wait more often, fewer leave ends of the line idle."""
CHUNK_SUM = 256 << 10
"""Bytes reduced per step, so that the running result of more than two parts stays in the L2 cache."""


def region_bytes(size: int) -> int:
    """Bytes a group of `size` ranks shares: control page, staging areas, and at the end the slots of the line."""
    return control_bytes(size) + size * 2 * HALF + line_bytes(size)


def line_bytes(size: int) -> int:
    """Bytes of the slots through which the chunks of large all-reduces go: two per rank."""
    return 2 * size * LINE


class Staging:
    """The staging areas of a group, and every collective as a generator over them. All tensors are flat."""

    def __init__(self, region: SharedRegion, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.peers = [(rank + step) % size for step in range(1, size)]
        self._region = region
        self._half = 0
        self._areas: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self._views: dict[tuple[torch.dtype, int, int], list[Tensor]] = {}
        self._scratch = torch.empty(CHUNK_SUM, dtype=torch.uint8, device="cpu")

    def is_one_round(self, nbytes: int) -> bool:
        """Whether a collective that stages `nbytes` per pair of ranks is over after one round."""
        return nbytes <= min(SMALL, HALF // self.size)

    # Reductions

    def all_reduce(self, tensor: Tensor, op: Reduction) -> Rounds:
        """Every rank's `tensor` becomes the reduction of all."""
        if self.size == 1:
            return
        if tensor.nbytes * self.size > ALL_READ_ALL:
            yield from (self._all_reduce_in_turns if self.size == 2 else self._all_reduce_in_line)(tensor, op)
            return
        if tensor.nbytes <= SMALL:
            parts = self._same_parts(tensor.dtype, tensor.numel())
            parts[self.rank].copy_(tensor)
            yield None
            reduce_in_order(op, parts, tensor, self.size)
            return
        each = max(CHUNK_PAIR // 4, min(CHUNK_PAIR, tensor.nbytes // 4))
        for chunk in pieces(tensor, each // tensor.element_size()):
            count = chunk.numel()
            parts = [area[:count] for area in self._next(tensor.dtype)]
            parts[self.rank].copy_(chunk)
            yield None
            self._reduce(op, parts, chunk)

    def _all_reduce_in_turns(self, tensor: Tensor, op: Reduction) -> Rounds:
        """Two ranks: of each pair of chunks one is led by each; its leader lays it out, the other adds its own.

        Both then copy the result out of the slot. Every element is copied in once, added once and copied out
        twice, half of that by each rank; if both laid out everything, it would be added twice as well.
        """
        chunks, slots = self._chunks(tensor)
        combine = combiner(op, 2)  # two terms have no order to keep
        self._next(tensor.dtype)
        pairs = (len(chunks) + 1) // 2
        for turn in range(pairs + 1):
            # Rank 0 leads even chunks and rank 1 odd ones; in a turn a rank lays out one, finishes the one it led a
            # turn ago, and adds to the one that the other has just laid out.
            led, theirs, done = 2 * turn + self.rank, 2 * turn + 1 - self.rank, 2 * turn - 2 + self.rank
            if led < len(chunks):
                slots[led].copy_(chunks[led])
            yield None  # the other has laid out its chunk, and added to mine of the turn before
            if 0 <= done < len(chunks):
                copy(chunks[done], slots[done])
            if theirs < len(chunks):
                combine(slots[theirs], chunks[theirs], out=slots[theirs])
                copy(chunks[theirs], slots[theirs])

    def _all_reduce_in_line(self, tensor: Tensor, op: Reduction) -> Rounds:
        """One running result per chunk goes down the line of ranks; each adds its own, later all copy it.

        In step s a rank adds to chunk s and copies out chunk s - size, which the last rank has reached if all
        go at one pace. That is two passes over the data, where slices with owners would take three. Ranks are
        not in step: each waits only for the rank before it and, `size` steps ago, for the last one; the first
        rank, which is about to write over the slot of chunk s - 2 * size, for all that copy it. All have left the
        collective before this one when the first begins: its call is compared with theirs.
        """
        size = self.size
        me = self.rank
        last = self.size - 1
        chunks, slots = self._chunks(tensor)
        combine = combiner(op, size if me == last else 1)
        # Needs are relative to this rank's own counter: the rank before must be one round ahead, and the last may be up
        # to size - 1 rounds behind.
        adds = [(me - 1, 1)] if me > 0 else []
        copies = [(peer, 1 - size) for peer in (self.peers if me == 0 else [last] if me < last else [])]
        steps = range(len(chunks) + size)
        needs = [(adds if s < len(chunks) else []) + (copies if s >= size else []) for s in steps]
        brief = chunks[0].nbytes < LINE
        self._next(tensor.dtype)
        for step in steps:
            yield Needs(needs[step], len(steps) - step, brief)
            if step < len(chunks):
                chunk = chunks[step]
                slot = slots[step]
                if me == 0:
                    slot.copy_(chunk)
                elif me < last:
                    combine(slot, chunk, out=slot)
                else:  # the last rank has the result at once
                    combine(slot, chunk, out=chunk)
                    slot.copy_(chunk)
            if step >= size and me < last:
                copy(chunks[step - size], slots[step - size])

    def reduce_scatter(self, out: Tensor, inputs: Sequence[Tensor], op: Reduction) -> Rounds:
        """`out` becomes the reduction of everybody's `inputs[rank]`; all tensors have as many elements."""
        step = HALF // out.element_size() // self.size
        for start in range(0, out.numel(), step):
            areas = self._next(out.dtype)
            target = out[start : start + step]
            count = target.numel()
            for peer in self.peers:
                areas[self.rank][peer * step : peer * step + count].copy_(inputs[peer][start : start + step])
            yield None
            parts = [area[self.rank * step : self.rank * step + count] for area in areas]
            # One's own part need not go through shared memory.
            parts[self.rank] = inputs[self.rank][start : start + step]
            self._reduce(op, parts, target)

    def reduce(self, tensor: Tensor, root: int, op: Reduction) -> Rounds:
        """`tensor` of `root` becomes the reduction of all; the others keep theirs."""
        for chunk in pieces(tensor, HALF // tensor.element_size()):
            areas = self._next(tensor.dtype)
            areas[self.rank][: chunk.numel()].copy_(chunk)
            yield None
            if self.rank == root:
                self._reduce(op, [area[: chunk.numel()] for area in areas], chunk)

    def reduce_parts(self, parts: Sequence[Tensor], out: Tensor) -> Rounds:
        """`out` becomes the sum of `parts`, which all ranks can see, once all ranks have written theirs."""
        self._next(torch.uint8)
        yield None
        self._reduce(SUM, parts, out)

    # Movements: everything is bytes

    def broadcast(self, data: Tensor, root: int) -> Rounds:
        """Every rank's `data` becomes that of `root`."""
        for chunk in pieces(data, HALF):
            if chunk.numel() <= SMALL:
                area = self._same_parts(torch.uint8, chunk.numel())[root]
            else:
                area = self._next(torch.uint8)[root][: chunk.numel()]
            if self.rank == root:
                area.copy_(chunk)
            yield None
            if self.rank != root:
                copy(chunk, area)

    def gather(self, outputs: Sequence[Tensor], data: Tensor, most: int) -> Rounds:
        """`outputs[i]` becomes `data` of rank i, on ranks that pass outputs. `most`: the longest data."""
        if data.numel() == most <= SMALL:
            parts = self._same_parts(torch.uint8, most)
            parts[self.rank].copy_(data)
            yield None
            for peer in range(self.size) if outputs else ():
                copy(outputs[peer], parts[peer])
            return
        for start in range(0, most, HALF):
            areas = self._next(torch.uint8)
            piece = data[start : start + HALF]
            areas[self.rank][: piece.numel()].copy_(piece)
            yield None
            if outputs:
                # Only once: the rank's own output is whole after the first round. An in-place all-gather has it there
                # already.
                if start == 0 and outputs[self.rank].data_ptr() != data.data_ptr():
                    copy(outputs[self.rank], data)
                for peer in self.peers:
                    target = outputs[peer][start : start + HALF]
                    copy(target, areas[peer][: target.numel()])

    def scatter(self, out: Tensor, inputs: Sequence[Tensor], root: int) -> Rounds:
        """`out` of rank i becomes `inputs[i]` of `root`; all have as many bytes."""
        step = HALF // self.size // 64 * 64
        for start in range(0, out.numel(), step):
            area = self._next(torch.uint8)[root]
            target = out[start : start + step]
            if self.rank == root:
                for peer in self.peers:
                    area[peer * step : peer * step + target.numel()].copy_(inputs[peer][start : start + step])
            yield None
            if self.rank == root:
                copy(target, inputs[root][start : start + step])
            else:
                copy(target, area[self.rank * step : self.rank * step + target.numel()])

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], uneven: bool) -> Rounds:
        """`outputs[i]` becomes `inputs[rank]` of rank i. `uneven`: a first round tells all how long each is."""
        most = max(piece.numel() for piece in inputs)
        if uneven:
            areas = self._next(torch.int64)
            areas[self.rank][: 2 * self.size] = torch.tensor(
                [piece.numel() for piece in (*inputs, *outputs)], device="cpu"
            )
            yield None
            table = torch.stack([area[: 2 * self.size] for area in areas])
            sent, expected = table[:, : self.size], table[:, self.size :].t()
            if not torch.equal(sent, expected):
                source, target = (sent != expected).nonzero()[0].tolist()
                raise CollectiveMismatch(
                    f"in an all_to_all, rank {source} sends {int(sent[source, target])} bytes to rank {target}, which "
                    f"expects {int(expected[source, target])}. No tensor was changed. Make both the same."
                )
            most = int(sent.max())
        step = HALF // self.size // 64 * 64
        for start in range(0, most, step):
            areas = self._next(torch.uint8)
            for peer in self.peers:
                piece = inputs[peer][start : start + step]
                areas[self.rank][peer * step : peer * step + piece.numel()].copy_(piece)
            yield None
            if start == 0:
                copy(outputs[self.rank], inputs[self.rank])
            for peer in self.peers:
                target = outputs[peer][start : start + step]
                copy(target, areas[peer][self.rank * step : self.rank * step + target.numel()])

    def barrier(self) -> Rounds:
        """Wait until all ranks have called it."""
        self._next(torch.uint8)
        yield None

    # The halves

    def _next(self, dtype: torch.dtype) -> list[Tensor]:
        """Everybody's half for the next round, by rank."""
        areas = self._areas.get(dtype)
        if areas is None:
            areas = self._areas[dtype] = (self._map(dtype, 0), self._map(dtype, 1))
        self._half ^= 1
        return areas[self._half]

    def _same_parts(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """The beginning of everybody's half for the next round: the same views for each small tensor of a kind."""
        areas = self._next(dtype)
        key = (dtype, count, self._half)
        parts = self._views.get(key)
        if parts is None:
            if len(self._views) >= MOST_VIEWS:
                self._views.clear()
            parts = self._views[key] = [area[:count] for area in areas]
        return parts

    def _chunks(self, tensor: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """`tensor` cut into chunks, and the slot of each, which chunks further on use again.

        All views are made here: between passes over memory Python's own data is out of the cache, and each
        line of it costs a multiple. Slots start at the same places whatever the size of chunks: a rank may begin
        with its own while the other still reads another slot of the collective before.
        """
        each = max(SMALL, min(LINE, tensor.nbytes // LINE_STEPS // 64 * 64)) // tensor.element_size()
        chunks = pieces(tensor, each)
        start = control_bytes(self.size) + self.size * 2 * HALF
        room = self._region.tensor(tensor.dtype, start, line_bytes(self.size) // tensor.element_size())
        slots = pieces(room, LINE // tensor.element_size())
        return chunks, [slots[i % len(slots)][: chunk.numel()] for i, chunk in enumerate(chunks)]

    def _map(self, dtype: torch.dtype, half: int) -> list[Tensor]:
        start = control_bytes(self.size) + half * HALF
        count = HALF // dtype.itemsize
        return [self._region.tensor(dtype, start + rank * 2 * HALF, count) for rank in range(self.size)]

    def _reduce(self, op: Reduction, parts: Sequence[Tensor], out: Tensor) -> None:
        """Reduce in order, in steps whose running result stays in the cache.

        A scratch tensor holds it where writing `out` early would spoil a later part.
        """
        aliased = any(overlap(out, part) for part in parts[2:])
        if not aliased and (len(parts) == 2 or out.nbytes <= CHUNK_SUM):
            reduce_in_order(op, parts, out, self.size)
            return
        step = CHUNK_SUM // out.element_size()
        scratch = self._scratch.view(out.dtype)
        for start in range(0, out.numel(), step):
            target = out[start : start + step]
            total = scratch[: target.numel()] if aliased else target
            reduce_in_order(op, [part[start : start + step] for part in parts], total, self.size)
            if aliased:
                copy(target, total)


def pieces(tensor: Tensor, step: int) -> Sequence[Tensor]:
    """`tensor` cut into pieces of `step` elements, the last one shorter."""
    count = tensor.numel()
    if 0 < count <= step:
        return (tensor,)
    return [tensor[start : start + step] for start in range(0, count, step)]
