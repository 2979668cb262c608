"""Every private name of torch that Shoal uses, and what for. No other file may use one: a test reads the code.

torch may change these in any minor release, without a warning. `pyproject.toml` therefore bounds torch to the release
that was tried, and `tests/unit/test_torch_private.py` fails by name for each one that is gone or behaves otherwise.

Names are bound when this module is imported, so a use costs what it would cost at its place. Two parts of torch take
a second or more to import, FSDP and pipelining: names of theirs are looked up when somebody imports them from here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import wraps
from importlib import import_module
from operator import attrgetter
from types import FunctionType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn, optim

# Deferred initialisation replays the factory's operations: no user's mode or subclass may come between.
from torch._C import DisableTorchFunction, FunctionSchema

# Options of collectives, which ProcessGroup's own methods take.
from torch._C import _distributed_c10d as c10d

# Public under torch.distributed, which does not declare them to type checkers.
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

# What torch.compile does with a frame.
from torch._C._dynamo import eval_frame as _frames

# The type of what a mode sees; torch.ops hands these out, and only this module names their class.
from torch._ops import OpOverload
from torch.autograd import profiler
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work
from torch.distributed import distributed_c10d as _distributed
from torch.distributed.device_mesh import DeviceMesh

# Which modules normalise with running statistics: sync_batchnorm replaces them, recomputation must not count twice.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase

# The parametrization behind torch.nn.utils.parametrizations.spectral_norm, whose buffers every forward pass moves on.
from torch.nn.utils.parametrizations import _SpectralNorm as SpectralNorm

# Tensor parallel runs a forward on other tensors than the module holds, as functional_call does for a whole call.
from torch.nn.utils.stateless import _reparametrize_module as reparametrize_module

# Hooks on the steps of all optimizers, beside those of one.
from torch.optim import optimizer as _optimizers

# Seeds by name, deferred initialisation and the trial passes of tensor and pipeline see every operation by a mode.
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# Tensors in nested batches and outputs.
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._common_utils import collect_grad_tensors
    from torch.distributed.pipelining.schedules import _Action as PipelineAction
    from torch.distributed.pipelining.schedules import _ComputationType as ComputationType
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as PipelineRuntime
    from torch.distributed.tensor import DTensor

# fmt: off
__all__ = [
    "COMPILED_CALL", "OVERRIDDEN", "UNSAFE_VIEW", "BatchNormBase", "ComputationType",
    "DisableTorchFunction", "FakeTensorMode", "FileStore", "FsdpGroup", "FsdpParameter", "NormBase", "OpOverload",
    "PipelineAction", "PipelineRuntime", "PrefixStore", "SpectralNorm", "Store", "TCPStore",
    "TorchDispatchMode", "admit", "all_gather", "backend_options", "base_of", "buffers_of", "c10d",
    "call_impl", "check_input_dim", "collect_grad_tensors", "default_store", "disable_current_modes",
    "divides_by_scale", "flatten", "foreach_clamp_max_", "foreach_clamp_min_", "foreach_lerp_",
    "foreach_mul_", "fsdp_abandon", "fsdp_groups", "fsdp_has_gathered", "fsdp_lazy_init", "fsdp_shape",
    "gradient_hooks_of", "has_hooks", "is_compiled", "is_traceable_wrapper_subclass", "late_hooks_of",
    "local_part", "make_subclass", "module_backward_hooks_of", "module_forward_hooks_of", "neg_view", "parameters_of",
    "prepare_schedule", "profiler_enabled", "profiler_event", "put_local_part", "reduce_scatter",
    "reparametrize_module", "safe_softmax", "schema_of", "step_hooks_of", "step_microbatches", "storage_address",
    "storage_from_weak", "tree_leaves", "tree_map", "untraced", "unwrap_compiled", "version_of",
    "wrap_gloo",
]
# fmt: on

_LATE = {
    # zero3: the tensors of a module's output whose gradient will arrive, where its backward pass begins.
    "collect_grad_tensors": ("torch.distributed.fsdp._common_utils", "collect_grad_tensors"),
    # Foresight: a pass on tensors that have a shape and a device, and no memory.
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    # Pipelines: our schedules in torch's terms, and the runtime that adds messages and runs them.
    "PipelineAction": ("torch.distributed.pipelining.schedules", "_Action"),
    "ComputationType": ("torch.distributed.pipelining.schedules", "_ComputationType"),
    "PipelineRuntime": ("torch.distributed.pipelining.schedules", "_PipelineScheduleRuntime"),
}


def __getattr__(name: str) -> Any:
    """The names that take long to import, for those who import them from here."""
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LATE[name]
    return getattr(import_module(module), attribute)


OVERRIDDEN = (
    "_apply",
    "_allgather_base",
    "_reduce_scatter_base",
    "_device_types",
    "_get_backend",
    "_get_sequence_number_for_group",
    "_set_default_timeout",
    "_set_sequence_number_for_group",
    "_source_rank",
)
"""Methods that classes of ours define because torch calls them by these names: `_apply` of nn.Module (SparseEmbedding
follows .to() and .double()) and of ParallelStyle (tensor parallel), `_source_rank` of Work (received from any source),
the others of ProcessGroup (shared memory)."""

# Operations

neg_view = torch._neg_view
"""Restores a view with the negative bit when a deferred tensor is made real."""
safe_softmax = torch._safe_softmax
"""The softmax inside torch's attention: zero, not NaN, for a position that sees nothing."""
foreach_mul_ = torch._foreach_mul_
"""Scales all gradients at once."""
foreach_clamp_min_ = torch._foreach_clamp_min_
"""Clips all gradients from below at once."""
foreach_clamp_max_ = torch._foreach_clamp_max_
"""Clips all gradients from above at once."""
foreach_lerp_ = torch._foreach_lerp_
"""Moves all averages of weights at once."""
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
"""A view that its schema does not declare as one; deferred initialisation must know it."""
make_subclass = torch.Tensor._make_subclass
"""A parameter on the meta device that keeps its class."""


