"""torch's pipeline stage, with a span for each action: the schedule as it really ran, bubbles and all."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from torch.distributed.pipelining import PipelineStage

from shoal.report.spans import MICROBATCHES, SpanKind, Spans


class TimedStage(PipelineStage):
    """A stage whose passes are noted in `spans`."""

    spans: Spans

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        begin = perf_counter_ns()
        result = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        self._note(SpanKind.FORWARD, begin, fwd_chunk_id)
        return result

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        begin = perf_counter_ns()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._note(SpanKind.BACKWARD, begin, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        begin = perf_counter_ns()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._note(SpanKind.WEIGHT, begin, bwd_chunk_id)

    def _note(self, kind: SpanKind, begin: int, micro: int) -> None:
        detail = self.stage_index % 64 * MICROBATCHES + micro % MICROBATCHES
        self.spans.add(kind, begin, perf_counter_ns(), detail)
