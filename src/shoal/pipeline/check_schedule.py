"""Is a schedule right? Checked and timed without processes, for any lists of actions.

Every stage runs every micro-batch forward once and backward once, in that order; no rank waits for ever; and
what a rank has to hold at once is counted. Ranks are simulated as the runtime works: a rank's next action runs
when its inputs are there, receiving blocks, sending does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shoal.errors import ConfigError
from shoal.pipeline.base import EVEN, Action, ActionKind, Costs, Schedule

Lists = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Span:
    """When an action ran."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """How a schedule went."""

    spans: tuple[tuple[Span, ...], ...]
    """By rank, in order."""
    peaks: tuple[int, ...]
    """By rank: the most forward activations held at once, one for each stage and micro-batch."""
    waiting: tuple[int, ...]
    """By rank: the most activations and gradients that had come from others and were not yet used."""

    @property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last."""
        return max((span.end for rank in self.spans for span in rank), default=0.0)

    @property
    def idle(self) -> float:
        """The share of all ranks' time in which they do nothing."""
        busy = sum(span.end - span.start for rank in self.spans for span in rank)
        return 1 - busy / (len(self.spans) * self.makespan) if self.makespan else 0.0


def simulate(
    schedule: type[Schedule], ranks: int, microbatches: int, costs: Costs | Sequence[Costs] = EVEN
) -> Simulation:
    """Check a schedule and time it.

    >>> from shoal.pipeline import TABLE
    >>> run = simulate(TABLE["1f1b"], ranks=4, microbatches=8)
    >>> run.makespan, round(run.idle, 3), run.peaks
    (33.0, 0.273, (4, 3, 2, 1))
    """
    return check(schedule.actions(ranks, microbatches), ranks * schedule.stages_per_rank, microbatches, costs)


def check(
    actions: Lists, stages: int, microbatches: int, costs: Costs | Sequence[Costs] = EVEN
) -> Simulation:
    """Simulate actions by rank, or raise a ConfigError that names the first thing wrong with them.

    Costs are one for all stages, or one for each.

    >>> check([[Action(0, ActionKind.B, 0), Action(0, ActionKind.F, 0)]], stages=1, microbatches=1)
    Traceback (most recent call last):
    shoal.errors.ConfigError: rank 0 runs 0B0 before 0F0; a schedule has to turn them round.
    """
    each = [costs] * stages if isinstance(costs, Costs) else list(costs)
    if len(each) != stages:
        raise ConfigError(
            f"there are {len(each)} costs for {stages} stages; give one for all, or one for each."
        )
    _in_range(actions, stages, microbatches)
    _on_one_rank(actions)
    _once(actions, stages, microbatches)
    _in_turn(actions)
    spans = _run(actions, stages, each)
    peaks = tuple(_peak(order) for order in actions)
    return Simulation(spans, peaks, tuple(_waiting(spans, rank, stages) for rank in range(len(spans))))


def _in_range(actions: Lists, stages: int, microbatches: int) -> None:
    for rank, order in enumerate(actions):
        for action in order:
            if not (0 <= action.stage < stages and 0 <= action.micro < microbatches):
                raise ConfigError(
                    f"rank {rank} runs {action}, but there are {stages} stages and {microbatches} micro-batches, "
                    "counted from 0; leave it out."
                )


def _on_one_rank(actions: Lists) -> None:
    home: dict[int, int] = {}
    for rank, order in enumerate(actions):
        for action in order:
            if home.setdefault(action.stage, rank) != rank:
                raise ConfigError(
                    f"stage {action.stage} runs on rank {home[action.stage]}, and on rank {rank} ({action}); "
                    "give it to one of them."
                )


def _once(actions: Lists, stages: int, microbatches: int) -> None:
    seen: set[Action] = set()
    for rank, order in enumerate(actions):
        for action in order:
            if action in seen:
                raise ConfigError(f"rank {rank} runs {action} twice; keep one.")
            seen.add(action)
    for stage in range(stages):
        for micro in range(microbatches):
            _complete(stage, micro, {kind for kind in ActionKind if Action(stage, kind, micro) in seen})


