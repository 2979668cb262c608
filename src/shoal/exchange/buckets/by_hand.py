"""Parameters that were changed by hand between two steps, where the change would be lost, or made once more by every
worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from shoal.errors import ConfigError
from shoal.torch_private import version_of


class ByHand:
    """Notices it by torch's count of changes in place, which a change through `.data` does not move.

    >>> import torch
    >>> weight = nn.Parameter(torch.ones(2))
    >>> by_hand = ByHand({"weight": weight}, "there is one copy; use ddp")
    >>> by_hand.note()
    >>> by_hand.check()
    >>> with torch.no_grad():
    ...     _ = weight.mul_(2)
    >>> by_hand.check()
    Traceback (most recent call last):
    shoal.errors.ConfigError: parameter 'weight' was changed by hand between two steps: there is one copy; use ddp.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], why: str, own: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        """`own`: how many of a parameter's changes in place, by its name, are the exchange's."""
        self._parameters = parameters
        self._why = why
        self._own = own
        self._versions: list[int] = []

    def note(self) -> None:
        """They are as they should be."""
        self._versions = self._now()

    def check(self) -> None:
        """Raise if one has changed since."""
        if not self._versions:
            return
        for name, now, noted in zip(self._parameters, self._now(), self._versions, strict=True):
            if now != noted:
                raise changed_by_hand(name, self._why)

    def _now(self) -> list[int]:
        own = self._own()
        return [version_of(p) - own.get(name, 0) for name, p in self._parameters.items()]


def changed_by_hand(name: str, why: str) -> ConfigError:
    """The sentence for it."""
    return ConfigError(f"parameter '{name}' was changed by hand between two steps: {why}.")
