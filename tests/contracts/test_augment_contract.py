"""What every augmentation must keep, whoever adds one: tested over the table, on the choices as a user writes them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.augment import TABLE, make_chain
from shoal.data.augment.base import Mixture
from shoal.data.augment.sample_draws import Words, keys_of
from shoal.types import Promise

N = 23
IMAGES = torch.rand(N, 3, 9, 7, generator=torch.Generator().manual_seed(0))
SIGNALS = torch.randn(N, 2, 41, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(3, 90, (N, 19), generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(N) % 5
KEYS = keys_of(np.arange(40, 40 + N), samples=1000, seed=3, epoch=2)
PARTNERS = np.roll(np.arange(N), -1)

WRITTEN: list[tuple[str, torch.Tensor]] = [
    ("affine(20, scale=0.2, shift=0.1, shear=5)", IMAGES),
    ("affine(20, fill=reflection)", IMAGES.double()),
    ("affine(20, fill=border)", (IMAGES * 255).to(torch.uint8)),
    ("affine(20)", IMAGES[:, 0]),
    ("flip", IMAGES),
    ("flip(axis=height)", (IMAGES * 255).to(torch.uint8)),
    ("crop(2)", IMAGES),
    ("crop(2)", IMAGES[:, 0]),
    ("erase(0.3, p=0.9)", IMAGES),
    ("noise(0.1)", SIGNALS),
    ("noise(0.1)", IMAGES.double()),
    ("gain(6)", SIGNALS),
    ("shift(0.3)", SIGNALS),
    ("shift(0.3, wrap=true)", SIGNALS),
    ("mask(0.5)", SIGNALS),
    ("mask(0.3, token=1, keep=5/6)", TOKENS),
    ("swap(0.3, keep=7/8)", TOKENS),
    ("delete(0.2, pad=0, keep=9)", TOKENS),
    ("mixup(0.4, classes=5)", IMAGES),
    ("mixup(3.0, classes=5)", SIGNALS),
    ("cutmix(1.0, classes=5)", IMAGES),
    ("affine(10) & flip & noise(0.1) & cutmix(1.0, classes=5) & erase(0.2)", IMAGES),
]


def applied(
    text: str, rows: torch.Tensor, keys: Words, partners: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and labels after a chain; `partners` are rows, all of them by default."""
    chain = make_chain(text)
    assert chain is not None
    labels = LABELS[: len(rows)]
    given = PARTNERS if partners is None and chain.mixes else partners
    changed: tuple[torch.Tensor, torch.Tensor] = chain.batch((rows, labels), keys, given)
    return changed


def test_every_choice_is_tried() -> None:
    assert {text.split("(")[0] for text, _ in WRITTEN if "&" not in text} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_facts(name: str) -> None:
    chosen = TABLE[name]
    assert chosen.promise is Promise.EXACT
    assert chosen.summary
    assert chosen.__module__ == f"shoal.data.augment.{name}"
    assert "When to use" in (importlib.import_module(chosen.__module__).__doc__ or "")


@pytest.mark.parametrize(("text", "rows"), WRITTEN)
def test_a_sample_becomes_the_same_in_any_batch(text: str, rows: torch.Tensor) -> None:
    before = rows.clone()
    changed, labels = applied(text, rows, KEYS)
    assert torch.equal(rows, before), "what was given stays"
    assert changed.shape == rows.shape
    assert changed.dtype == rows.dtype
    assert not torch.equal(changed, rows)
    assert torch.equal(changed, applied(text, rows, KEYS)[0]), "a pure function"
    other = applied(text, rows, keys_of(np.arange(40, 40 + N), samples=1000, seed=3, epoch=3))[0]
    assert not torch.equal(changed, other), "another epoch draws something else"
    chain = make_chain(text)
    assert chain is not None
    for some in (np.array([4]), np.array([9, 2, 17]), np.random.default_rng(0).permutation(N)):
        if chain.mixes:  # with their partners behind them, as a worker fetches them
            every = np.concatenate([some, PARTNERS[some]])
            mine: Any = chain.batch(
                (rows[every], LABELS[every]), KEYS[every], np.arange(len(some), len(every))
            )
        else:
            mine = chain.batch((rows[some], LABELS[some]), KEYS[some])
        assert torch.equal(mine[0], changed[some])
        assert torch.equal(mine[1], labels[some])


