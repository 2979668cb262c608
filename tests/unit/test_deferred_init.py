"""Models built without memory: every value equals, bit for bit, that of a whole build."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from shoal.deferred_init import CannotDefer, build_deferred
from shoal.deferred_init.log import DeferredOperation, Log, TensorView
from shoal.seeds import build_by_name, set_stream
from shoal.testing import toys

EXAMPLES = Path(__file__).parents[2] / "examples"


def tensors(model: nn.Module) -> dict[str, Tensor]:
    named = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return dict(named)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def check(make: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    """Each tensor of the lazy model has the shape, flags and value of that of the whole one; the lazy model."""
    whole = tensors(build_by_name(make, seed))
    before = torch.get_rng_state()
    deferred = build_deferred(make, seed)
    lazy = tensors(deferred.model)
    assert list(whole) == list(lazy)
    for name in reversed(whole):  # another order than that of creation
        expected, meta, value = whole[name], lazy[name], deferred.value(name)
        assert meta.is_meta
        assert (meta.dtype, meta.size(), meta.stride()) == (
            expected.dtype,
            expected.size(),
            expected.stride(),
        )
        assert (value.dtype, value.size()) == (expected.dtype, expected.size())
        assert (type(meta), meta.requires_grad) == (type(expected), expected.requires_grad)
        assert not value.requires_grad
        assert bits(value) == bits(expected), name
    assert [[a is b for b in whole.values()] for a in whole.values()] == [
        [a is b for b in lazy.values()] for a in lazy.values()
    ]
    assert torch.equal(torch.get_rng_state(), before)
    return deferred.model


class Everything(nn.Module):
    """Layers whose initial values come about in ways of their own; some large enough to wait."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width, padding_idx=0)
        self.linear = nn.Linear(width, width)
        self.attention = nn.MultiheadAttention(width, 2)
        self.recurrent = nn.LSTM(width, 4)
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm1d(width)
        self.product = nn.Parameter(torch.randn(3, width) * 0.02)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(300, 30)))
        self.narrow = nn.Parameter(nn.init.trunc_normal_(torch.empty(30, 30), a=0.5, b=0.6))
        self.orthogonal = nn.Linear(width, 2 * width)
        nn.init.orthogonal_(self.orthogonal.weight)
        nn.init.orthogonal_(self.linear.weight)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(9, 9), 0.5))
        self.half = nn.Linear(width, width).to(torch.bfloat16)
        self.double = nn.Linear(width, 5, dtype=torch.float64).requires_grad_(False)
        self.average = copy.deepcopy(self.linear)
        self.target = nn.Linear(width, width)
        self.target.load_state_dict(self.linear.state_dict())
        self.register_buffer("noise", torch.randn(4))
        self.register_buffer("mask", torch.tril(torch.ones(300, 300)), persistent=False)
        self.register_buffer("copied", copy.deepcopy(self.mask))
        self.register_buffer("numpy", torch.from_numpy(np.arange(50_000, dtype=np.float32)))
        self.register_buffer("numbers", torch.tensor([1.5, 2.5]))
        self.register_buffer("nothing", None)
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("width", [8, 200])
def test_every_kind_of_layer(width: int) -> None:
    model = check(lambda: Everything(width))
    assert isinstance(model, Everything)
    assert model.head.weight is model.embed.weight
    assert model.recurrent._flat_weights[0] is model.recurrent.weight_ih_l0


@pytest.mark.parametrize("name", list(toys.TABLE))
def test_toys(name: str) -> None:
    check(toys.TABLE[name].model)


def test_the_model_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = importlib.import_module("text")
    check(text.GPT)


def test_layers_copied_from_one_prototype() -> None:
    check(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(96, 2, 192, batch_first=True), 3))
    check(lambda: nn.Transformer(16, 2, 1, 1, 32))


def test_an_init_loop_over_all_parameters() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(300, 100), nn.Linear(100, 300, bias=False))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        with torch.no_grad():
            model[0].weight[3].zero_()
            model[0].weight[4:6].uniform_(5, 6)
            model[1].weight[7].copy_(torch.arange(100.0))
            model[1].weight.mul_(0.5).add_(model[0].weight.T)
        return model

    check(make)


