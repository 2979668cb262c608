"""When a run saves, what stands in its checkpoints beside tensors, and how it goes on from one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.checkpoint.copies.background import Copier
from shoal.checkpoint.copies.find_newest import CheckpointPlace, LocalFolder, find_whole
from shoal.checkpoint.copies.keep import Keep, prune
from shoal.checkpoint.copies.peers import Peers
from shoal.checkpoint.copies.remote import Remote, RemotePlace
from shoal.checkpoint.folder import ABANDONED, abandon, check_name, clean, glance, open_folder
from shoal.checkpoint.load import Reader
from shoal.checkpoint.save import Facts, Saver
from shoal.errors import ConfigError
from shoal.train.state.progress import Progress
from shoal.train.state.run_state import (
    Holdings,
    check_types,
    collect,
    collect_rows,
    holders,
    restore,
    restore_optimizer,
    restore_owned,
    restore_rows,
)
from shoal.train.step_context import StepContext
from shoal.train.technique.early_stop import Best
from shoal.train.technique.learning_rate import rates, set_rates

PEER = "peer"
BEST = "best"


@dataclass(frozen=True)
class CheckpointConfig:
    """What the user asks for."""

    root: Path | None = None
    every: int | None = None
    """Steps between checkpoints."""
    keep: Keep = Keep()  # noqa: RUF009 it is frozen
    copies: tuple[str, ...] = ()
    """Where second copies go: "peer", or URLs."""

    @staticmethod
    def of(root: str | None, every: int | None, keep: int | str | None, copies: str) -> CheckpointConfig:
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
        return CheckpointConfig(
            Path(root).expanduser().absolute() if root is not None else None, every, Keep.of(keep), listed
        )


class Checkpoints:
    """The checkpoints of one run. Every rank has this and calls it alike."""

    def __init__(self, context: StepContext, plan: str, config: CheckpointConfig) -> None:
        self._context, self._plan, self._config = context, plan, config
        self._saver: Saver | None = None
        self._peers: Peers | None = None
        self._copiers: list[Copier] = []
        self._holdings: Holdings = {}
        self._remotes: list[Remote] = []
        self._steps: dict[str, int] = {}
        """By name, after how many steps a checkpoint was begun."""
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
            self._peers = Peers(context.savers, root)
        self._remotes = [Remote(url) for url in config.copies if url != PEER]
        check_types(context.whole)
        self._check_remotes(root)
        if context.savers.rank == 0:
            self._copiers = [Copier(remote, config.keep) for remote in self._remotes]
        self._saver = Saver(context.savers, root, self._committed, self._peers)
        context.meter.page.keeps(str(root))

    def _check_remotes(self, root: Path) -> None:
        """A mistyped address is refused; one that cannot be reached now is no reason not to go on from the folder."""
        problem, world = "", self._context.savers
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
            self._saver.rest()  # it may be under way
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
            state, facts = collect(self._context.whole, self._holdings), self._facts(name, progress)
            self._saver.save(state, facts, pieces=collect_rows(self._context.whole))

    def save(self, name: str, progress: Progress, root: Path | None = None) -> None:
        """Save, and return when it is on disk. Every rank calls it."""
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
        self._together(saver.rest)  # an earlier save may have failed for one of us, who would not come along
        state, facts = collect(self._context.whole, self._holdings), self._facts(name, progress)
        saver.save(state, facts, urgent=True, pieces=collect_rows(self._context.whole))
        self._together(saver.wait)

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
        self._context.savers.barrier()
        if self._peers is not None and self._config.every is not None:
            self._peers.close()

    def resume(self) -> Progress:
        """Go on from the newest whole checkpoint, if there is one. Every rank calls it."""
        root, world = self._config.root, self._context.savers
        if root is None:
            return Progress()
        places: list[CheckpointPlace] = [LocalFolder(world, root)]
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
        if self._context.savers.rank == 0 and root.is_dir():
            for name in abandon(root, reader.manifest.step):
                text = f"{name} is of another future and is called {name}{ABANDONED} now"
                print(f"shoal: going on from {reader.folder}; {text}.", file=sys.stderr)

    def take_over(self, reader: Reader) -> Progress:
        """Go on from this checkpoint, whose bytes have been checked. Every rank calls it."""
        context, state = self._context, reader.manifest.state
        context.meter.page.saved(reader.manifest.step)
        restore(context.whole, reader)
        restore_rows(context.whole, reader)
        if state["optimizer"] is not None:
            self._check_optimizer(reader)
            for order in state["orders"]:
                if set(order) == set(context.exchange.order):
                    context.exchange.lay_out_again(order)
            restore_optimizer(context.whole, reader)
        restore_owned(context.whole, reader)
        if context.scale.dynamic and state["scale"] is not None:
            context.scale.value, context.scale.good_steps = state["scale"], state["good_steps"]
        context.count_per_sample = state["count_per_sample"]
        if len(state.get("numbers", ())) == context.mesh.data.size:
            own = state["numbers"][context.mesh.data.rank]
            context.count_per_sample = own.get("count_per_sample", context.count_per_sample)
            if context.scale.dynamic and own.get("scale") is not None:
                context.scale.value, context.scale.good_steps = own["scale"], own["good_steps"]
            context.exchange.load_numbers(own)
        by_module = state.get("streams", {}).get("by_module")
        if by_module is not None:
            context.streams.go_on(by_module)
        if state["cursor"] is not None:
            sentences = context.loader.go_on(reader.manifest.step, state["cursor"])
            before, now = state.get("sorted_by"), _sorted_by(context)
            if before and now and before != now and state["cursor"]["position"]:
                sentences.append(
                    f"this epoch was sorted by '{before}' and is sorted by '{now}' now: some of its samples come twice "
                    "and others not at all"
                )
            for sentence in sentences if context.savers.rank == 0 else ():
                print(f"shoal: going on from {reader.folder}; {sentence}.", file=sys.stderr)
        context.balancing.go_on(reader.manifest.step, state.get("speeds"))
        sentences = []
        if state.get("rates"):
            set_rates(context.exchange.optimizer, state["rates"])
            sentences.append("learning rates are those that were set by run.optimizer")
        if context.averages.go_on(state.get("averages")):
            sentences.append(
                f"it has no {context.averages.name}, which begins with the weights as they are now"
            )
        for sentence in sentences if context.savers.rank == 0 else ():
            print(f"shoal: going on from {reader.folder}; {sentence}.", file=sys.stderr)
        return Progress(reader.manifest.step, state["schedule"], early_stop_was=state.get("early_stop"))

    def _check_optimizer(self, reader: Reader) -> None:
        before, now = reader.manifest.state["optimizer"], self._context.exchange.optimizer_kind
        if before != now:
            raise ConfigError(
                f"the checkpoint {reader.folder} was written with {before}, and optimizer= now makes "
                f"{now}; use the same optimizer, or another checkpoint folder."
            )

    def _facts(self, name: str, progress: Progress) -> Facts:
        context = self._context
        self._steps[name] = progress.step
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
            "sorted_by": _sorted_by(context),
            "speeds": context.balancing.speeds,
            "replicas": context.mesh.data.size,
            "workers": context.world.size,
            "holders": holders(context.whole),
            "numbers": context.mesh.data.gather_values({**self._own(), **context.exchange.numbers()}),
            "ties": dict(context.whole.shape.others),
            "rates": self._rates_by_hand(progress),
            "averages": context.averages.state(),
            "early_stop": progress.early_stop.state() if progress.early_stop is not None else None,
            "best": asdict(progress.best) if progress.best is not None else None,
        }
        return Facts(name, progress.step, self._plan, state)

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
            prune(folder.parent, self._config.keep, busy)
        except OSError as error:
            print(f"shoal: an old checkpoint could not be removed ({error}); it stays.", file=sys.stderr)


def _sorted_by(context: StepContext) -> str:
    """The column by which the order of samples is sorted in windows, if it is."""
    partition = context.loader.feed.partition
    return partition.keyed_by if partition.reach else ""
