"""Randomness keyed by name: stable keys, models built by name, and streams for micro-batches."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.seeds import build_by_name, derive, set_stream

PATHS = st.lists(st.one_of(st.integers(), st.text("ab1:;si", max_size=6)), max_size=4)


def test_keys_never_change_between_versions() -> None:
    assert derive(0) == 7297301794479320605
    assert derive(0, "order", 3) == 2140218902847123268
    assert derive(-1, "größe") == 6231399940415487159
    assert derive(2**70, "a", 1, "b") == 1272605969838350092


@given(one=PATHS, other=PATHS)
def test_different_paths_have_different_keys(one: list[str | int], other: list[str | int]) -> None:
    assert (derive(0, *one) == derive(0, *other)) == (one == other)
    assert 0 <= derive(0, *one) < 2**63


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


class Scaled(nn.Module):
    """A parameter made out of place and one made in a single draw."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(3, 5) * 0.02)
        self.plain = nn.Parameter(torch.rand(7))


class Net(nn.Module):
    """Every kind of layer whose initial values come about in a way of its own."""

    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        if extra:
            self.extra = nn.Linear(3, 3)
            nn.init.trunc_normal_(self.extra.weight)
        self.embed = nn.Embedding(40, 8, padding_idx=0)
        self.linear = nn.Linear(8, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.LSTM(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.scaled = Scaled()
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(30, 30)))
        self.narrow = nn.Parameter(nn.init.trunc_normal_(torch.empty(30, 30), a=0.5, b=0.6))
        self.orthogonal = nn.Linear(8, 8)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(9, 9), 0.5))
        self.half = nn.Linear(8, 8).to(torch.bfloat16)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.average = copy.deepcopy(self.linear)
        self.target = nn.Linear(8, 8)
        self.target.load_state_dict(self.linear.state_dict())
        self.register_buffer("noise", torch.randn(4))
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.embed.weight


def test_a_layer_more_changes_no_other_layer() -> None:
    less = build_by_name(Net, 0).state_dict()
    more = build_by_name(lambda: Net(extra=True), 0).state_dict()
    assert more.keys() - less.keys() == {"extra.weight", "extra.bias"}
    assert [name for name in less if not torch.equal(less[name], more[name])] == []


def test_the_order_of_creation_does_not_matter() -> None:
    def build(names: list[str]) -> nn.Module:
        made = {name: nn.Linear(4, 4) for name in names}
        for name in reversed(names):
            nn.init.trunc_normal_(made[name].weight)
        return nn.ModuleDict({name: made[name] for name in sorted(names)})

    assert same(
        build_by_name(lambda: build(["a", "b", "c"]), 0), build_by_name(lambda: build(["c", "a", "b"]), 0)
    )


def test_builds_repeat_bit_for_bit_and_seeds_differ() -> None:
    first, again, other = build_by_name(Net, 1), build_by_name(Net, 1), build_by_name(Net, 2)
    assert same(first, again)
    constant = {
        name for name, value in first.state_dict().items() if torch.equal(value, other.state_dict()[name])
    }
    assert constant == {
        "attention.in_proj_bias",
        "attention.out_proj.bias",
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_different_names_differ() -> None:
    model = build_by_name(lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), 0)
    assert len({tuple(layer.weight.flatten().tolist()) for layer in model}) == 5


def test_what_the_builder_made_equal_stays_equal() -> None:
    net = build_by_name(Net, 0)
    assert net.head.weight is net.embed.weight
    assert same(net.average, net.linear)
    assert same(net.target, net.linear)
    magnitude, direction = net.normed.parametrizations.weight.parameters()
    assert torch.allclose(magnitude.flatten(), direction.norm(dim=1))
    assert torch.allclose(net.orthogonal.weight @ net.orthogonal.weight.T, torch.eye(8), atol=1e-5)
    assert not net.embed.weight[0].any()
    assert net.embed.weight[1:].all()


def test_layers_copied_from_one_prototype_start_equal() -> None:
    def build() -> nn.Module:
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    encoder = build_by_name(build, 0)
    assert same(encoder.layers[0], encoder.layers[1])


@pytest.mark.parametrize("rng", ["manual_seed", "untouched"])
def test_the_global_generator_is_left_alone(rng: str) -> None:
    def build() -> nn.Module:
        if rng == "manual_seed":
            torch.manual_seed(99)
        return nn.Linear(4, 4)

    before = torch.get_rng_state()
    first = build_by_name(build, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert same(first, build_by_name(build, 0))


def test_a_failing_builder_leaves_the_global_generator_alone() -> None:
    def build() -> nn.Module:
        nn.Linear(4, 4)
        raise ValueError("broken")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="broken"):
        build_by_name(build, 0)
    assert torch.equal(torch.get_rng_state(), before)


