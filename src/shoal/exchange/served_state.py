"""What a worker can give of a state that lies on servers: parameters, gradients, optimizer state, rows, reports."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shoal.exchange.base import State, detached
from shoal.exchange.flat import FlatExchange
from shoal.exchange.served import Served
from shoal.exchange.tier import Tier
from shoal.exchange.turn import Turn
from shoal.server.found import Found
from shoal.server.link import Link
from shoal.server.view import LEDGER


class ServedState(FlatExchange):
    """Shared by exchanges with servers; abstract. Only the leader of a unit has a link to them."""

    link: Link
    _tier: Tier
    _turn: Turn
    _served: Served
    _servers: Found
    _started: bool
    _fresh: int
    """The step for which the parameters here are fresh; -1: none."""
    _gradients: list[torch.Tensor]

    def first_values(self, oldest: int) -> None:
        """The values to begin with: from another worker that has them, or from the servers.

        `oldest`: the step that was not over a moment ago. Who can still claim it can use what was fetched for it.
        """
        self._fresh = self._served.borrow()
        if self._fresh < 0:
            self._served.fetch(oldest)
            self._fresh = oldest

    def refresh(self) -> None:
        if self._started and self._tier.leads and not self._served.incoming.complete():
            self._served.fetch(0)

    def complete(self) -> None:
        turn = self._turn
        if not self._started or not self._tier.leads:
            return
        if not self._served.incoming.complete() and self._fresh < 0 <= turn.step and turn.together:
            self._fresh = turn.step + 1
            self._served.fetch(self._fresh)

    def complete_for(self, model: nn.Module) -> None:
        """Whoever runs the model or takes its state between two steps sees what the last one came to."""
        me = weakref.ref(self)

        def complete(*_: object) -> None:
            here = me()
            if here is not None and here._fresh < 0:
                here.complete()

        model.register_forward_pre_hook(complete, prepend=True)
        model.register_state_dict_pre_hook(complete)  # type: ignore[no-untyped-call]

    def fetch(self) -> None:
        if self._started and self._tier.leads:
            self.refresh()
            self._served.take_state(self.optimizer, self.trained)

    def parameters(self) -> dict[str, torch.Tensor]:
        self._tier.lead(self.refresh)
        return super().parameters()

    def gradients(self) -> dict[str, torch.Tensor]:
        turn = self._turn
        if turn.together and not turn.over and self._tier.leads:
            self._served.gradients(turn.step, turn.tally["parts"], self._gradients)
        return super().gradients()

    def optimizer_state(self) -> State:
        self.fetch()
        state = self.optimizer.state
        return {name: detached(state[p]) for name, p in self.trained.items() if state.get(p)}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, entries in state.items():
            self.optimizer.state[self.trained[name]] = detached(entries)

    def status(self) -> dict[str, Any]:
        """What the ledger says of the work."""
        return self._served.status(LEDGER)

    def servers(self) -> dict[str, Any]:
        if not self._tier.leads:
            return {}
        status, news = self.status(), self.link.news
        return {
            "staleness": {str(ahead): count for ahead, count in status["staleness"]},
            "queue": status["claimed"],
            "workers": status["workers"],
            "busy": news.get("busy", []),
            "whole": news.get("whole", False),
            "bytes_sent": self.link.bytes_sent,
        }

    def close(self) -> None:
        if self._tier.leads:
            self.link.close()
            self._servers.close()
