"""Private names of torch: each is still there and does what we use it for, and only one file uses them.

When a new torch breaks one of these tests, its name says which function of `shoal.torch_private` to repair.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shoal import torch_private as private
from shoal.testing.spawn import spawn
from shoal.world.world import World

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
HOME = SOURCE / "torch_private.py"
FILES = sorted(file for file in SOURCE.rglob("*.py") if file != HOME)

CHECKS: dict[str, Callable[[], None]] = {}
"""What each name is used for, tried; by name."""


def check(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def keep(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return keep


@check("neg_view")
def _neg_view() -> None:
    view = private.neg_view(torch.ones(2))
    assert view.is_neg()
    assert view.tolist() == [-1, -1]


@check("safe_softmax")
def _safe_softmax() -> None:
    scores = torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]])
    assert private.safe_softmax(scores, -1).tolist() == [[0.5, 0.5], [0, 0]]


@check("foreach_mul_", "foreach_clamp_min_", "foreach_clamp_max_", "foreach_lerp_")
def _foreach() -> None:
    gradients = [torch.tensor([-2.0, 2.0]), torch.tensor([0.5])]
    private.foreach_mul_(gradients, 2.0)
    private.foreach_clamp_min_(gradients, -3.0)
    private.foreach_clamp_max_(gradients, 3.0)
    assert [g.tolist() for g in gradients] == [[-3, 3], [1]]
    private.foreach_lerp_(gradients, [torch.tensor([1.0, 3.0]), torch.tensor([3.0])], 0.5)
    assert [g.tolist() for g in gradients] == [[-1, 3], [2]]


@check("UNSAFE_VIEW", "schema_of", "OpOverload")
def _schemas() -> None:
    assert isinstance(private.UNSAFE_VIEW, private.OpOverload)
    assert private.schema_of(private.UNSAFE_VIEW).name == "aten::_unsafe_view"
    assert all(result.alias_info is None for result in private.schema_of(private.UNSAFE_VIEW).returns)
    schema = private.schema_of(torch.ops.aten.add_.Tensor)
    assert [argument.name for argument in schema.arguments if argument.is_write] == ["self"]
    assert schema.returns[0].alias_info.is_write


@check("make_subclass")
def _make_subclass() -> None:
    made = private.make_subclass(nn.Parameter, torch.ones(2, device="meta"), False)
    assert type(made) is nn.Parameter
    assert made.is_meta
    assert not made.requires_grad


@check("base_of", "version_of")
def _tensors() -> None:
    vector = torch.zeros(4)
    assert private.base_of(vector) is None
    assert private.base_of(vector[:2]) is vector
    before = private.version_of(vector)
    vector.add_(1)
    assert private.version_of(vector) == before + 1


@check("has_hooks")
def _has_hooks() -> None:
    assert not private.has_hooks(torch.zeros(1, requires_grad=True))
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        tensor = torch.zeros(1, requires_grad=True)
        getattr(tensor, register)(lambda _: None)
        assert private.has_hooks(tensor), register


@check("storage_address", "storage_from_weak")
def _storages() -> None:
    from torch.multiprocessing.reductions import StorageWeakRef

    first, second = torch.empty(2, device="meta"), torch.empty(2, device="meta")
    assert private.storage_address(first) == private.storage_address(first[1:].untyped_storage())
    assert private.storage_address(first) != private.storage_address(second)
    reference = StorageWeakRef(first.untyped_storage())
    assert reference.cdata == private.storage_address(first)
    found = private.storage_from_weak(reference.cdata)
    assert found is not None
    assert private.storage_address(found) == private.storage_address(first)
    del found, first
    assert private.storage_from_weak(reference.cdata) is None


@check("FakeTensorMode")
def _fake_tensors() -> None:
    with private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        product = torch.empty(1 << 20, 1 << 20) @ mode.from_tensor(torch.ones(1 << 10)).repeat(1 << 10)
    assert product.shape == (1 << 20,)


@check("parameters_of", "buffers_of")
def _modules() -> None:
    module = nn.BatchNorm1d(2)
    assert list(private.parameters_of(module)) == ["weight", "bias"]
    assert list(private.buffers_of(module)) == ["running_mean", "running_var", "num_batches_tracked"]
    other = nn.Parameter(torch.ones(2))
    private.parameters_of(module)["weight"] = other
    assert module.weight is other


@check("SpectralNorm")
def _spectral_norm() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 3))
    (found,) = [module for module in layer.modules() if isinstance(module, private.SpectralNorm)]
    assert sorted(name for name, _ in found.named_buffers()) == ["_u", "_v"]


@check("gradient_hooks_of", "late_hooks_of", "module_backward_hooks_of", "module_forward_hooks_of")
def _hooks() -> None:
    layer = nn.Linear(1, 1)
    assert private.gradient_hooks_of(layer.weight) == private.late_hooks_of(layer.weight) == []

    def hook(*_: object) -> None:
        pass

    layer.weight.register_hook(hook)
    layer.weight.register_post_accumulate_grad_hook(hook)
    layer.register_full_backward_hook(hook)
    layer.register_full_backward_pre_hook(hook)
    assert private.gradient_hooks_of(layer.weight) == private.late_hooks_of(layer.weight) == [hook]
    assert private.module_backward_hooks_of(layer) == [hook, hook]
    layer.register_forward_hook(hook)
    layer.register_forward_pre_hook(hook)
    assert private.module_forward_hooks_of(layer) == [hook, hook]


@check("step_hooks_of")
def _step_hooks() -> None:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    assert private.step_hooks_of(optimizer) == []

    def hook(*_: object) -> None:
        pass

    optimizer.register_step_pre_hook(hook)
    optimizer.register_step_post_hook(hook)
    everywhere = register_optimizer_step_pre_hook(hook)
    assert private.step_hooks_of(optimizer) == [hook, hook, hook]
    everywhere.remove()


@check("COMPILED_CALL", "call_impl", "is_compiled")
def _calls() -> None:
    module = nn.Linear(1, 1)
    assert not private.is_compiled(module)
    assert torch.equal(private.call_impl(module)(torch.ones(1)), module(torch.ones(1)))
    module.register_forward_pre_hook(lambda *_: pytest.fail("hooks come after what is intercepted"))
    module.__dict__[private.COMPILED_CALL] = lambda x: x + 1
    assert module(1) == 2
    assert private.is_compiled(module)
    assert private.is_compiled(torch.compile(nn.Linear(1, 1)))


@check("unwrap_compiled")
def _unwrap_compiled() -> None:
    layer = nn.Linear(1, 1)
    assert private.unwrap_compiled(layer) is None
    seen = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        seen.append(graph)
        return graph

    found = private.unwrap_compiled(torch.compile(layer, backend=backend))
    assert found is not None
    assert found[0] is layer
    assert found[1](lambda x: x + 1)(torch.ones(1)) == 2
    assert len(seen) == 1, "the same backend compiles another function"


@check("divides_by_scale")
def _divides_by_scale() -> None:
    weight = nn.Parameter(torch.tensor([1.0]))
    assert not private.divides_by_scale(torch.optim.SGD([weight], lr=1.0))
    fused: Any = torch.optim.SGD([weight], lr=1.0, fused=True)
    assert private.divides_by_scale(fused)
    weight.grad = torch.tensor([4.0])
    fused.grad_scale, fused.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    fused.step()
    assert weight.item() == 0.5


@check("DisableTorchFunction", "disable_current_modes", "TorchDispatchMode")
def _modes() -> None:
    seen: list[str] = []

    class Watch(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            del types
            seen.append(private.schema_of(func).name)
            return func(*args, **(kwargs or {}))

    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            return "the subclass"

    own: Any = torch.ones(1).as_subclass(Own)
    with Watch():
        torch.ones(1) + 1
        with private.disable_current_modes():
            torch.ones(1) * 2
    assert seen == ["aten::ones", "aten::add"]
    assert own + 1 == "the subclass"
    with private.DisableTorchFunction():
        assert isinstance(own + 1, torch.Tensor)


@check("is_traceable_wrapper_subclass")
def _wrapper_subclass() -> None:
    assert not private.is_traceable_wrapper_subclass(nn.Parameter(torch.ones(1)))


@check("tree_leaves", "tree_map")
def _trees() -> None:
    tree = {"a": (1, [2]), "b": 3}
    assert private.tree_leaves(tree) == [1, 2, 3]
    assert private.tree_map(lambda x: 2 * x, tree) == {"a": (2, [4]), "b": 6}


@check("BatchNormBase", "NormBase")
def _norms() -> None:
    assert issubclass(nn.BatchNorm2d, private.BatchNormBase)
    assert issubclass(nn.SyncBatchNorm, private.BatchNormBase)
    assert issubclass(nn.InstanceNorm1d, private.NormBase)
    assert not issubclass(nn.LayerNorm, private.NormBase)


@check("check_input_dim")
def _check_input_dim() -> None:
    private.check_input_dim(nn.BatchNorm1d(2), torch.ones(3, 2))
    with pytest.raises(ValueError, match="expected 2D or 3D input"):
        private.check_input_dim(nn.BatchNorm1d(2), torch.ones(2))


@check("reparametrize_module")
def _reparametrize_module() -> None:
    module = nn.Linear(1, 1, bias=False)
    before = module.weight
    with private.reparametrize_module(module, {"weight": torch.full((1, 1), 3.0)}):
        assert module.forward(torch.ones(1)).item() == 3
    assert module.weight is before


@check("Store", "PrefixStore", "FileStore", "TCPStore")
def _stores() -> None:
    for name in ("Store", "PrefixStore", "FileStore", "TCPStore"):
        assert getattr(private, name) is getattr(dist, name), name


@check("wrap_gloo", "all_gather", "reduce_scatter", "c10d")
def _groups() -> None:
    store = dist.HashStore()
    gloo = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=20))
    group = private.wrap_gloo(store, 0, 1, gloo)
    out = torch.zeros(2)
    private.all_gather(group, out, torch.ones(2)).wait()
    assert out.tolist() == [1, 1]
    private.reduce_scatter(group, out, torch.full((2,), 3.0)).wait()
    assert out.tolist() == [3, 3]
    group.allreduce([out], private.c10d.AllreduceOptions()).wait()
    for name in ("AllgatherOptions", "ReduceScatterOptions", "AllToAllOptions", "BroadcastOptions"):
        assert hasattr(private.c10d, name), name


@check("admit", "backend_options")
def _admit() -> None:
    assert private.backend_options("shoal").backend == "shoal"

    class Group(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 1)
            self.said: list[object] = []

        def monitored_barrier(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
            self.said.append((timeout, wait_all_ranks))

        def set_timeout(self, timeout: timedelta) -> None:
            self.said.append(timeout)

    before = dist.monitored_barrier, dist.distributed_c10d._set_pg_timeout
    try:
        private.admit(Group)
        group = Group()
        dist.monitored_barrier(group, 0.5, wait_all_ranks=True)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), group)
    finally:
        dist.monitored_barrier, dist.distributed_c10d._set_pg_timeout = before
        dist.distributed_c10d.monitored_barrier = before[0]
    assert group.said == [(timedelta(seconds=0.5), True), timedelta(seconds=3)]


@check("profiler_enabled", "profiler_event")
def _profiler() -> None:
    assert not private.profiler_enabled()
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        assert private.profiler_enabled()
        with private.profiler_event("blocking", [torch.zeros(2, 3)]):
            pass
    events = {event.name: event for event in profile.function_events}
    assert events["blocking"].input_shapes == [[2, 3]]


@check("untraced")
def _untraced() -> None:
    @private.untraced
    class Work:
        def wait(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    seen: list[object] = []
    compiled = torch.compile(Work().wait, backend=lambda graph, _: seen.append(graph) or graph)
    assert compiled(torch.ones(2)).tolist() == [2, 2]
    assert not seen


@check("OVERRIDDEN")
def _overridden() -> None:
    """torch calls these methods of our classes by their private names."""
    assert "self._apply(" in inspect.getsource(nn.Module.to)
    assert hasattr(ParallelStyle, "_apply")
    assert hasattr(dist.Work, "_source_rank")
    assert "_set_default_timeout" in inspect.getsource(dist.distributed_c10d)
    for name in set(private.OVERRIDDEN) - {"_apply", "_source_rank", "_set_default_timeout"}:
        assert hasattr(dist.ProcessGroup, name), name
    assert hasattr(dist.ProcessGroup, "_reduce_scatter_base")


@check("PipelineAction", "ComputationType")
def _actions() -> None:
    kinds = private.ComputationType
    named = (kinds.FORWARD, kinds.FULL_BACKWARD, kinds.BACKWARD_INPUT, kinds.BACKWARD_WEIGHT)
    assert [repr(private.PipelineAction(0, kind, 3)) for kind in named] == ["0F3", "0B3", "0I3", "0W3"]
    assert hasattr(kinds, "REDUCE_GRAD")


@check("collect_grad_tensors")
def _collect_grad_tensors() -> None:
    learns = torch.ones(1, requires_grad=True)
    assert list(private.collect_grad_tensors({"a": [learns, torch.ones(1)]})) == [learns]


def in_one_process(world: World) -> None:
    """What needs a default group, in a process of its own."""
    del world
    assert isinstance(private.default_store(), dist.Store)
    _check_mesh_and_dtensor()
    _check_fsdp()
    _check_runtime()


def _check_mesh_and_dtensor() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    assert private.flatten(mesh["a", "b"], "both").get_group().size() == 2
    cut = distribute_tensor(torch.zeros(2), mesh["b"], [Replicate()])
    assert isinstance(cut, DTensor)
    other = torch.ones(2)
    private.put_local_part(cut, other)
    assert private.local_part(cut) is other


def _check_fsdp() -> None:
    module: Any = fully_shard(nn.Linear(3, 4, bias=False), mesh=init_device_mesh("cpu", (2,)))
    private.fsdp_lazy_init(module)
    (group,) = private.fsdp_groups(module)
    (parameter,) = group.fsdp_params
    assert private.fsdp_shape(parameter) == (4, 3)
    assert parameter.padded_sharded_param_size == (2, 3)
    assert private.local_part(parameter.sharded_param).shape == (2, 3)  # type: ignore[arg-type]
    assert parameter.unsharded_accumulated_grad is None
    assert not private.fsdp_has_gathered(parameter)
    group.unshard(async_op=True)
    group.wait_for_unshard()
    assert private.fsdp_has_gathered(parameter)
    assert parameter.unsharded_param.shape == (4, 3)
    group.reshard()
    assert callable(group.post_backward)
    module(torch.ones(1, 3)).sum().backward()
    loss = module(torch.ones(1, 3)).sum()  # and no backward pass: a worker was lost
    private.fsdp_abandon(module)
    group.reshard()
    del loss
    module.zero_grad()
    module(torch.ones(1, 3)).sum().backward()
    assert module.weight.grad.to_local().eq(1).all()  # as if nothing had been cut short; both ranks' mean


def _check_runtime() -> None:
    rank = dist.get_rank()
    stage = PipelineStage(nn.Linear(1, 1), rank, 2, torch.device("cpu"), input_args=(torch.ones(1, 1),),
                          output_args=torch.ones(1, 1))  # fmt: skip
    runtime = private.PipelineRuntime([stage], 1, loss_fn=lambda out, _: out.sum(), scale_grads=False)
    kinds = private.ComputationType
    orders: dict[int, list[Any]] = {
        at: [private.PipelineAction(at, kind, 0) for kind in (kinds.FORWARD, kinds.FULL_BACKWARD)]
        for at in range(2)
    }
    private.prepare_schedule(runtime, orders)
    stage.has_backward = True
    stage.clear_runtime_states()
    given: Any = [(torch.ones(1, 1),)] if rank == 0 else [()]
    private.step_microbatches(runtime, given, [{}], [torch.zeros(1)])
    assert stage.submod.weight.grad is not None


IN_PROCESSES = {
    "default_store",
    "flatten",
    "local_part",
    "put_local_part",
    "fsdp_abandon",
    "fsdp_groups",
    "fsdp_has_gathered",
    "fsdp_lazy_init",
    "fsdp_shape",
    "FsdpGroup",
    "FsdpParameter",
    "PipelineRuntime",
    "prepare_schedule",
    "step_microbatches",
}
"""Names that are tried by `in_one_process`."""


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_torch_still_does_this(name: str) -> None:
    assert getattr(private, name) is not None
    CHECKS[name]()


def test_torch_still_does_this_between_processes() -> None:
    spawn(in_one_process, 2)


def test_every_name_is_tried() -> None:
    assert set(CHECKS) | IN_PROCESSES == set(private.__all__)
    assert not set(CHECKS) & IN_PROCESSES


def test_importing_it_loads_neither_fsdp_nor_pipelining() -> None:
    import subprocess

    heavy = "[m for m in ('torch.distributed.fsdp', 'torch.distributed.pipelining') if m in sys.modules]"
    code = f"import sys, shoal.torch_private; assert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", code], check=True)


# Only one file


OURS_OR_PYTHONS = {
    "dataclasses",
    "os",
    "sys",
    "atexit",
    "threading",
    "weakref.finalize",
    "multiprocessing.util",
    "forkserver",
    "forkserver._forkserver",
}
"""Modules of Python whose private names are used, and not for torch."""

OTHERS = {"_replace", "_fields"}
"""Public names that begin with an underscore: those of named tuples."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names() -> set[str]:
    """Private attributes and methods that files of src define themselves."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if is_private(name)}


def torchs_names() -> set[str]:
    """Private attributes of torch's objects that the one file uses; nobody else may, under any receiver."""
    tree = ast.parse(HOME.read_text())
    found = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {
        name for name in found | strings if isinstance(name, str) and name.isidentifier() and is_private(name)
    }


