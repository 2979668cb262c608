"""torch's pipeline stage, with a span for each action: the schedule as it really ran, bubbles and all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns

from torch.distributed.pipelining import PipelineStage

from shoal.report.spans import MICROBATCHES, SHORT_NS, SpanKind, Spans


class PassClock:
    """What the stages of a worker computed in a step, and how long they waited for their neighbours meanwhile.

    >>> clock = PassClock(Spans())
    >>> clock.begin()
    >>> clock.add(SpanKind.FORWARD, perf_counter_ns(), 0)
    >>> clock.waited() >= 0
    True
    """

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        self._began = 0
        self._busy = 0
        self._ended = 0
        """When the newest pass was over."""

    def begin(self) -> None:
        """The schedule begins."""
        self._busy = 0
        self._began = self._ended = perf_counter_ns()

    def add(self, kind: SpanKind, begin: int, detail: int) -> None:
        """A pass is over."""
        self._wait(begin)
        self._ended = perf_counter_ns()
        self._spans.add(kind, begin, self._ended, detail)
        self._busy += self._ended - begin

    @contextmanager
    def working(self) -> Iterator[None]:
        """What goes on inside is no pass, and no waiting for a neighbour either."""
        begin = perf_counter_ns()
        self._wait(begin)
        yield
        self._ended = perf_counter_ns()
        self._busy += self._ended - begin

    def waited(self) -> int:
        """The schedule is over; nanoseconds in which nothing was computed."""
        now = perf_counter_ns()
        self._wait(now)
        return max(0, now - self._began - self._busy)

    def _wait(self, until: int) -> None:
        if until - self._ended > SHORT_NS:
            self._spans.add(SpanKind.EXPOSED, self._ended, until)


class TimedStage(PipelineStage):
    """A stage whose passes are noted in `clock`."""

    clock: PassClock

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[object, ...],
        kwargs: dict[str, object] | None = None,
        save_forward_output: bool = True,
    ) -> object:
        begin = perf_counter_ns()
        result = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._note(SpanKind.FORWARD, begin, fwd_chunk_id)
        return result

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: object = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        begin = perf_counter_ns()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._note(SpanKind.BACKWARD, begin, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        begin = perf_counter_ns()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._note(SpanKind.WEIGHT, begin, bwd_chunk_id)

    def _note(self, kind: SpanKind, begin: int, micro: int) -> None:
        self.clock.add(kind, begin, self.stage_index % 64 * MICROBATCHES + micro % MICROBATCHES)
