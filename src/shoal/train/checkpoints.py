"""When a run saves, what stands in its checkpoints beside tensors, and how it goes on from one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.checkpoint.copies import Copier
from shoal.checkpoint.find import Local, Place, find_whole
from shoal.checkpoint.folder import ABANDONED, abandon, check_name, clean, glance
from shoal.checkpoint.keep import Keep, prune
from shoal.checkpoint.load import Reader
from shoal.checkpoint.peers import Peers
from shoal.checkpoint.remote import Remote, RemotePlace
from shoal.checkpoint.save import Facts, Saver
from shoal.errors import ConfigError
from shoal.train.parts import Parts
from shoal.train.progress import Progress
from shoal.train.state import (
    Memo,
    check_types,
    collect,
    collect_rows,
    holders,
    restore,
    restore_optimizer,
    restore_owned,
    restore_rows,
)

PEER = "peer"


@dataclass(frozen=True)
class Wishes:
    """What the user asks for."""

    root: Path | None = None
    every: int | None = None
    """Steps between checkpoints."""
    keep: Keep = Keep()  # noqa: RUF009 it is frozen
    copies: tuple[str, ...] = ()
    """Where second copies go: "peer", or URLs."""

    @staticmethod
    def of(root: str | None, every: int | None, keep: int | str | None, copies: str) -> Wishes:
        """From the fields of a Run; refuses what cannot work."""
        if every is not None and every < 1:
            raise ConfigError(f"checkpoint_every={every}; it must be at least 1.")
        listed = tuple(copy.strip() for copy in copies.split(",") if copy.strip())
        for what, given in ((f"checkpoint_every={every}", every), (f"copies={copies!r}", listed)):
            if given and root is None:
                raise ConfigError(f"{what} needs a folder: give checkpoint=.")
        for copy in listed:
            if copy != PEER and "://" not in copy:
                raise ConfigError(f"copies: '{copy}' is neither 'peer' nor a URL such as s3://bucket/run.")
        return Wishes(
            Path(root).expanduser().absolute() if root is not None else None, every, Keep.of(keep), listed
        )


class Checkpoints:
    """The checkpoints of one run. Every rank has this and calls it alike."""

    def __init__(self, parts: Parts, plan: str, wishes: Wishes) -> None:
        self._parts, self._plan, self._wishes = parts, plan, wishes
        self._saver: Saver | None = None
        self._peers: Peers | None = None
        self._copiers: list[Copier] = []
        self._memo: Memo = {}
        self._remotes: list[Remote] = []
        root = wishes.root
        if root is None:
            return
        meets_after = parts.exchange.meets_after
        if wishes.every is not None and wishes.every % meets_after:
            raise ConfigError(
                f"checkpoint_every={wishes.every} under {plan}: with a quorum workers are at the same step only after "
                f"every {meets_after}; use a multiple of {meets_after}."
            )
        if PEER in wishes.copies:
            self._peers = Peers(parts.savers, root)
        self._remotes = [Remote(url) for url in wishes.copies if url != PEER]
        check_types(parts.whole)
        self._check_remotes(root)
        if parts.savers.rank == 0:
            self._copiers = [Copier(remote, wishes.keep) for remote in self._remotes]
        self._saver = Saver(parts.savers, root, self._committed, self._peers)

    def _check_remotes(self, root: Path) -> None:
        """A mistyped address is refused; one that cannot be reached now is no reason not to go on from the folder."""
        problem, world = "", self._parts.savers
        for remote in self._remotes if world.rank == 0 else ():
            try:
                remote.check()
            except ConfigError as error:
                problem = str(error)
        problem, begun = world.gather_values([problem, bool(glance(root))])[0]
        if problem and not begun:
            raise ConfigError(problem)
        if problem and world.rank == 0:
            print(f"shoal: {problem}", file=sys.stderr)

    def due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is to be saved after so many steps."""
        every = self._wishes.every
        return every is not None and (last or step % every == 0)

    def begin(self, name: str, progress: Progress) -> None:
        """Save without waiting for the disk. Every rank calls it."""
        if self._saver is not None:
            state, facts = collect(self._parts.whole, self._memo), self._facts(name, progress)
            self._saver.save(state, facts, pieces=collect_rows(self._parts.whole))

    def save(self, name: str, progress: Progress, root: Path | None = None) -> None:
        """Save, and return when it is on disk. Every rank calls it."""
        check_name(name)
        root = root.expanduser().absolute() if root is not None else None
        saver = self._saver if root is None or root == self._wishes.root else Saver(self._parts.savers, root)
        if saver is None:
            raise ConfigError(
                "there is nowhere to save: give Run checkpoint='folder', or save('folder/name')."
            )
        self._together(saver.rest)  # an earlier save may have failed for one of us, who would not come along
        state, facts = collect(self._parts.whole, self._memo), self._facts(name, progress)
        saver.save(state, facts, urgent=True, pieces=collect_rows(self._parts.whole))
        self._together(saver.wait)

    def _together(self, action: Callable[[], None]) -> None:
        """Do something that may fail for one rank: then it fails for all."""
        problem = ""
        try:
            action()
        except ConfigError as error:
            problem = str(error)
        for theirs in self._parts.savers.gather_values(problem):
            if theirs:
                raise ConfigError(theirs)

    def wait(self) -> None:
        """Until everything begun is on disk, and the copies are where they belong."""
        if self._saver is not None:
            self._saver.rest()
        for copier in self._copiers:
            copier.close()

    def abandon(self) -> None:
        """The run has failed: wait for nothing that may never come."""
        if self._saver is not None:
            self._saver.abandon()

    def finish(self) -> None:
        """The run has come to its end."""
        self.wait()
        self._parts.savers.barrier()
        if self._peers is not None and self._wishes.every is not None:
            self._peers.close()

    def resume(self) -> Progress:
        """Go on from the newest whole checkpoint, if there is one. Every rank calls it."""
        root, world = self._wishes.root, self._parts.savers
        if root is None:
            return Progress()
        places: list[Place] = [Local(world, root)]
        if self._peers is not None:
            places.append(self._peers)
        places += [RemotePlace(world, remote, root) for remote in self._remotes]
        found = find_whole(world, places)
        if world.rank == 0 and root.is_dir():
            clean(root)
        if found is None:
            return Progress()
        reader = Reader.of(found)
        try:
            progress = self.take_over(reader)
            self._leave_behind(root, reader)
            return progress
        finally:
            reader.close()
            world.barrier()

    def _leave_behind(self, root: Path, reader: Reader) -> None:
        """What was saved after the checkpoint that the run goes on from must neither be found nor counted again."""
        if self._parts.savers.rank == 0 and root.is_dir():
            for name in abandon(root, reader.manifest.step):
                text = f"{name} is of another future and is called {name}{ABANDONED} now"
                print(f"shoal: going on from {reader.folder}; {text}.", file=sys.stderr)

    def take_over(self, reader: Reader) -> Progress:
        """Go on from this checkpoint, whose bytes have been checked. Every rank calls it."""
        parts, state = self._parts, reader.manifest.state
        restore(parts.whole, reader)
        restore_rows(parts.whole, reader)
        if state["optimizer"] is not None:
            self._check_optimizer(reader)
            for order in state["orders"]:
                if set(order) == set(parts.exchange.order):
                    parts.exchange.lay_out_again(order)
            restore_optimizer(parts.whole, reader)
        restore_owned(parts.whole, reader)
        if parts.scale.dynamic and state["scale"] is not None:
            parts.scale.value, parts.scale.good_steps = state["scale"], state["good_steps"]
        parts.count_per_sample = state["count_per_sample"]
        if len(state.get("numbers", ())) == parts.mesh.data.size:
            own = state["numbers"][parts.mesh.data.rank]
            parts.count_per_sample = own.get("count_per_sample", parts.count_per_sample)
            if parts.scale.dynamic and own.get("scale") is not None:
                parts.scale.value, parts.scale.good_steps = own["scale"], own["good_steps"]
            parts.exchange.load_numbers(own)
        by_module = state.get("streams", {}).get("by_module")
        if by_module is not None:
            parts.streams.go_on(by_module)
        if state["cursor"] is not None:
            told = parts.loader.go_on(reader.manifest.step, state["cursor"])
            before, now = state.get("sorted_by"), _sorted_by(parts)
            if before and now and before != now and state["cursor"]["position"]:
                told.append(
                    f"this epoch was sorted by '{before}' and is sorted by '{now}' now: some of its samples come twice "
                    "and others not at all"
                )
            for sentence in told if parts.savers.rank == 0 else ():
                print(f"shoal: going on from {reader.folder}; {sentence}.", file=sys.stderr)
        parts.balancing.go_on(reader.manifest.step, state.get("speeds"))
        return Progress(reader.manifest.step, state["schedule"])

    def _check_optimizer(self, reader: Reader) -> None:
        before, now = reader.manifest.state["optimizer"], type(self._parts.exchange.optimizer).__name__
        if before != now:
            raise ConfigError(
                f"the checkpoint {reader.folder} was written with {before}, and optimizer= now makes "
                f"{now}; use the same optimizer, or another checkpoint folder."
            )

    def _facts(self, name: str, progress: Progress) -> Facts:
        parts = self._parts
        orders: list[list[str]] = parts.mesh.model.gather_values(list(parts.exchange.order))
        state: dict[str, Any] = {
            "optimizer": type(parts.exchange.optimizer).__name__,
            "orders": [order for number, order in enumerate(orders) if order not in orders[:number]],
            "scale": parts.scale.value if parts.scale.dynamic else None,
            "good_steps": parts.scale.good_steps,
            "count_per_sample": parts.count_per_sample,
            "schedule": progress.schedule_now(),
            "cursor": parts.loader.cursor(progress.step).to_state(),
            "streams": {"seed": parts.streams.seed, "by_module": parts.streams.by_module},
            "sorted_by": _sorted_by(parts),
            "speeds": parts.balancing.speeds,
            "replicas": parts.mesh.data.size,
            "workers": parts.world.size,
            "holders": holders(parts.whole),
            "numbers": parts.mesh.data.gather_values({**self._own(), **parts.exchange.numbers()}),
            "ties": dict(parts.whole.shape.others),
        }
        return Facts(name, progress.step, self._plan, state)

    def _own(self) -> dict[str, Any]:
        """Numbers that may differ from replica to replica, where each trains by itself."""
        scale = self._parts.scale
        if not self._parts.exchange.counts_own:
            return {}
        return {
            "count_per_sample": self._parts.count_per_sample,
            "scale": scale.value if scale.dynamic else None,
            "good_steps": scale.good_steps,
        }

    def _committed(self, folder: Path) -> None:
        """On rank 0, in the saver's thread."""
        for copier in self._copiers:
            copier.add(folder)
        busy = {name for copier in self._copiers for name in copier.busy()}
        try:
            prune(folder.parent, self._wishes.keep, busy)
        except OSError as error:
            print(f"shoal: an old checkpoint could not be removed ({error}); it stays.", file=sys.stderr)


def _sorted_by(parts: Parts) -> str:
    """The column by which the order of samples is sorted in windows, if it is."""
    partition = parts.loader.feed.partition
    return partition.keyed_by if partition.reach else ""
