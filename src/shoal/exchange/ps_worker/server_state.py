"""What a worker can give of a state that lies on servers: parameters, gradients, optimizer state, rows, reports."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from shoal.exchange.buckets.bucketed_exchange import BucketedExchange
from shoal.exchange.contract import State, detached
from shoal.exchange.ps_worker.claim import WorkClaim
from shoal.exchange.ps_worker.host_tier import Tier
from shoal.exchange.ps_worker.transfer import Transfer
from shoal.server.client.connection import Link
from shoal.server.discovery import Endpoint
from shoal.server.protocol.ledger_answers import LedgerStatus


class ServedState(BucketedExchange):
    """Shared by exchanges with servers; abstract. Only the leader of a unit has a link to them."""

    link: Link
    _tier: Tier
    _claim: WorkClaim
    _transfer: Transfer
    _servers: Endpoint
    _started: bool
    _fresh: int
    """The step for which the parameters here are fresh; -1: none."""
    _gradients: list[torch.Tensor]

    def first_values(self, oldest: int) -> None:
        """The values to begin with: from another worker that has them, or from the servers.

        `oldest`: the step that was not over a moment ago. Who can still claim it can use what was fetched for it.
        """
        # From a worker first: servers then send the model once and not once for every worker.
        self._fresh = self._transfer.borrow()
        if self._fresh < 0:
            self._transfer.fetch(oldest)
            self._fresh = oldest

    def refresh(self) -> None:
        """Fetch the newest parameters, which other workers change meanwhile."""
        if self._started and self._tier.leads and not self._transfer.incoming.complete():
            self._transfer.fetch(0)

    def complete(self) -> None:
        claim = self._claim
        if not self._started or not self._tier.leads:
            return
        # Values of a step that is under way are taken in; else those of the next one are fetched now.
        if not self._transfer.incoming.complete() and self._fresh < 0 <= claim.step and claim.together:
            self._fresh = claim.step + 1
            self._transfer.fetch(self._fresh)

    def complete_for(self, model: nn.Module) -> None:
        """A call of the model, or of its `state_dict`, between two steps sees the parameters after the last step."""
        me = weakref.ref(self)

        def complete(*_: object) -> None:
            owner = me()
            if owner is not None and owner._fresh < 0:
                owner.complete()

        model.register_forward_pre_hook(complete, prepend=True)
        model.register_state_dict_pre_hook(complete)  # type: ignore[no-untyped-call]

    @contextmanager
    def averaged(self) -> Iterator[None]:
        self.refresh()
        yield

    def prepare_save(self) -> None:
        if self._started and self._tier.leads:
            self.refresh()
            self._transfer.take_state(self.optimizer, self.trained)

    def parameters(self) -> dict[str, torch.Tensor]:
        self._tier.lead(self.refresh)
        return super().parameters()

    def gradients(self) -> dict[str, torch.Tensor]:
        claim = self._claim
        if claim.together and not claim.over and self._tier.leads:
            self._transfer.gradients(claim.step, claim.tally["parts"], self._gradients)
        return super().gradients()

    def optimizer_state(self) -> State:
        self.prepare_save()
        state = self.optimizer.state
        return {name: detached(state[p]) for name, p in self.trained.items() if state.get(p)}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, entries in state.items():
            self.optimizer.state[self.trained[name]] = detached(entries)

    def status(self) -> LedgerStatus:
        """What the ledger says of the work."""
        return self._transfer.ledger_status()

    def servers(self) -> dict[str, object]:
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
