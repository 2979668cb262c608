"""`compile=True`: torch.compile, block by block.

What is compiled is a block's forward and not the call of the module, so that everything that hangs on the call stays
outside of the compiled graph: FSDP2's gathers, and the random stream that a block's dropout draws from. Blocks that are
alike share their code, so one of them is compiled for all. The first step of a run is computed as written: it shows in
which order parameters are used, by hooks that are gone in the second.

Paper: Ansel et al., "PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation", ASPLOS 2024.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Sequence

import torch
from torch import nn

from shoal.embedding import SparseEmbedding
from shoal.errors import ConfigError
from shoal.torch_private import COMPILED_CALL, BatchNormBase, is_compiled, unwrap_compiled, version_of

Compiler = Callable[[Callable[..., object]], Callable[..., object]]
INDUCTOR = "inductor"


def compiler_for(wanted: bool | str) -> Compiler | None:
    """What `compile=` asks for: True is torch's own backend, a text names another one."""
    if wanted is False:
        return None
    backend = INDUCTOR if wanted is True else wanted
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ConfigError(f"compile='{backend}': torch has no such backend; it is one of {', '.join(known)}.")
    if backend != INDUCTOR:
        return lambda function: torch.compile(function, backend=backend)
    compiler = os.environ.get("CXX", "g++")
    if not torch.cuda.is_available() and shutil.which(compiler) is None:
        raise ConfigError(
            f"compile=True needs a C++ compiler, and there is no '{compiler}'; install one, or leave compile out."
        )
    # Its own random numbers are not those of the plain model.
    return lambda function: torch.compile(function, backend=backend, options={"fallback_random": True})


def uncompiled(model: nn.Module) -> tuple[nn.Module, Compiler | None]:
    """A model that the user has compiled, as it was before, and how it was compiled; other models as they are.

    A graph of the whole model would hold the hooks of every module, and its parameters have other names.
    """
    found = unwrap_compiled(model)
    plain, compiler = (model, None) if found is None else found
    for name, module in plain.named_modules():
        if is_compiled(module):
            how = "compile()" if getattr(module, COMPILED_CALL) is not None else "torch.compile"
            raise ConfigError(
                f"layer '{name or type(module).__name__}' was compiled with {how}, and hooks of a run are not seen in "
                "there; give the model as it was, and compile=True."
            )
    return plain, compiler


def compile_blocks(
    model: nn.Module, names: Sequence[str], compiler: Compiler, begun: Callable[[], bool]
) -> None:
    """Let the named blocks, or the model if it has none, be compiled when `begun`. In place; names do not change."""
    for name in names or [""]:
        block = model.get_submodule(name)
        if not any(isinstance(module, SparseEmbedding) for module in block.modules()):
            block.forward = CompiledForward(block, compiler, begun)


class CompiledForward:
    """The forward of a block: as written in the first step, compiled in all others.

    A block that changes a buffer stays as it is written: where autograd needs the old value, a compiled graph has been
    seen to take the new one. The statistics of batch normalisation are not needed there.
    """

    is_compiled = True

    def __init__(self, block: nn.Module, compiler: Compiler, begun: Callable[[], bool]) -> None:
        self._block = block
        self._forward = block.forward
        self._compiler = compiler
        self._begun = begun
        self._changes: bool | None = None
        """Whether a call changes a buffer; None before a call in training has shown it."""
        self._compiled: Callable[..., object] | None = None

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self._compiled is not None:
            return self._compiled(*args, **kwargs)
        if self._changes is None and self._block.training:
            before = self._buffers()
            output = self._forward(*args, **kwargs)
            self._changes = before != self._buffers()
            return output
        if self._changes is False and self._begun():
            self._compiled = self._compiler(self._forward)
            return self._compiled(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def _buffers(self) -> list[tuple[int, int]]:
        """Which tensors they are, and how often each has been changed."""
        return [
            (id(buffer), version_of(buffer))
            for module in self._block.modules()
            if not isinstance(module, BatchNormBase)
            for buffer in module.buffers(recurse=False)
        ]

    def __deepcopy__(self, memo: dict[int, object]) -> CompiledForward:
        """Of a copy of the model: its own module, compiled anew."""
        new = copy.copy(self)
        new._block = copy.deepcopy(self._block, memo)
        new._forward = copy.deepcopy(self._forward, memo)
        new._compiled = None
        return new