@pytest.mark.parametrize(
    "wrap",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        parametrizations.orthogonal,
        pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore:.*weight_norm")),
        nn.utils.spectral_norm,
        lambda layer: prune.random_unstructured(layer, "weight", amount=0.3),
    ],
)
def test_wrapped_layers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    check(lambda: nn.Sequential(nn.Linear(8, 8), wrap(nn.Linear(150, 150))))


def hugging_face(name: str, sizes: dict[str, int]) -> Callable[[], nn.Module]:
    transformers = importlib.import_module("transformers")
    config = getattr(transformers, f"{name}Config")(**sizes)
    kind = {"GPT2": "LMHeadModel", "Bert": "ForMaskedLM", "ViT": "Model"}.get(name, "ForCausalLM")
    return lambda: getattr(transformers, f"{name}{kind}")(config)


LLAMA = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4}


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("GPT2", {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 2}),
        ("Llama", LLAMA | HEADS | {"num_key_value_heads": 2, "pad_token_id": 5}),
        ("Llama", LLAMA | HEADS | {"tie_word_embeddings": True}),
        ("Bert", LLAMA | HEADS),
        ("ViT", {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96} | HEADS),
    ],
)
def test_hugging_face_models(name: str, sizes: dict[str, int]) -> None:
    check(hugging_face(name, sizes))


def test_a_builder_that_looks_at_what_it_draws() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(200, 200), nn.Linear(2, 2))
        while model[1].weight.sum() < 0.5:
            model[1].reset_parameters()
        with torch.no_grad():
            model[0].bias.fill_(model[0].weight.std().item())
            model[1].bias.copy_(torch.tensor(model[0].weight[0, :2].tolist()))
            model[0].weight[model[0].weight > 0.06] = 0
            positive = model[0].weight[model[0].weight > 0]
            model[0].weight[0] = positive[:200]
        return model

    check(make)


def test_what_changes_later_does_not_change_what_was_read_before() -> None:
    def make() -> nn.Module:
        model = nn.Linear(200, 200)
        weight, scale = model.weight.detach(), torch.ones(200)
        weight.mul_(scale)
        scale.fill_(3)
        shifted = weight + 1
        weight.mul_(scale)
        sums = [shifted.sum().item(), weight.sum().item(), (shifted - weight).sum().item()]
        model.register_buffer("sums", torch.tensor(sums))
        return model

    check(make)


def test_all_of_a_draw_moves_its_generator() -> None:
    """One call of an init function is one draw, even if it fills two tensors and only the second is wanted."""
    log = Log(lambda draw: set_stream(0, draw))
    numbers = [log.storage(40), log.storage(40)]
    for number in numbers:
        view, storage = TensorView(number, torch.float32, torch.Size([10]), (1,)), frozenset([number])
        log.add(
            DeferredOperation(Tensor.normal_, (view,), {}, (None,), frozenset(), storage, storage, draw=7)
        )
    set_stream(0, 7)
    expected = [torch.randn(10), torch.randn(10)]
    for number, values in zip(numbers, expected, strict=True):
        assert log.content([number])[number].tolist() == values.untyped_storage().tolist()
        assert log.peek([number], lambda _: True)[number].tolist() == values.untyped_storage().tolist()


def test_a_builder_that_tries_its_model_out() -> None:
    def make() -> nn.Module:
        body = nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Dropout(0.5), nn.Flatten()
        )
        body(torch.rand(2, 3, 9, 9)).sum()
        width = body.eval()(torch.zeros(1, 3, 9, 9)).shape[1]
        return nn.Sequential(body, nn.Linear(width, 100))

    check(make)


