"""What else may differ between a batch and its parts, though the loss is a sum over samples: for `shoal verify`.

Dropout draws one mask for each micro-batch, batch normalisation measures each, power iterations and running means take
one step for each, a data set may draw as it prepares one. In evaluation mode layers do none of this.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from shoal.data.feed import Feed
from shoal.data.source import fetch, is_plain, is_stream
from shoal.seeds import generators_kept
from shoal.torch_private import BatchNormBase


class Restless:
    """A program before its first step.

    >>> layers = nn.Sequential(nn.BatchNorm1d(2))
    >>> feed = Feed(data=[torch.zeros(2)], global_batch=1, rank=0, size=1)
    >>> Restless(layers, feed).facts(draws=False)
    {'draws': False, 'data_draws': False, 'batchnorm': ['0'], 'moves': []}
    """

    def __init__(self, model: nn.Module, feed: Feed) -> None:
        self._model = model
        layers = {name: m for name, m in model.named_modules() if isinstance(m, BatchNormBase)}
        self._batchnorm = list(layers)
        own = tuple(f"{name}." if name else "" for name in layers)
        self._before: Mapping[str, torch.Tensor] = {
            name: b.clone() for name, b in model.named_buffers() if not (own and name.startswith(own))
        }
        self._data_draws = data_draws(feed)

    def facts(self, draws: bool) -> dict[str, object]:
        """What has been seen by now; `draws`: whether a forward pass or the loss has drawn random numbers."""
        now = dict(self._model.named_buffers())
        moved = [name for name, b in self._before.items() if name in now and not torch.equal(b, now[name])]
        return {
            "draws": draws,
            "data_draws": self._data_draws,
            "batchnorm": self._batchnorm,
            "moves": moved,
        }


def data_draws(feed: Feed) -> bool:
    """Whether a data set takes from torch's generator as it prepares a sample; of a stream nobody knows."""
    if is_stream(feed.data) or is_plain(feed.data, feed.collate):
        return False
    with generators_kept():
        before = torch.get_rng_state()
        fetch(feed.data, np.zeros(1, dtype=np.int64), feed.collate)
        return not torch.equal(before, torch.get_rng_state())
