"""When a run saves, what stands in its checkpoints beside tensors, and what happens to its folder.

A run has its folder to itself while it looks for a checkpoint to go on from, and while it trains: another one is
refused then. What a save cannot write is said at once and tried again with the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from shoal.checkpoint.copies.background import Copier
from shoal.checkpoint.copies.find_newest import CheckpointPlace, LocalFolder, find_whole
from shoal.checkpoint.copies.keep import Retention
from shoal.checkpoint.copies.peers import Peers, shared_memory
from shoal.checkpoint.copies.remote import Remote, RemotePlace
from shoal.checkpoint.folder import (
    LATEST,
    CheckpointEntry,
    abandon,
    check_name,
    clean,
    holds_any,
    latest,
    open_folder,
)
from shoal.checkpoint.load import Reader
from shoal.checkpoint.lock import FolderLock, FolderTaken
from shoal.checkpoint.reports import Facts
from shoal.checkpoint.room import cannot_write, check_room, check_writable
from shoal.checkpoint.save import Saver, State
from shoal.errors import ConfigError
from shoal.train.state.checkpoint_config import PEER, CheckpointConfig
from shoal.train.state.progress import Progress
from shoal.train.state.run_state import Holdings, check_types, collect, collect_rows, expected_bytes, holders
from shoal.train.state.snapshots import Snapshots
from shoal.train.state.take_over import features_of, sorted_by, take_over
from shoal.train.step_context import StepContext
from shoal.train.technique.early_stop import Best
from shoal.train.technique.learning_rate import rates
from shoal.world.launch import Launch

ALONE = Launch()
BEST = "best"


class Checkpoints:
    """The checkpoints of one run. Every rank has this and calls it alike."""

    def __init__(
        self, context: StepContext, plan: str, config: CheckpointConfig, launch: Launch = ALONE
    ) -> None:
        self._context = context
        self._plan = plan
        self._config = config
        self._saver: Saver | None = None
        self._peers: Peers | None = None
        self._copiers: list[Copier] = []
        self._holdings: Holdings = {}
        self._remotes: list[Remote] = []
        self._lock: FolderLock | None = None
        """With the one rank that writes manifests."""
        self._training = False
        self._seen: tuple[str | None, int] | None = None
        """The latest checkpoint when this run had the folder last."""
        self._begun: tuple[str, int] = ("", -1)
        """Name and step of the last that was begun."""
        self._retention = Retention(config.keep)
        self._steps: dict[str, int] = {}
        """By name, after how many steps a checkpoint was begun."""
        self._snapshots = Snapshots(context, launch.memory)
        self._kept = self._snapshots.may_hold(launch.again.times > 0)
        """Whether there may be snapshots to go on from."""
        root = config.root
        if root is None:
            return
        meets_after = context.exchange.sync_interval
        if config.every is not None and config.every % meets_after:
            raise ConfigError(
                f"checkpoint_every={config.every} under {plan}: with a quorum workers are at the same step only after "
                f"every {meets_after}; use a multiple of {meets_after}."
            )
        if PEER in config.copies:
            self._peers = Peers(context.savers, shared_memory(context.savers, root))
        self._remotes = [Remote(url) for url in config.copies if url != PEER]
        check_types(context.whole)
        self._check_remotes(root)
        if context.savers.rank == 0:
            self._copiers = [Copier(remote, config.keep, str(config.keep)) for remote in self._remotes]
            # Workers that meet at servers save one by one: the first answers for all of them.
            if not context.exchange.uses_servers or context.world.rank == 0:
                self._lock = FolderLock(root)
        self._saver = Saver(context.savers, root, self._committed, self._peers, self._guard, config.failures)
        context.meter.page.keeps(str(root))

    def _check_remotes(self, root: Path) -> None:
        """A mistyped address is refused; one that cannot be reached now is no reason not to go on from the folder."""
        problem, world = "", self._context.savers
        for remote in self._remotes if world.rank == 0 else ():
            try:
                remote.check()
            except ConfigError as error:
                problem = str(error)
        problem, begun = world.gather_values([problem, world.rank == 0 and holds_any(root)])[0]
        if problem and not begun:
            raise ConfigError(problem)
        if problem and world.rank == 0:
            print(f"shoal: {problem}", file=sys.stderr)

    @property
    def saves(self) -> bool:
        """Whether there is a folder to save in."""
        return self._saver is not None

    def place(self, name: str) -> Path:
        """Where a checkpoint of that name is."""
        assert self._config.root is not None
        return self._config.root / name

    def best_so_far(self) -> Best | None:
        """By which the checkpoint `best` on disk was the best. Every rank calls it."""
        if self._saver is None:
            raise ConfigError("run.best needs a folder to save in: give Run checkpoint='folder'.")
        found = None
        if self._context.savers.rank == 0:
            self._saver.idle()  # it may be under way
            entry = open_folder(self.place(BEST))
            found = entry.manifest.state.get("best") if entry.manifest is not None else None
        best = self._context.savers.gather_values(found)[0]
        return None if best is None else Best(**best)

    def due(self, step: int, last: bool) -> bool:
        """Whether a checkpoint is to be saved after so many steps."""
        every = self._config.every
        return every is not None and (last or step % every == 0)

    def begin(self, name: str, progress: Progress) -> None:
        """Save without waiting for the disk. Every rank calls it."""
        if self._saver is not None:
            self._context.watch.check(f"at checkpoint {name}")
            self._begun = (name, progress.step)
            state, facts = self._collect(name, progress, str(self._config.keep))
            self._steps[name] = progress.step
            self._saver.save(state, facts, pieces=collect_rows(self._context.whole))

    def snapshot(self, step: int, progress: Progress) -> bool:
        """The user's loop has come back after a step: keep it in memory if it is time. Every rank calls it."""

        return self._snapshots.after(step, partial(self._save_snapshot, step, progress))

    def snapshot_now(self, step: int, progress: Progress) -> None:
        """The same at once, and until it is complete; so is what was begun on disk. Every rank calls it."""
        self._snapshots.now(partial(self._save_snapshot, step, progress))
        self.leave()

    @property
    def keeps(self) -> bool:
        """Whether there are snapshots in memory."""
        return self._snapshots.takes

    def _save_snapshot(self, step: int, progress: Progress, saver: Saver) -> None:
        state, facts = self._collect(f"step-{step}", replace(progress, step=step), "")
        facts = replace(facts, state={**facts.state, "answers": progress.answers.state()})
        saver.save(state, facts, pieces=collect_rows(self._context.whole))

    def _collect(self, name: str, progress: Progress, keep: str) -> tuple[State, Facts]:
        return collect(self._context.whole, self._holdings), self._facts(name, progress, keep)

    def save(self, name: str, progress: Progress, root: Path | None = None, automatic: bool = False) -> None:
        """Save, and return when it is on disk. Every rank calls it. An automatic one goes when its time comes."""
        check_name(name)
        root = root.expanduser().absolute() if root is not None else None
        saver = (
            self._saver if root is None or root == self._config.root else Saver(self._context.savers, root)
        )
        if saver is None:
            raise ConfigError(
                "there is nowhere to save: give Run checkpoint='folder', or save('folder/name')."
            )
        self._context.watch.check(f"at checkpoint {name}")
        here = saver is self._saver

        def prepare() -> None:
            saver.idle()
            if here:
                self._take()

        def wait() -> None:
            try:
                saver.wait()
            finally:
                if here and not self._training:
                    self._release()

        try:
            self._together(prepare)
            state, facts = self._collect(name, progress, str(self._config.keep) if automatic else "")
            self._steps[name] = progress.step
            saver.save(state, facts, urgent=True, pieces=collect_rows(self._context.whole))
            self._together(wait)
        finally:
            if here and not self._training:
                self._release()

    def _together(self, action: Callable[[], None]) -> None:
        """Do something that may fail for one rank: then it fails for all."""
        problem = ""
        try:
            action()
        except ConfigError as error:
            problem = str(error)
        for theirs in self._context.savers.gather_values(problem):
            if theirs:
                raise ConfigError(theirs)

    def wait(self) -> None:
        """Until everything begun is on disk, and the copies are where they belong; the folder is others' then."""
        try:
            if self._saver is not None:
                self._saver.rest()
            for copier in self._copiers:
                copier.close()
                copier.say_what_is_missing()
        finally:
            self._release()

    def leave(self) -> None:
        """The loop has been left, or the process ends: the same, and what went wrong has been said."""
        with suppress(ConfigError):
            self.wait()

    def abandon(self) -> None:
        """The run has failed: wait for nothing that may never come."""
        if self._saver is not None:
            self._saver.abandon()
        self._release()

    def finish(self, progress: Progress) -> None:
        """The run has come to its end. A last checkpoint that could not be written is tried once more."""
        world = self._context.savers
        if self._saver is not None:
            self._saver.idle()
            failed = world.gather_numbers([float(self._saver.failed)])[:, 0].any()
            if failed and self._begun[1] == progress.step:
                self.begin(self._begun[0], progress)
            self._together(self._saver.rest)
        self.wait()
        world.barrier()
        if self._peers is not None and self._config.every is not None:
            self._peers.close()

    def hold(self, step: int) -> None:
        """A loop begins: have the folder until it ends, or refuse on every rank. Every rank calls it."""
        self._snapshots.begin(step)
        if self._saver is None:
            return
        self._together(self._take_as_it_was)
        self._training = True

    def _take(self) -> None:
        """Have the folder; where nothing can be written and nothing is to be, go without."""
        if self._lock is None:
            return
        try:
            self._lock.take()
        except OSError as error:
            if self._config.every is not None:
                raise cannot_write(self._lock.root, error) from error

    def _take_as_it_was(self) -> None:
        self._take()
        if self._lock is not None and self._seen is not None and self._seen != (now := self._stamp()):
            self._lock.release()
            raise FolderTaken(
                f"another run has written {now[0]} into {self._lock.root} since this one looked there; start again to "
                "go on from it, or give each run a checkpoint folder of its own."
            )

    def _guard(self) -> None:
        """In the saver's thread, before a checkpoint gets its name: the folder must be ours."""
        if self._lock is not None:
            self._lock.take()
            self._lock.check()

    def _release(self) -> None:
        self._training = False
        if self._lock is not None and self._lock.held:
            self._seen = self._stamp()
            self._lock.release()

    def _stamp(self) -> tuple[str | None, int]:
        root = self._config.root
        assert root is not None
        try:
            return latest(root), (root / LATEST).stat().st_mtime_ns
        except OSError:
            return None, 0

    def resume(self) -> Progress:
        """Go on from the newest whole checkpoint, if there is one. Every rank calls it."""
        root, world = self._config.root, self._context.savers
        places = self._places()
        if not places:
            return Progress()
        self._together(self._take)
        try:
            found = self._find(places)
            if root is not None:
                size = found.manifest.nbytes if found and found.manifest else 0
                self._together(lambda: self._prepare(root, size))
            if found is None:
                return Progress()
            reader = Reader.of(found)
            try:
                progress = self.take_over(reader)
                if self._snapshots.holds(reader.folder):
                    progress.answers.restore(reader.manifest.state.get("answers"))
                if root is not None:
                    self._leave_behind(root, reader)
                return progress
            finally:
                reader.close()
                world.barrier()
        finally:
            self._release()

    def _places(self) -> list[CheckpointPlace]:
        root, world = self._config.root, self._context.savers
        places: list[CheckpointPlace] = [] if root is None else [LocalFolder(world, root)]
        if self._peers is not None:
            places.append(self._peers)
        if root is not None:
            places += [RemotePlace(world, remote, root) for remote in self._remotes]
        return places + (self._snapshots.places() if self._kept else [])

    def _find(self, places: list[CheckpointPlace]) -> CheckpointEntry | None:
        try:
            return find_whole(self._context.savers, places)
        except ConfigError as error:
            if self._config.root is not None:
                raise
            if self._context.savers.rank == 0:  # in memory alone: the beginning is as good
                self._say(f"no snapshot in memory is whole ({error}) The run begins anew")
            return None

    def _prepare(self, root: Path, before: int) -> None:
        """Clear what crashes have left, and see whether checkpoints can be written; one had so many bytes before."""
        if self._context.savers.rank > 0:
            return
        if root.is_dir() and (self._lock is None or self._lock.held):
            for name in clean(root):
                self._say(f"{root}: removed what an interrupted save had left of {name}")
        if self._config.every is None:
            return
        check_writable(root)
        doubt = check_room(root, before or expected_bytes(self._context.whole))
        if doubt:
            self._say(doubt)

    def _leave_behind(self, root: Path, reader: Reader) -> None:
        """What was saved after the checkpoint that the run goes on from must neither be found nor counted again."""
        if self._context.savers.rank == 0 and root.is_dir():
            for name, now in abandon(root, reader.manifest.step).items():
                self._say(
                    f"going on from {reader.folder}; {name} is of another future and is called {now} now"
                )

    def take_over(self, reader: Reader) -> Progress:
        """Go on from this checkpoint, whose bytes have been checked. Every rank calls it."""
        if not self._snapshots.holds(reader.folder):
            self._context.meter.page.saved(reader.manifest.step)
        return take_over(self._context, reader)

    def _facts(self, name: str, progress: Progress, keep: str) -> Facts:
        context = self._context
        orders: list[list[str]] = context.mesh.model.gather_values(list(context.exchange.order))
        state: dict[str, object] = {
            "optimizer": context.exchange.optimizer_kind,
            "orders": [order for number, order in enumerate(orders) if order not in orders[:number]],
            "scale": context.scale.value if context.scale.dynamic else None,
            "good_steps": context.scale.good_steps,
            "count_per_sample": context.count_per_sample,
            "schedule": progress.schedule_now(),
            "cursor": context.loader.cursor(progress.step).to_state(),
            "streams": {"seed": context.streams.seed, "by_module": context.streams.by_module},
            "sorted_by": sorted_by(context),
            **({"features": dict(found)} if (found := features_of(context)) else {}),
            "speeds": context.balancing.speeds,
            "replicas": context.mesh.data.size,
            "workers": context.world.size,
            "holders": holders(context.whole),
            "numbers": context.mesh.data.gather_values({**self._own(), **context.exchange.numbers()}),
            "ties": dict(context.whole.shape.others),
            "rates": self._rates_by_hand(progress),
            "recipes": context.recipes.state(),
            "early_stop": progress.early_stop.state() if progress.early_stop is not None else None,
            "best": asdict(progress.best) if progress.best is not None else None,
        }
        return Facts(name, progress.step, self._plan, state, keep)

    def _rates_by_hand(self, progress: Progress) -> list[list[float]] | None:
        """Learning rates that no schedule and no script has set; None where there are none."""
        now = rates(self._context.exchange.optimizer)
        return now if progress.schedule_now() is None and now != self._context.rates_given else None

    def _own(self) -> dict[str, float | None]:
        """Numbers that may differ from replica to replica, where each trains by itself."""
        scale = self._context.scale
        if not self._context.exchange.work.loss_is_local:
            return {}
        return {
            "count_per_sample": self._context.count_per_sample,
            "scale": scale.value if scale.dynamic else None,
            "good_steps": scale.good_steps,
        }

    def _committed(self, folder: Path) -> None:
        """On rank 0, in the saver's thread."""
        self._context.meter.page.saved(self._steps.pop(folder.name, 0))
        for copier in self._copiers:
            copier.add(folder)
        busy = {name for copier in self._copiers for name in copier.busy()}
        try:
            self._retention.after(folder, busy)
        except OSError as error:
            self._say(f"an old checkpoint could not be removed ({error}); it stays")

    @staticmethod
    def _say(sentence: str) -> None:
        print(f"shoal: {sentence}.", file=sys.stderr, flush=True)