def test_numpy_reads_and_writes_reach_the_values() -> None:
    def make() -> nn.Module:
        model = nn.Linear(200, 200)
        array = model.weight.detach().numpy()
        array[3] = 7
        with torch.no_grad():
            model.weight.mul_(2)
        array[4] = np.asarray(model.weight.detach()[5])
        model.register_buffer("total", torch.from_numpy(array.sum(0)) * model.weight.detach()[0])
        array[5] = 1
        return model

    check(make)


def test_a_generator_of_the_builders_own_moves_on() -> None:
    def make() -> nn.Module:
        own = torch.Generator().manual_seed(5)
        model = nn.Linear(200, 200)
        nn.init.normal_(model.weight, generator=own)
        nn.init.trunc_normal_(model.bias, generator=own)
        model.register_buffer("more", torch.randn(200, 200, generator=own))
        model.register_buffer("order", torch.randperm(40_000, generator=own))
        return model

    check(make)


def test_other_default_dtypes_and_devices() -> None:
    def make() -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            model = nn.Linear(200, 200)
            model.register_buffer("ratio", torch.arange(40_000) / 3)
        finally:
            torch.set_default_dtype(before)
        return model

    check(make)
    with torch.device("meta"):
        assert build_deferred(lambda: nn.Linear(3, 3), 0).model.weight.is_meta
    deferred = build_deferred(make, 3)
    with torch.device("meta"):
        assert deferred.value("ratio").device.type == "cpu"


def test_two_parameters_on_one_storage_still_share_it() -> None:
    def make() -> nn.Module:
        model = nn.Module()
        flat = torch.randn(40_000)
        model.one, model.other = (nn.Parameter(half.view(100, 200)) for half in flat.chunk(2))
        model.third = nn.Parameter(torch.empty(0))
        model.third.data = model.one.data.T
        return model

    model = check(make)
    assert model.third.untyped_storage()._cdata == model.one.untyped_storage()._cdata


def test_tensors_outside_parameters_and_buffers_are_real() -> None:
    kept = []

    def make() -> nn.Module:
        model = nn.Linear(200, 200)
        model.scale = model.weight.detach() * 2
        model.constant = torch.ones(200, 200)
        model.weight.note = "mine"
        kept.append(torch.randn(200, 200))
        return model

    whole, model = build_by_name(make, 0), build_deferred(make, 0).model
    assert torch.equal(model.scale, whole.scale)
    assert model.constant.min() == 1
    assert model.weight.note == "mine"
    assert torch.equal(kept[-1], kept[1])


def test_values_are_new_each_time() -> None:
    deferred = build_deferred(lambda: Everything(8), 0)
    for name in ("linear.weight", "numbers", "numpy"):
        first = deferred.value(name).clone()
        deferred.value(name).zero_()
        assert torch.equal(deferred.value(name), first)
    with pytest.raises(KeyError, match=r"linear\.weigth"):
        deferred.value("linear.weigth")


def with_hook() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad * 2)
    return model


def broken() -> nn.Module:
    nn.Linear(3, 3)
    raise ValueError("broken")