def schema_of(operation: Any) -> FunctionSchema:
    """Name, arguments and results of an operation: which it writes, which it returns as views."""
    return cast(FunctionSchema, operation._schema)


# Tensors

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that a view was cut from; zero2 gives whole vectors back for the next bucket."""
version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Counts changes in place; recomputation keeps copies of the buffers that change only."""
local_part: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
"""What this rank holds of a DTensor, itself: `to_local` would make a view, and record it for autograd."""


def put_local_part(tensor: DTensor, part: Tensor) -> None:
    """Let a DTensor live in other memory, such as a bucket; torch has no public way."""
    tensor._local_tensor = part


def has_hooks(tensor: Tensor) -> bool:
    """Whether hooks are on a tensor: those would be lost when it moves to the meta device."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def storage_address(tensor: Tensor | UntypedStorage) -> int:
    """The identity of a storage, also on the meta device, where every data_ptr is 0."""
    storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
    return cast(int, storage._cdata)


def storage_from_weak(reference: int) -> UntypedStorage | None:
    """The storage behind a weak reference; None if it is gone."""
    return cast("UntypedStorage | None", UntypedStorage._new_with_weak_ptr(reference))


# Modules

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""A module's own parameters, to be replaced under the same name: assignment would refuse a plain tensor."""
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""A module's own buffers, likewise."""


def gradient_hooks_of(parameter: Tensor) -> list[Callable[[Tensor], Tensor | None]]:
    """What `register_hook` has registered."""
    return list((parameter._backward_hooks or {}).values())


