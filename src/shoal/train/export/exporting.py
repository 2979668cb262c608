"""An export at work: the script runs as it is, trains nothing, and its first evaluation measures every form."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shoal.data.batch import convert
from shoal.data.loader import Loader
from shoal.errors import ConfigError
from shoal.train.export.request import ExportRequest, plain_model
from shoal.train.export.served import (
    InRuntime,
    in_whole_numbers,
    milliseconds,
    nbytes,
    output_of,
    write_onnx,
    write_onnx_int8,
)
from shoal.train.step_context import StepContext
from shoal.types import Evaluation

_SIGNIFICANT = 1e-3
"""ONNX Runtime's outputs may differ by so much of the largest; more is said."""


@dataclass(frozen=True)
class ServedForm:
    """One form of the model."""

    name: str
    model: nn.Module
    bytes: int
    file: str = ""


class Exporting:
    """Made by a Run that was asked to export."""

    def __init__(
        self,
        request: ExportRequest,
        context: StepContext,
        make: Callable[[], nn.Module],
        state: Callable[[str], dict[str, torch.Tensor]],
        step: int,
    ) -> None:
        """`state`: the whole state dict by `weights=`; `step`: how far the run is."""
        if step == 0:
            raise ConfigError(
                "shoal export: there is no checkpoint to export; train first with checkpoint= and "
                "checkpoint_every=, or give --checkpoint."
            )
        if not isinstance(context.loader, Loader):
            raise ConfigError("shoal export: data= is a stream; give data with len() and [i] for an export.")
        self._request = request
        self._context = context
        self._step = step
        self._make = make
        self._state = state

    @staticmethod
    def of(
        text: str,
        context: StepContext,
        make: Callable[[], nn.Module] | None,
        state: Callable[[str], dict[str, torch.Tensor]],
        step: int,
    ) -> Exporting | None:
        """What the launcher asks for; None where it wants to train."""
        request = ExportRequest.of(text)
        if request is None or make is None:
            return None
        made = Exporting(request, context, make, state, step)
        atexit.register(made.without_evaluation)
        return made

    def measure(self, evaluate: Callable[[], Evaluation]) -> Evaluation:
        """The script's own evaluation, of every form; then the script ends here."""
        forms, inputs = self._forms()
        wanted = output_of(forms[0].model, inputs)
        rows = []
        for form in forms:
            found = self._evaluated(form.model, evaluate)
            took, gap = milliseconds(form.model, inputs), _gap(form.model, inputs, wanted)
            rows.append(self._row(form, found, took, gap))
        print(f"step {self._step}, {len(wanted)} samples a pass")
        print(_table(rows))
        self._end()
        raise AssertionError("the process has ended")

    def without_evaluation(self) -> None:
        """The script has come to its end, and nothing was evaluated."""
        forms, inputs = self._forms()
        wanted = output_of(forms[0].model, inputs)
        rows = []
        for form in forms:
            took, gap = milliseconds(form.model, inputs), _gap(form.model, inputs, wanted)
            rows.append(self._row(form, None, took, gap))
        said = "the script called no run.evaluate behind its loop, so nothing is said of accuracy"
        print(f"shoal: {said}.", file=sys.stderr)
        print(_table(rows))

    def _forms(self) -> tuple[list[ServedForm], object]:
        request, context = self._request, self._context
        portion = context.loader.take(self._step)
        batch = convert(portion.batches[0], torch.device("cpu"), torch.float32)
        inputs = context.inputs(batch)
        model = plain_model(self._make, self._state(request.weights), torch.float32)
        threads = torch.get_num_threads()
        forms = [ServedForm("float", model, nbytes(model))]
        if request.quantise:
            small = in_whole_numbers(model)
            forms.append(ServedForm("int8", small, nbytes(small)))
        if request.onnx:
            file = Path(request.onnx)
            write_onnx(model, inputs, file)
            forms.append(ServedForm("ONNX", InRuntime(file, threads), file.stat().st_size, str(file)))
            if request.quantise:
                small_file = request.int8_onnx
                write_onnx_int8(file, small_file)
                runtime = InRuntime(small_file, threads)
                forms.append(ServedForm("ONNX int8", runtime, small_file.stat().st_size, str(small_file)))
        return forms, inputs

    def _evaluated(self, model: nn.Module, evaluate: Callable[[], Evaluation]) -> Evaluation:
        trained = self._context.model
        self._context.model = model
        try:
            return evaluate()
        finally:
            self._context.model = trained

    def _row(self, form: ServedForm, found: Evaluation | None, took: float, gap: float) -> list[str]:
        numbers = {} if found is None else {"loss": found.loss, **found.metrics}
        said = [f"{name} {value:.4f}" for name, value in numbers.items()]
        if form.name == "ONNX" and gap > _SIGNIFICANT:
            print(
                f"shoal: ONNX Runtime's outputs differ from torch's by {gap:.1e} of the largest.",
                file=sys.stderr,
            )
        return [form.name, *said, f"{form.bytes / 1e6:.2f} MB", f"{took:.2f} ms", f"±{gap:.1e}", form.file]

    def _end(self) -> None:
        sys.stdout.flush()
        self._context.exchange.close()
        os._exit(0)  # what the script does after its evaluation is not asked for


def _gap(model: nn.Module, inputs: object, wanted: torch.Tensor) -> float:
    """How far outputs are from those wanted, of the largest."""
    found = output_of(model, inputs)
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)