def resized() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.data.resize_(3, 3)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.LazyLinear(3), "weight has no plain storage"),
        (with_hook, "weight has a gradient or a hook"),
        (broken, "the factory raised ValueError: broken"),
        (resized, r"the factory calls aten\.resize_"),
        (lambda: nn.ParameterList([torch.rand(3, pin_memory=True)]), r"the factory draws with aten\.rand"),
    ],
)
def test_what_cannot_be_deferred_is_said(make: Callable[[], nn.Module], reason: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(CannotDefer, match=reason):
        build_deferred(make, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_from_before_is_refused_and_left_as_it_was() -> None:
    ready = nn.Linear(200, 200)
    before = copy.deepcopy(ready)
    with pytest.raises(CannotDefer, match=r"0\.weight existed before"):
        build_deferred(lambda: nn.Sequential(ready, nn.Linear(200, 200)), 0)
    assert torch.equal(ready.weight, before.weight)


def test_a_builder_that_keeps_its_model_keeps_one_with_values() -> None:
    makes = [functools.cache(lambda: nn.Linear(200, 200)) for _ in range(2)]
    with pytest.raises(CannotDefer, match="weight existed before"):
        build_deferred(makes[0], 0)
    assert torch.equal(build_by_name(makes[0], 0).weight, build_by_name(makes[1], 0).weight)


STEPS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "normal": lambda a, _: a.normal_(),
    "uniform_row": lambda a, _: a[1].uniform_(),
    "trunc": lambda a, _: nn.init.trunc_normal_(a),
    "orthogonal": lambda a, _: nn.init.orthogonal_(a.clone()),
    "draw": lambda _, b: torch.randn(b.shape),
    "copy": lambda a, b: a.copy_(b.clone() if a.data_ptr() == b.data_ptr() else b),
    "copy_transposed": lambda a, _: a.copy_(a.T.clone()),
    "column": lambda a, b: a[:, 0].add_(b[1].clone()),
    "double": lambda a, _: a.mul_(2),
    "sum": lambda a, b: a + b,
    "view": lambda a, _: a.T,
    "clone": lambda a, _: a.clone(),
    "deepcopy": lambda a, _: copy.deepcopy(a),
    "item": lambda a, b: a.fill_(b[0, 0].item()),
    "branch": lambda a, b: a.zero_() if b.sum() > 0 else a.uniform_(),
    "mask": lambda a, b: a.masked_fill_(b > 0.5, 3.0),
    "foreach": lambda a, b: torch._foreach_add_([a, b], 1.0),
    "numpy": lambda a, _: torch.from_numpy(a.numpy().copy()),
    "ones": lambda a, _: torch.ones_like(a),
    "out": lambda a, b: torch.add(b.clone(), 1.0, out=a),
}


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), max_size=14
    ),
    width=st.sampled_from([4, 130]),  # below and above what is computed at once
)
@settings(max_examples=60, deadline=None)
def test_any_program_gives_the_same_values(steps: list[tuple[str, int, int]], width: int) -> None:
    def make() -> nn.Module:
        pool = [torch.zeros(width, width), torch.randn(width, width)]
        for name, one, other in steps:
            made = STEPS[name](pool[one % len(pool)], pool[other % len(pool)])
            if isinstance(made, Tensor) and made.ndim == 2:
                pool.append(made)
        model = nn.Module()
        for number, tensor in enumerate(pool):
            model.register_buffer(f"b{number}", tensor)
        return model

    check(make)


MEMORY = """
import resource, sys, torch
from torch import nn
from shoal.deferred_init import build_deferred

def make(width=512, layers=10, greedy=sys.argv[1] == "greedy"):
    layer = nn.TransformerEncoderLayer(width, 8, 8 * width, batch_first=True)
    linears = (nn.Linear(2 * width, 4 * width) for _ in range(2 * layers + 4))
    model = nn.Sequential(nn.TransformerEncoder(layer, layers), *linears)
    if greedy:  # these compute with several tensors of the size of the weight
        nn.init.trunc_normal_(model[1].weight)
        nn.init.orthogonal_(model[2].weight)
    model.register_buffer("mask", torch.ones(4 * width, 4 * width).tril())
    return model

def values(deferred):
    named = (*deferred.model.named_parameters(), *deferred.model.named_buffers())
    return sum(deferred.value(name).nbytes for name, _ in named) / 2**20

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

values(build_deferred(lambda: make(8, 1), 0))  # what torch loads when it is first used is not the model's
before = peak()
deferred = build_deferred(make, 0)
built = peak()
print(values(deferred), built - before, peak() - before)
"""


@pytest.mark.parametrize("kind", ["plain", "greedy"])
def test_a_model_of_400_mb_takes_less_than_60(kind: str) -> None:
    # glibc keeps much of what such greedy functions free, from 0 to 80 MB by chance, unless it is told not to.
    environment = os.environ | ({"MALLOC_MMAP_THRESHOLD_": "65536"} if kind == "greedy" else {})
    command = [sys.executable, "-c", MEMORY, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    total, built, peak = map(float, done.stdout.split())
    assert total > 400
    assert built < (45 if kind == "greedy" else 10)
    assert peak < 60
