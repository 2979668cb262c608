"""Sentences for the user: each once, from the first worker, also where another stage of a pipeline has found it."""

from __future__ import annotations

import sys

from shoal.world.mesh import Mesh


class Words:
    """What this worker has to say. Others' streams are not shown, so sentences of other stages go to the first."""

    def __init__(self, mesh: Mesh) -> None:
        self._stages = mesh.stages
        self._prints = mesh.world.rank == 0
        self._speaks = mesh.data.rank + mesh.tensor.rank == 0
        """Whether this is the first of all that compute with these layers."""
        self._kept: list[str] = []

    def say(self, text: str) -> None:
        """Print it; in a pipeline, where stages meet next."""
        if self._stages.size == 1:
            if self._prints:
                print(text, file=sys.stderr, flush=True)
        elif self._speaks:
            self._kept.append(text)

    def meet(self) -> None:
        """The stages of a pipeline tell the first what they have to say. Collective among them."""
        if self._stages.size == 1:
            return
        everybody = self._stages.gather_values(self._kept)
        self._kept = []
        if self._prints:
            for text in dict.fromkeys(text for theirs in everybody for text in theirs):
                print(text, file=sys.stderr, flush=True)
