"""What else may differ between a batch and its parts, though the loss is a sum over samples: for `shoal verify`.

Dropout draws one mask for each micro-batch, batch normalisation measures each, power iterations and running means take
one step for each, a collate function may draw as it makes one. In evaluation mode layers do none of this. What a data
set draws is keyed by sample, whatever the micro-batch, and so no reason for a difference.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shoal.data.draws import Generator, NumpyGenerator, PythonGenerator, TorchGenerator
from shoal.data.feed import Feed
from shoal.data.source import fetch_samples, is_stream
from shoal.torch_private import BatchNormBase


class Restless:
    """A program before its first step.

    >>> layers = nn.Sequential(nn.BatchNorm1d(2))
    >>> feed = Feed(data=[torch.zeros(2)], global_batch=1, rank=0, size=1)
    >>> Restless(layers, feed).facts(draws=False)
    {'draws': False, 'collate_draws': False, 'batchnorm': ['0'], 'moves': []}
    """

    def __init__(self, model: nn.Module, feed: Feed) -> None:
        self._model = model
        layers = {name: m for name, m in model.named_modules() if isinstance(m, BatchNormBase)}
        self._batchnorm = list(layers)
        own = tuple(f"{name}." if name else "" for name in layers)
        self._before: Mapping[str, torch.Tensor] = {
            name: b.clone() for name, b in model.named_buffers() if not (own and name.startswith(own))
        }
        self._collate_draws = collate_draws(feed)

    def facts(self, draws: bool) -> dict[str, object]:
        """What has been seen by now; `draws`: whether a forward pass or the loss has drawn random numbers."""
        now = dict(self._model.named_buffers())
        moved = [name for name, b in self._before.items() if name in now and not torch.equal(b, now[name])]
        return {
            "draws": draws,
            "collate_draws": self._collate_draws,
            "batchnorm": self._batchnorm,
            "moves": moved,
        }


def collate_draws(feed: Feed) -> bool:
    """Whether a collate function of the user's draws from a global generator; of a stream nobody knows."""
    if is_stream(feed.data) or feed.collate is None:
        return False
    watched: list[Generator] = [TorchGenerator(), NumpyGenerator(), PythonGenerator()]
    first = [generator.state() for generator in watched]
    try:
        samples = fetch_samples(feed.data, [0])
        before = [generator.state() for generator in watched]
        feed.collate(samples)
        return before != [generator.state() for generator in watched]
    finally:
        for generator, state in zip(watched, first, strict=True):
            generator.restore(state)
