"""Slot: how samples are varied from epoch to epoch. One file a choice; this table is the list of them."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.config import fill_options, parse_choice
from shoal.data.augment.affine import Affine
from shoal.data.augment.base import Augmentation, Mixture
from shoal.data.augment.chain import Augment, Chain, SampleFunction
from shoal.data.augment.crop import Crop
from shoal.data.augment.cutmix import Cutmix
from shoal.data.augment.delete import Delete
from shoal.data.augment.erase import Erase
from shoal.data.augment.flip import Flip
from shoal.data.augment.gain import Gain
from shoal.data.augment.mask import Mask
from shoal.data.augment.mixup import Mixup
from shoal.data.augment.noise import Noise
from shoal.data.augment.shift import Shift
from shoal.data.augment.swap import Swap
from shoal.errors import ConfigError
from shoal.table import Table

TABLE: Table[type[Augmentation] | type[Mixture]] = Table(
    "augmentation",
    {
        "affine": Affine,
        "flip": Flip,
        "crop": Crop,
        "erase": Erase,
        "noise": Noise,
        "gain": Gain,
        "shift": Shift,
        "mask": Mask,
        "swap": Swap,
        "delete": Delete,
        "mixup": Mixup,
        "cutmix": Cutmix,
    },
)


def make_chain(asked: Augment) -> Chain | None:
    """What a user asks for: a text, a function of samples, or a list of both, functions first.

    >>> [link.made for link in make_chain("flip & noise(0.1)").links]
    [Flip(field='', p=0.5, axis='width'), Noise(field='', std=0.1)]
    """
    parts = [asked] if isinstance(asked, str) or callable(asked) else _listed(asked)
    functions: list[SampleFunction] = []
    made: list[tuple[str, Augmentation | Mixture]] = []
    for one in parts:
        if callable(one):
            if made:
                raise ConfigError(
                    f"augment: {getattr(one, '__name__', 'a function')} stands behind {made[-1][0]}; functions see "
                    "single samples, before they are a batch: put them first."
                )
            functions.append(one)
        elif isinstance(one, str):
            made += [_made(text) for text in one.split("&")] if one.strip() else []
        else:
            raise ConfigError(
                f"augment: a {type(one).__name__} is no augmentation; give a text such as 'flip & noise(0.1)', or a "
                "function (sample, rng) -> sample."
            )
    return Chain.of(functions, made) if functions or made else None


def _made(text: str) -> tuple[str, Augmentation | Mixture]:
    choice = parse_choice(text, "augmentation")
    return choice.name, fill_options(choice, TABLE.look_up(choice.name))


def _listed(asked: object) -> Sequence[object]:
    if isinstance(asked, list | tuple):
        return asked
    raise ConfigError(
        f"augment= is a {type(asked).__name__}; give a text such as 'flip & noise(0.1)', a function "
        "(sample, rng) -> sample, or a list of both."
    )
