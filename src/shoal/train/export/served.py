"""A model as it may be served: in torch's whole numbers, or in ONNX Runtime. Extra `export` for the latter."""

from __future__ import annotations

import copy
import logging
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.call import Call, call_model
from shoal.errors import ConfigError
from shoal.torch_private import tree_leaves, tree_map

_TIMES = 15
NEEDS = "shoal export --onnx needs onnx, onnxscript and onnxruntime; install them with pip install 'shoal[export]'."


def in_whole_numbers(model: nn.Module) -> nn.Module:
    """A copy whose Linear layers hold 8-bit weights and round their inputs as they come."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch calls this way deprecated; torchao's is slower than floats on a CPU
        from torch.ao import quantization

        kinds = {nn.Linear: quantization.per_channel_dynamic_qconfig}
        float_model = copy.deepcopy(model).float()
        made: nn.Module = quantization.quantize_dynamic(float_model, kinds, dtype=torch.qint8)  # type: ignore[no-untyped-call]
    if not any("quantized" in type(module).__module__ for module in made.modules()):
        raise ConfigError(
            f"shoal export: {type(model).__name__} has no Linear layer for --quantise int8; leave it out."
        )
    return made


def write_onnx(model: nn.Module, inputs: object, target: Path) -> None:
    """The model as an ONNX file that takes any number of samples."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ConfigError(NEEDS) from error
    args, kwargs = (inputs.args, inputs.kwargs) if isinstance(inputs, Call) else ((inputs,), {})
    if args and kwargs:
        raise ConfigError(
            "shoal export --onnx: the model is called with arguments by place and by name; let inputs= give one kind."
        )
    free: Any = tree_map(_any_number, kwargs or args)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _quietly():
        program = torch.onnx.export(
            model, args, kwargs=kwargs, dynamo=True, dynamic_shapes=free, verbose=False
        )
        assert program is not None
        program.save(str(target), external_data=False)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what exporters say of their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _any_number(value: object) -> object:
    return {0: torch.export.Dim.DYNAMIC} if isinstance(value, torch.Tensor) and value.dim() else None


def write_onnx_int8(source: Path, target: Path) -> None:
    """The same in whole numbers, by ONNX Runtime."""
    try:
        import onnx
        from onnxruntime import quantization
    except ImportError as error:
        raise ConfigError(NEEDS) from error
    model = onnx.load(str(source))
    del model.graph.value_info[:]  # shapes that no longer hold stop the quantiser
    with _quietly():
        quantization.quantize_dynamic(
            model, str(target), per_channel=True, weight_type=quantization.QuantType.QInt8
        )


class InRuntime(nn.Module):
    """An ONNX file in ONNX Runtime, called as the model that it was made of."""

    def __init__(self, file: Path, threads: int) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError(NEEDS) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self._names = [one.name for one in self._session.get_inputs()]

    def __call__(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        """The first output."""
        given = kwargs or dict(zip(self._names, args, strict=True))
        feeds = {name: np.ascontiguousarray(given[name].detach().cpu().numpy()) for name in self._names}
        found = self._session.run(None, feeds)
        return torch.from_numpy(found[0])


def output_of(model: nn.Module, inputs: object) -> torch.Tensor:
    """The first tensor that a model returns."""
    with torch.no_grad():
        found = call_model(model, inputs)
    found = getattr(found, "logits", found)
    if isinstance(found, dict):
        found = found.get("logits", next(iter(found.values())))
    while isinstance(found, tuple | list):
        found = found[0]
    assert isinstance(found, torch.Tensor)
    return found


def milliseconds(model: nn.Module, inputs: object) -> float:
    """Of one pass over these inputs: the median of several."""
    took = []
    with torch.no_grad():
        call_model(model, inputs)
        for _ in range(_TIMES):
            began = time.perf_counter()
            call_model(model, inputs)
            took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


def nbytes(model: nn.Module) -> int:
    """What its weights take; of a channel in whole numbers also its scale and its zero."""
    tensors = [leaf for leaf in tree_leaves(dict(model.state_dict())) if isinstance(leaf, torch.Tensor)]
    scales = [leaf.q_per_channel_scales().numel() * 12 for leaf in tensors if leaf.is_quantized]
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors) + sum(scales)
