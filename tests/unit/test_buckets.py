"""Flat buckets: every element of every parameter lies in exactly one place and one piece."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.world.buckets import ALIGN, gaps_of, lay_out, pieces_of, slice_of

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
PARAMETERS = st.lists(st.tuples(st.integers(1, 700), DTYPES), min_size=1, max_size=12).map(
    lambda sizes: [(f"p{i}", numel, dtype) for i, (numel, dtype) in enumerate(sizes)]
)


@settings(deadline=None)
@given(PARAMETERS, st.integers(1, 5), st.integers(0, 8192))
def test_every_element_is_in_one_place_and_one_piece(
    parameters: list[tuple[str, int, torch.dtype]], slices: int, capacity: int
) -> None:
    buckets = lay_out(parameters, slices, capacity)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    assert sorted(p.name for b in buckets for p in b.places) == sorted(name for name, _, _ in parameters)
    wanted = {name: (numel, dtype) for name, numel, dtype in parameters}
    elements: dict[str, list[int]] = {name: [] for name in wanted}
    for bucket in buckets:
        assert bucket.size % (ALIGN * slices) == 0
        owner = torch.full((bucket.size,), -1)
        for number, place in enumerate(bucket.places):
            assert (place.numel, bucket.dtype) == wanted[place.name]
            assert place.start % ALIGN == 0
            assert bool((owner[place.start : place.start + place.numel] == -1).all()), "places overlap"
            owner[place.start : place.start + place.numel] = number
        if len(bucket.places) > 1:
            last = bucket.places[-1]
            assert (last.start + last.numel) * bucket.dtype.itemsize <= capacity
        for start, stop in gaps_of([(p.start, p.numel) for p in bucket.places], bucket.size):
            assert bool((owner[start:stop] == -1).all())
            owner[start:stop] = -2
        assert not bool((owner == -1).any()), "every element is a parameter's or a gap's"
        end = 0
        for index in range(slices):
            start, stop = slice_of(bucket, slices, index)
            assert (start, start % ALIGN) == (end, 0), "slices follow one another"
            end = stop
            for piece in pieces_of(bucket, start, stop):
                place = next(p for p in bucket.places if p.name == piece.name)
                assert (piece.bucket, piece.start) == (bucket.index, place.start + piece.offset)
                assert start <= piece.start
                assert piece.start + piece.numel <= stop
                elements[piece.name] += range(piece.offset, piece.offset + piece.numel)
        assert end == bucket.size
    for name, found in elements.items():
        assert sorted(found) == list(range(wanted[name][0])), f"pieces of {name}"


def test_a_parameter_above_the_capacity_is_alone() -> None:
    f32 = torch.float32
    buckets = lay_out([("a", 10, f32), ("big", 1000, f32), ("b", 10, f32)], slices=2, capacity=1024)
    assert [[p.name for p in b.places] for b in buckets] == [["a"], ["big"], ["b"]]


def test_the_order_given_is_kept() -> None:
    names = ["z", "a", "m"]
    (bucket,) = lay_out([(n, 5, torch.float32) for n in names], slices=3, capacity=1 << 20)
    assert [p.name for p in bucket.places] == names