@pytest.mark.parametrize("name", [name for name, made in TABLE.items() if issubclass(made, Mixture)])
def test_labels_follow_what_is_mixed(name: str) -> None:
    """Images that are their class everywhere: the mean of one is what its label must say."""
    images = LABELS[:, None, None].float().expand(N, 8, 8).contiguous()
    mixed, shares = applied(f"{name}(1.0, classes=5)", images, KEYS)
    assert torch.allclose(shares.sum(1), torch.ones(N))
    assert torch.allclose(mixed.mean((1, 2)), shares @ torch.arange(5.0), atol=1e-6)
    assert (shares > 0).sum(1).max() == 2


def test_draws_are_uniform_and_independent() -> None:
    from shoal.data.augment.sample_draws import SampleDraws

    keys = keys_of(np.arange(20_000), samples=10**6, seed=0, epoch=0)
    drawn = SampleDraws(keys, "flip", 0).uniform(6)
    assert abs(float(drawn.mean()) - 0.5) < 0.005
    assert abs(float(drawn.std()) - 12**-0.5) < 0.005
    pairs = torch.corrcoef(torch.cat([drawn, SampleDraws(keys, "flip", 1).uniform(6)], dim=1).T)
    assert float((pairs - torch.eye(12)).abs().max()) < 0.03
    neighbours = torch.corrcoef(torch.stack([drawn[:-1, 0], drawn[1:, 0]]))[0, 1]
    assert abs(float(neighbours)) < 0.03


def test_what_tokens_become() -> None:
    rows = torch.arange(10, 22)[None].repeat(N, 1)
    rows[:, -3:] = 0
    masked = applied("mask(0.5, token=1, keep=11/0)", rows, KEYS)[0]
    assert set(masked.flatten().tolist()) <= {1, *range(10, 22), 0}
    assert (masked[:, 1] == 11).all()
    assert (masked[:, -3:] == 0).all()
    swapped = applied("swap(0.8, keep=10/0)", rows, KEYS)[0]
    assert torch.equal(swapped.sort(1).values, rows.sort(1).values)
    assert (swapped[:, 0] == 10).all()
    assert (swapped - rows)[:, :-3].abs().max() == 1
    left = applied("delete(0.5, pad=0, keep=10)", rows, KEYS)[0]
    assert (left[:, 0] == 10).all()
    for row in left:
        kept = row[row != 0]
        assert torch.equal(kept, kept.sort().values), "in their order, and padding behind"
        assert (row[len(kept) :] == 0).all()


def test_affine_moves_what_it_says() -> None:
    """Without randomness to speak of: degrees of 0 leave an image, and a shift moves the centre of mass by as much."""
    image = torch.zeros(N, 1, 21, 21, dtype=torch.float64)
    image[:, :, 9:12, 9:12] = 1.0
    assert torch.allclose(applied("affine(0)", image, KEYS)[0], image, atol=1e-12)
    chain = make_chain("affine(0, shift=0.2)")
    assert chain is not None
    moved = chain.batch(image, KEYS)
    where = torch.arange(21, dtype=torch.float64)
    right = (moved.sum((1, 2)) * where).sum(1) / moved.sum((1, 2, 3)) - 10
    drawn = chain.links[0].draws(KEYS).symmetric(5, 1.0)[:, 2] * 0.2 * 21
    assert torch.allclose(right, drawn, atol=1e-9)
    turned = applied("affine(90)", image, KEYS)[0]
    assert torch.allclose(turned.sum((1, 2, 3)), image.sum((1, 2, 3)), rtol=0.05), "turned about its middle"