def private_uses(tree: ast.Module, ours: set[str], torchs: set[str]) -> Iterator[tuple[int, str]]:
    """Line and text of every use of a private name that is not the package's own or Python's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
        for name in names:
            if name.split(".")[0] == "torch" and any(map(is_private, name.split("."))):
                yield node.lineno, name
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            receiver = ast.unparse(node.value)
            if receiver in OURS_OR_PYTHONS or node.attr in OTHERS:
                continue
            overrides = receiver == "super()" and node.attr in private.OVERRIDDEN
            own = node.attr in ours and (receiver in ("self", "cls", "super()") or node.attr not in torchs)
            if not own and not overrides:
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "setattr",
            "hasattr",
            "attrgetter",
        ):
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            for word in words:
                if isinstance(word, str) and is_private(word) and word not in OTHERS | ours:
                    yield node.lineno, ast.unparse(node)


OURS, TORCHS = own_names(), torchs_names()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_private_names_of_torch_are_in_one_file(file: Path) -> None:
    found = list(private_uses(ast.parse(file.read_text()), OURS, TORCHS))
    assert not found, (
        f"{file.name} uses {found}: put it into shoal.torch_private, with a line that says what for"
    )


@pytest.mark.parametrize(
    "line",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _NormBase",
        "import torch._C",
        "x = torch._neg_view(y)",
        "x = module._parameters",
        "x = here._buffers",
        "x = tensor.untyped_storage()._cdata",
        "x = something._never_seen_before",
        "x = getattr(optimizer, '_step_supports_amp_scaling', False)",
    ],
)
def test_a_use_elsewhere_is_found(line: str) -> None:
    assert list(private_uses(ast.parse(line), OURS, TORCHS))


@pytest.mark.parametrize(
    "line", ["os._exit(0)", "self._buffers()", "row._replace(a=1)", "super()._apply(fn)"]
)
def test_what_is_not_torchs_is_left_alone(line: str) -> None:
    assert not list(private_uses(ast.parse(line), OURS, TORCHS))