def uniform_std(bound: float) -> float:
    return bound / math.sqrt(3)


@pytest.mark.parametrize(
    ("init", "std"),
    [
        (lambda weight: weight, uniform_std(1 / math.sqrt(300))),
        (nn.init.kaiming_normal_, math.sqrt(2 / 300)),
        (nn.init.xavier_uniform_, math.sqrt(2 / 700)),
        (functools.partial(nn.init.normal_, mean=0.0, std=0.02), 0.02),
        (functools.partial(nn.init.trunc_normal_, std=1.0, a=-2.0, b=2.0), 0.8796),
        (lambda weight: nn.init.constant_(weight, 3.0), 0.0),
    ],
)
def test_values_follow_the_distribution_asked_for(init: Callable[[torch.Tensor], object], std: float) -> None:
    def build() -> nn.Module:
        layer = nn.Linear(300, 400)
        init(layer.weight)
        return layer

    weight = build_by_name(build, 0).weight.detach()
    assert weight.std().item() == pytest.approx(std, rel=0.02, abs=1e-6)
    assert weight.mean().item() == pytest.approx(3.0 if std == 0 else 0.0, abs=0.02 * std + 1e-6)
    assert not weight.requires_grad
    assert build_by_name(lambda: nn.Embedding(400, 300), 0).weight.std().item() == pytest.approx(1, rel=0.02)


def test_the_users_own_init_is_honoured() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)
            with torch.no_grad():
                module.weight[:2].uniform_(5, 6)
                module.weight[2].copy_(torch.arange(50.0))

    model = build_by_name(lambda: nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)).apply(init), 0)
    for layer in model:
        assert not layer.bias.any()
        assert layer.weight[:2].min() >= 5
        assert torch.equal(layer.weight[2], torch.arange(50.0))
        assert layer.weight[3:].std().item() == pytest.approx(0.01, rel=0.1)
    assert not torch.equal(model[0].weight[:2], model[1].weight[:2])


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_double_precision_works_inside_and_outside_the_builder() -> None:
    def inside() -> nn.Module:
        with default_dtype(torch.float64):
            return Net()

    with default_dtype(torch.float64):
        outside = build_by_name(Net, 0)
    assert outside.linear.weight.dtype == torch.float64
    assert same(outside, build_by_name(inside, 0))


def test_a_builder_without_randomness_runs_once() -> None:
    ready, calls = nn.Linear(3, 3), []
    before = copy.deepcopy(ready)
    assert build_by_name(lambda: calls.append(1) or ready, 0) is ready
    assert len(calls) == 1
    assert same(ready, before)


def test_a_builder_that_keeps_its_first_model_still_depends_on_the_seed_alone() -> None:
    models = [build_by_name(functools.cache(lambda: nn.Linear(3, 3)), 0) for _ in range(2)]
    assert same(*models)


def test_a_generator_of_the_builders_own_is_respected() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(3, 3)
        nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(5))
        return layer

    expected = torch.empty(3, 3).normal_(generator=torch.Generator().manual_seed(5))
    assert torch.equal(build_by_name(build, 0).weight, expected)


def test_a_builder_that_draws_until_satisfied_settles() -> None:
    def build(extra: bool) -> nn.Module:
        model = nn.ModuleDict({"extra": nn.Linear(2, 2)} if extra else {})
        for name in ("a", "b"):
            model[name] = nn.Linear(2, 2)
            while model[name].weight.sum() < 0.5:
                model[name].reset_parameters()
        return model

    less, more = build_by_name(lambda: build(False), 0), build_by_name(lambda: build(True), 0)
    assert same(less["a"], more["a"])
    assert same(less["b"], more["b"])


def test_a_model_without_storage_is_built_too() -> None:
    with torch.device("meta"):
        model = build_by_name(lambda: nn.Linear(3, 3), 0)
    assert model.weight.is_meta


def test_tensors_without_a_storage_are_passed_over() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3))
        model.register_buffer("sparse", torch.eye(3).to_sparse())
        return model

    model = build_by_name(build, 0)
    assert torch.equal(model[1].weight, build_by_name(build, 0)[1].weight)


def test_a_stream_depends_on_its_name_alone() -> None:
    def drop(*names: str | int) -> torch.Tensor:
        set_stream(3, *names)
        return nn.functional.dropout(torch.ones(100))

    first = drop("step", 1, 0)
    torch.rand(5)
    assert torch.equal(drop("step", 1, 0), first)
    assert not torch.equal(drop("step", 1, 1), first)