def late_hooks_of(parameter: Tensor) -> list[Callable[[Tensor], None]]:
    """What `register_post_accumulate_grad_hook` has registered."""
    return list((getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())


def module_backward_hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """What a module's `register_full_backward_hook` and its like have registered."""
    return [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]


def module_forward_hooks_of(module: nn.Module) -> list[Callable[..., Any]]:
    """Hooks of a module that its forward pass calls."""
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


COMPILED_CALL = "_compiled_call_impl"
"""The attribute that Module.__call__ asks before any hook runs: where a pipeline intercepts a call."""
call_impl: Callable[[nn.Module], Callable[..., Any]] = attrgetter("_call_impl")
"""What Module.__call__ does otherwise: the hooks and forward."""


def check_input_dim(module: BatchNormBase, x: Tensor) -> None:
    """Refuse an input of the wrong number of axes, in torch's own words."""
    module._check_input_dim(x)  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Whether a compiler has taken a module over: it calls no hooks that it has not seen."""
    return getattr(module, COMPILED_CALL) is not None or type(module).__module__.startswith("torch._dynamo")


def unwrap_compiled(
    model: nn.Module,
) -> tuple[nn.Module, Callable[[Callable[..., Any]], Callable[..., Any]]] | None:
    """Of what `torch.compile(model)` returns: the model itself, and what compiles another function likewise."""
    if not type(model).__module__.startswith("torch._dynamo"):
        return None
    compiled: Any = model
    return compiled._orig_mod, compiled.dynamo_ctx


def step_hooks_of(optimizer: optim.Optimizer) -> list[Callable[..., Any]]:
    """The hooks of an optimizer before and after its step, and of a script on all optimizers' steps."""
    own = vars(optimizer)
    tables = [own.get("_optimizer_step_pre_hooks"), own.get("_optimizer_step_post_hooks")]
    tables += [_optimizers._global_optimizer_pre_hooks, _optimizers._global_optimizer_post_hooks]
    return [hook for table in tables if table for hook in table.values()]


def divides_by_scale(optimizer: optim.Optimizer) -> bool:
    """Whether the optimizer's kernel divides gradients by `grad_scale` as it reads them, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


# Process groups

_Class = TypeVar("_Class", bound=type)


def all_gather(group: ProcessGroup, out: Tensor, part: Tensor) -> Work:
    """Into one tensor, without the list and the checks of torch.distributed.all_gather_into_tensor."""
    return group._allgather_base(out, part, c10d.AllgatherOptions())


def reduce_scatter(group: ProcessGroup, out: Tensor, whole: Tensor) -> Work:
    """From one tensor, likewise."""
    return group._reduce_scatter_base(out, whole, c10d.ReduceScatterOptions())


def wrap_gloo(store: Store, rank: int, size: int, gloo: ProcessGroupGloo) -> ProcessGroup:
    """A group around gloo that is not in torch's list of groups: it may be made on any thread."""
    group = ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group


def backend_options(name: str) -> object:
    """What `group.options` gives for a backend of that name."""
    return c10d.Backend.Options(name)


def admit(group_type: type[ProcessGroup]) -> None:
    """Let two functions of torch take groups of that type, which they refuse, or pass over, by the name of the backend.

    `monitored_barrier` and `_set_pg_timeout` are for gloo and nccl only, by a list in their code.
    """
    barrier, set_timeout = _distributed.monitored_barrier, _distributed._set_pg_timeout

    @wraps(barrier)
    def monitored_barrier(
        group: ProcessGroup | None = None,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        found = _distributed._get_default_group() if group is None else group
        if not isinstance(found, group_type):
            barrier(group, timeout, wait_all_ranks)
            return
        limit = timedelta(seconds=timeout) if isinstance(timeout, float | int) else timeout
        found.monitored_barrier(limit, wait_all_ranks)  # type: ignore[attr-defined]

    @wraps(set_timeout)
    def _set_pg_timeout(timeout: timedelta, group: ProcessGroup | None = None) -> None:
        found = _distributed._get_default_group() if group is None else group
        if isinstance(found, group_type):
            found.set_timeout(timeout)
        else:
            set_timeout(timeout, group)

    _distributed.monitored_barrier = dist.monitored_barrier = monitored_barrier
    _distributed._set_pg_timeout = _set_pg_timeout


def untraced(group_or_work: _Class) -> _Class:
    """Keep torch.compile out of the methods of a class that C++ calls while Python is compiled, such as DDP's reducer.

    It would trace them, and those that they call, as if they were part of the model.
    """
    for member in vars(group_or_work).values():
        if isinstance(member, FunctionType):
            _frames.set_code_exec_strategy(
                member.__code__,
                _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP),
            )
    return group_or_work


def profiler_enabled() -> bool:
    """Whether a profiler is running, which wants events of communication."""
    return bool(profiler._is_profiler_enabled)


def profiler_event(name: str, tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """An event of the profiler, with the shapes of these tensors."""
    return cast("AbstractContextManager[None]", torch._C._profiler._RecordFunctionFast(name, list(tensors)))


def default_store() -> Store:
    """The store of a default group that the user's script, or torchrun, has made."""
    return _distributed._get_default_store()


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Several axes of a mesh as one, with a group of its own."""
    return mesh._flatten(name)


# FSDP2, under zero3


class FsdpParameter(Protocol):
    """FSDP2's record of one parameter, as far as zero3 reads it."""

    sharded_param: nn.Parameter
    unsharded_accumulated_grad: Tensor | None
    padded_sharded_param_size: torch.Size

    @property
    def unsharded_param(self) -> nn.Parameter: ...


class FsdpGroup(Protocol):
    """FSDP2's record of the parameters of one module, which are gathered together."""

    fsdp_params: Sequence[FsdpParameter]

    def unshard(self, async_op: bool = False) -> None: ...

    def wait_for_unshard(self) -> None: ...

    def reshard(self) -> None: ...

    def post_backward(self) -> None: ...


def fsdp_groups(module: FSDPModule) -> Sequence[FsdpGroup]:
    """Of a module that FSDP2 manages: one, or none if inner modules have all parameters."""
    return cast("Sequence[FsdpGroup]", module._get_fsdp_state()._fsdp_param_groups)


def fsdp_lazy_init(module: FSDPModule) -> None:
    """What FSDP2 does at the first forward pass: parameters move once more, and then stay where they are."""
    module._get_fsdp_state()._lazy_init()


def fsdp_shape(parameter: FsdpParameter) -> torch.Size:
    """The shape of a parameter before it was cut."""
    return cast(Any, parameter)._orig_size  # type: ignore[no-any-return]


def fsdp_has_gathered(parameter: FsdpParameter) -> bool:
    """Whether `unsharded_param` exists: it is made when the parameter is first gathered."""
    return hasattr(parameter, "_unsharded_param")


def fsdp_abandon(module: FSDPModule) -> None:
    """Make FSDP2 idle wherever a pass was cut short: by itself it only gets there by the end of a backward pass."""
    state: Any = module._get_fsdp_state()
    idle = type(state._training_state).IDLE
    state._training_state = idle
    state._modules_to_run_forward.clear()
    state._state_ctx.iter_forward_root = None
    state._state_ctx.post_backward_final_callback_queued = False
    groups: Any = fsdp_groups(module)
    for group in groups:
        group._training_state = idle
        group._all_gather_result = None
        group._partial_reduce_output = None
        group._post_forward_indices.clear()
        group.comm_ctx.all_gather_state = None
        group.comm_ctx.reduce_scatter_states.clear()
        group.comm_ctx.post_forward_order.clear()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if parameter.sharded_state == type(parameter.sharded_state).UNSHARDED:
                parameter._unsharded_param.grad = None


# Pipelines


def prepare_schedule(runtime: PipelineRuntime, actions: Mapping[int, list[PipelineAction | None]]) -> None:
    """Give the runtime a schedule of ours, which it completes with sends and receives."""
    runtime._prepare_schedule_with_comms(dict(actions))


def step_microbatches(
    runtime: PipelineRuntime,
    args: list[tuple[Tensor, ...]],
    kwargs: list[dict[str, int]],
    targets: list[Tensor],
) -> None:
    """Run the schedule on micro-batches that are cut already; the public `step` would cut them itself."""
    runtime._step_microbatches(args, kwargs, targets, [], return_outputs=False)