def _complete(stage: int, micro: int, kinds: set[ActionKind]) -> None:
    """One micro-batch in one stage: F, and B or both of I and W."""
    halves = kinds & {ActionKind.I, ActionKind.W}
    if ActionKind.B in kinds and halves:
        extra = ", ".join(str(Action(stage, kind, micro)) for kind in ActionKind if kind in halves)
        raise ConfigError(
            f"{Action(stage, ActionKind.B, micro)} and {extra} are one backward pass done twice; keep one."
        )
    wanted = {ActionKind.F, ActionKind.I, ActionKind.W} if halves else {ActionKind.F, ActionKind.B}
    for kind in ActionKind:
        if kind in wanted - kinds:
            raise ConfigError(
                f"no rank runs {Action(stage, kind, micro)}; every stage runs every micro-batch forward and backward."
            )


def _in_turn(actions: Lists) -> None:
    """Forward before backward, inputs before weights: what one stage does with one micro-batch."""
    for rank, order in enumerate(actions):
        done: set[Action] = set()
        for action in order:
            before = _own_input(action)
            if before is not None and before not in done:
                raise ConfigError(
                    f"rank {rank} runs {action} before {before}; a schedule has to turn them round."
                )
            done.add(action)


def _own_input(action: Action) -> Action | None:
    """What the same stage has to have done with the same micro-batch."""
    if action.kind is ActionKind.F:
        return None
    return Action(action.stage, ActionKind.I if action.kind is ActionKind.W else ActionKind.F, action.micro)


def _neighbour_inputs(action: Action, stages: int) -> tuple[Action, ...]:
    """What another stage has to have done with the same micro-batch; any one of them will do."""
    if action.kind is ActionKind.F and action.stage > 0:
        return (Action(action.stage - 1, ActionKind.F, action.micro),)
    if action.kind in (ActionKind.B, ActionKind.I) and action.stage < stages - 1:
        # The gradient of an output leaves the next stage with B, or with I where that is split: W only follows.
        return tuple(Action(action.stage + 1, kind, action.micro) for kind in (ActionKind.B, ActionKind.I))
    return ()


def _run(actions: Lists, stages: int, costs: Sequence[Costs]) -> tuple[tuple[Span, ...], ...]:
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in actions]
    progress = True
    while progress:
        # Each rank goes on until it must wait for another; when nobody can, either all is done or there is a deadlock.
        progress = False
        for order, mine in zip(actions, spans, strict=True):
            while len(mine) < len(order):
                action = order[len(mine)]
                needed = _neighbour_inputs(action, stages)
                arrivals = [ends[other] for other in needed if other in ends]
                if needed and not arrivals:
                    break
                start = max([mine[-1].end if mine else 0.0, *arrivals])
                ends[action] = start + costs[action.stage].of(action.kind)
                mine.append(Span(action, start, ends[action]))
                progress = True
    stuck = [
        f"rank {rank} waits with {order[len(mine)]} for stage {_neighbour_inputs(order[len(mine)], stages)[0].stage}"
        for rank, (order, mine) in enumerate(zip(actions, spans, strict=True))
        if len(mine) < len(order)
    ]
    if stuck:
        raise ConfigError(
            f"nobody can go on: {', '.join(stuck)}; a schedule has to follow the order of the stages."
        )
    return tuple(tuple(mine) for mine in spans)


def _peak(order: Sequence[Action]) -> int:
    """Activations are kept from F until B, or until W: the weights' half of the backward pass needs them too."""
    held = peak = 0
    for action in order:
        if action.kind is ActionKind.F:
            held += 1
            peak = max(peak, held)
        elif action.kind in (ActionKind.B, ActionKind.W):
            held -= 1
    return peak


def _waiting(spans: Sequence[Sequence[Span]], rank: int, stages: int) -> int:
    changes = sorted(
        _arrivals_and_uses(spans, rank, stages)
    )  # at the same time, what is used makes room first
    waiting = most = 0
    for _, change in changes:
        waiting += change
        most = max(most, waiting)
    return most


def _arrivals_and_uses(
    spans: Sequence[Sequence[Span]], rank: int, stages: int
) -> Iterator[tuple[float, int]]:
    """When something from another rank comes (+1) and is used (-1); what is used as it comes does not wait."""
    others = {
        span.action: span.end for number, theirs in enumerate(spans) for span in theirs if number != rank
    }
    for span in spans[rank]:
        for needed in _neighbour_inputs(span.action, stages):
            # On the same rank nothing is sent; what arrives at the moment it is used takes no buffer.
            if needed in others and others[needed] < span.start:
                yield others[needed], 1
                yield span.start, -1
