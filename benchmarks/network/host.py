"""What runs on each of the two hosts: it takes commands, one JSON line each, and answers each with one.

    {"do": "make", "name": "ddp", "case": {...}}     build a contestant                   {}
    {"do": "run", "name": "ddp", "steps": 2}         train on                             seconds, bytes, losses
    {"do": "measure", "name": "ddp"}                 loss on text nobody trains on        loss
    {"do": "drop", "name": "ddp"}                    forget a contestant                  {}
    {"do": "probe", "bytes": 1000000}                what the wire carries                seconds, bytes

Both hosts get the same commands in the same order, so their collectives meet. What a command cannot do is answered by
`{"error": sentence}`. The process ends with its input.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.network.contestants import contestants
from benchmarks.network.runners import Case, Runner, make_runner
from shoal.world.launch import from_environment
from shoal.world.world import World

QUIET = 0.03
"""Seconds without a byte after which the wire counts as empty."""


class Host:
    """The contestants on this host."""

    def __init__(self, world: World, counter: Path) -> None:
        self._world = world
        self._counter = counter
        self._runners: dict[str, Runner] = {}

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Do what a command says."""
        what, name = command["do"], command.get("name", "")
        if what == "make":
            (contestant,) = [one for one in contestants([name]) if one.name == name]
            self._runners[name] = make_runner(contestant, Case(**command["case"]), self._world)
            return {}
        if what == "run":
            return self._run(self._runners[name], command["steps"])
        if what == "measure":
            return {"loss": self._runners[name].measure()}
        if what == "drop":
            del self._runners[name]
            gc.collect()
            return {}
        assert what == "probe", what
        return self._probe(command["bytes"])

    def _run(self, runner: Runner, steps: int) -> dict[str, Any]:
        gc.collect()
        self._world.barrier()
        before, start = self._sent(), time.perf_counter()
        losses = [runner.step() for _ in range(steps)]
        late = self._empty_wire()
        self._world.barrier()  # it is over when the slower host is
        seconds = time.perf_counter() - start - late
        return {"seconds": seconds, "bytes": self._sent() - before, "losses": losses}

    def _probe(self, count: int) -> dict[str, Any]:
        vector = torch.zeros(count // 4)
        self._world.all_reduce(vector[:1000]).wait()
        before, start = self._sent(), time.perf_counter()
        self._world.all_reduce(vector).wait()
        return {"seconds": time.perf_counter() - start, "bytes": self._sent() - before}

    def _sent(self) -> int:
        """Bytes that have left this host, as the kernel counts them."""
        return int(self._counter.read_text())

    def _empty_wire(self) -> float:
        """Wait for what is still under way behind a step, or it would fall into the next contestant's time.

        Returns how long nothing has moved at the end: that is ours and not the contestant's.
        """
        last, since = self._sent(), time.perf_counter()
        while time.perf_counter() - since < QUIET:
            time.sleep(0.002)
            now = self._sent()
            if now != last:
                last, since = now, time.perf_counter()
        return time.perf_counter() - since


def serve(host: Host, commands: TextIO, answers: TextIO) -> None:
    """Answer until there are no more commands."""
    for line in commands:
        try:
            reply = host.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=answers, flush=True)


def main(interface: str) -> None:
    """Join the other host, say so, and serve; `benchmarks.network.start` calls it."""
    # What contestants print goes where errors go: the first output is ours alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    world = World.open(from_environment(), device="cpu")
    host = Host(world, Path(f"/sys/class/net/{interface}/statistics/tx_bytes"))
    print(json.dumps({}), file=answers, flush=True)
    serve(host, sys.stdin, answers)
    os._exit(0)  # the other host may have ended already: nothing is left to wait for
