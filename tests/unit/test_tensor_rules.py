"""What is found to cut, what is left whole and why, and what is refused: from one trial pass, without processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import ConfigError
from shoal.tensor import (
    Cuts,
    TensorCut,
    TensorLayout,
    TensorOptions,
    check_options,
    cut,
    describe_cuts,
    find_cuts,
)
from shoal.tensor.layout import assemble
from shoal.testing.toys import TABLE as TOYS


def cuts_of(model: nn.Module, *args: Any, degree: int = 2, rules: dict[str, str] | None = None) -> Cuts:
    return find_cuts(model, lambda: model(*args), degree, rules or {})


def hows(cuts: Cuts) -> dict[str, str]:
    return {one.module: one.how for one in cuts.cuts}


class Net(nn.Module):
    """Layers by name, and a forward that a test writes."""

    def __init__(self, forward: Any, **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.body = forward

    def forward(self, *args: Tensor) -> Any:
        return self.body(self, *args)


X = torch.linspace(-1, 1, 12).view(3, 4)


def two(forward: Any, **more: nn.Module | nn.Parameter) -> Net:
    return Net(forward, a=nn.Linear(4, 6), b=nn.Linear(6, 2), **more)


# Pairs


@pytest.mark.parametrize(
    "between",
    [
        torch.relu,
        F.gelu,
        lambda x: x * 2 + 1,
        lambda x: x.clamp_(min=0),
        lambda x: F.dropout(x, 0.5),
        lambda x: x * (X[:, :1] > 0),
        lambda x: torch.where(x > 0, x, torch.zeros_like(x)),
        lambda x: x.double().tanh().float(),
    ],
)
def test_projections_around_elementwise_functions_are_a_pair(between: Any) -> None:
    cuts = cuts_of(two(lambda net, x: net.b(between(net.a(x)))), X)
    assert hows(cuts) == {"a": "column", "b": "row"}
    assert cuts.whole == ()


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda net, x: net.b(net.a(x).softmax(-1)), "_softmax, which is not element-wise"),
        (lambda net, x: net.b(net.a(x).flip(-1)), "flip, which is not element-wise"),
        (lambda net, x: net.b(net.a(x)) + net.a(x).sum(), "sum, which is not element-wise"),
        (lambda net, x: (net.b(net.a(x)), net.a(x)), "what the model returns"),
        (lambda net, x: net.b(F.rrelu(net.a(x), training=True)), "draws random numbers"),
        (lambda net, x: net.b(net.a(x) * torch.ones(6)), "meets other data"),
        (lambda net, x: net.b(net.a(x)) + net.b(x @ torch.ones(4, 6)), "has other inputs too"),
    ],
)
def test_what_is_no_pair_says_why(between: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        cuts_of(two(between), X)


def test_a_learned_factor_breaks_a_pair_because_its_gradient_would_be_a_part() -> None:
    net = two(lambda net, x: net.b(net.a(x) * net.scale), scale=nn.Parameter(torch.ones(())))
    with pytest.raises(ConfigError, match="meets the parameter 'scale'"):
        cuts_of(net, X)
    scalar = two(lambda net, x: net.b(net.a(x) * net.c(x)), c=nn.Linear(4, 1))
    with pytest.raises(ConfigError, match="not cut"):
        cuts_of(scalar, X)


def test_a_gate_is_cut_beside_what_it_gates() -> None:
    net = two(lambda net, x: net.b(F.silu(net.gate(x)) * net.a(x)), gate=nn.Linear(4, 6))
    cuts = cuts_of(net, X)
    assert hows(cuts) == {"a": "column", "b": "row", "gate": "column"}
    assert len({one.group for one in cuts.cuts}) == 1


def test_of_a_chain_the_larger_pair_is_taken() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 4))
    cuts = cuts_of(net, X)
    assert hows(cuts) == {"2": "column", "4": "row"}
    assert dict(cuts.whole)["0"] == "the larger pair around '4' has its partner"


def test_a_layer_that_runs_twice_is_cut_if_both_times_are_alike() -> None:
    assert hows(cuts_of(two(lambda net, x: net.b(net.a(x)) + net.b(net.a(-x))), X)) == {
        "a": "column",
        "b": "row",
    }


def test_shared_and_bare_weights_are_left_whole() -> None:
    net = two(lambda net, x: net.b(net.a(x)) + net.c(net.d(x)), c=nn.Linear(6, 2), d=nn.Linear(4, 6))
    net.c.weight = net.b.weight
    with pytest.raises(ConfigError, match="shares a weight with 'b'"):
        cuts_of(net, X)
    bare = two(lambda net, x: net.b(net.a(x)) + net.b.weight.sum())
    with pytest.raises(ConfigError, match="used outside of it"):
        cuts_of(bare, X)


def test_too_few_values_are_left_whole() -> None:
    with pytest.raises(ConfigError, match="6 values between it and 'b' are too few for 8 workers"):
        cuts_of(two(lambda net, x: net.b(net.a(x))), X, degree=8)


def test_a_parametrised_layer_is_left_whole() -> None:
    net = two(lambda net, x: net.b(net.a(x)))
    nn.utils.parametrizations.weight_norm(net.a)
    with pytest.raises(ConfigError, match="finds nothing to cut"):
        cuts_of(net, X)


def test_the_trial_pass_leaves_no_mark() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4), nn.BatchNorm1d(4)).train()
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    cuts = cuts_of(net, X)
    assert hows(cuts) == {"0": "column", "2": "row"}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


# Toys


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tied", {"embed": "vocabulary", "head": "head"}),
        ("frozen", {"first": "column", "middle": "row"}),
        ("odd", {"second": "column", "last": "row"}),
        ("dropout", {"first": "column", "last": "row"}),
    ],
)
def test_toys(name: str, expected: dict[str, str]) -> None:
    batch = torch.stack([TOYS[name].data()[place][0] for place in range(4)])
    assert hows(cuts_of(TOYS[name].model(), batch)) == expected


def test_a_model_with_nothing_to_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tp2 finds nothing to cut in this model .*'body'.*'sometimes'"):
        cuts_of(TOYS["unused"].model(), torch.zeros(2, 5))
    with pytest.raises(ConfigError, match="it has no parameters"):
        cuts_of(nn.Sequential(nn.ReLU()), X)


# Vocabulary


def words() -> Tensor:
    return torch.tensor([[1, 2, 0]])


def test_words_are_a_vocabulary_and_positions_are_not() -> None:
    net = Net(
        lambda net, x: net.word(x) + net.place(torch.arange(3)) + net.kept(net.numbers),
        word=nn.Embedding(9, 4),
        place=nn.Embedding(9, 4),
        kept=nn.Embedding(9, 4),
    )
    net.register_buffer("numbers", torch.arange(3))
    cuts = cuts_of(net, words())
    assert hows(cuts) == {"word": "vocabulary"}
    assert dict(cuts.whole) == dict.fromkeys(("place", "kept"), "its rows are no vocabulary")


def test_a_head_of_the_same_size_is_cut_and_a_layer_inside_is_not() -> None:
    net = Net(
        lambda net, x: net.head(net.inner(net.word(x)).softmax(-1)),
        word=nn.Embedding(9, 4),
        inner=nn.Linear(4, 9),
        head=nn.Linear(9, 9),
    )
    cuts = cuts_of(net, words())
    assert hows(cuts) == {"word": "vocabulary", "head": "head"}
    assert cuts.head == "head"


def test_tied_weights_are_cut_alike_under_each_name() -> None:
    model = TOYS["tied"].model()
    pieces = cuts_of(model, words()).layout().pieces
    assert pieces["embed.weight"] == pieces["head.weight"] == TensorCut(0, (11,))
    with pytest.raises(ConfigError, match="'head', which has the same weight, stays whole"):
        cuts_of(model, words(), rules={"head": "whole"})


def test_embeddings_that_change_as_they_are_read_stay_whole() -> None:
    with pytest.raises(ConfigError, match="max_norm"):
        cuts_of(nn.Embedding(9, 4, max_norm=1.0), words())


# Heads


def test_heads_must_divide() -> None:
    attention = nn.MultiheadAttention(12, 6)
    net = Net(lambda net, x: net.attention(x, x, x)[0], attention=attention)
    x = torch.zeros(3, 1, 12)
    assert hows(cuts_of(net, x, degree=3)) == {"attention": "heads"}
    with pytest.raises(ConfigError) as error:
        cuts_of(net, x, degree=4)
    assert str(error.value) == (
        "'attention' has 6 heads, which tp4 cannot divide; use tp2 or tp3 or tp6, "
        "or keep it whole with tensor_rules={'attention': 'whole'}."
    )
    with pytest.raises(ConfigError, match="finds nothing"):
        cuts_of(net, x, degree=4, rules={"attention": "whole"})


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 9}
    return LlamaForCausalLM(LlamaConfig(**(sizes | {"bos_token_id": 0, "eos_token_id": 1} | options)))


def test_key_and_value_heads_must_divide() -> None:
    model = llama(num_attention_heads=4, num_key_value_heads=2)
    assert len(cuts_of(model, words()).cuts) == 9
    with pytest.raises(
        ConfigError, match="has 2 key and value heads, which tp4 cannot divide; use tp2, or keep"
    ):
        cuts_of(model, words(), degree=4)


def test_attention_weights_that_are_returned_keep_attention_whole() -> None:
    model = llama(num_attention_heads=2, attn_implementation="eager", output_attentions=True)
    reasons = dict(cuts_of(model, words()).whole)
    assert reasons["model.layers.0.self_attn.q_proj"] == "the model returns its attention weights"


# Rules


def own_attention(heads: int | None = None, scale: bool = False, drop: float = 0.0) -> Net:
    def forward(net: Net, x: Tensor) -> Tensor:
        q, k, v = (p(x).view(*x.shape[:2], heads or -1, 4).transpose(1, 2) for p in (net.q, net.k, net.v))
        scores = (q @ k.mT).softmax(-1)
        mixed = F.dropout((scores * net.s if scale else scores) @ v, drop)
        return net.o(mixed.transpose(1, 2).flatten(2))

    layers = {name: nn.Linear(8, 8) for name in "qkvo"}
    return Net(forward, **layers, s=nn.Parameter(torch.ones(())))


RULES = {"[qkv]": "column", "o": "row"}
Y = torch.linspace(-1, 1, 48).view(2, 3, 8)


def test_rules_cut_what_was_not_found() -> None:
    with pytest.raises(ConfigError, match="finds nothing"):
        cuts_of(own_attention(), Y)
    cuts = cuts_of(own_attention(), Y, rules=RULES)
    assert hows(cuts) == {"q": "column", "k": "column", "v": "column", "o": "row"}
    assert {one.why for one in cuts.cuts} == {"tensor_rules"}


@pytest.mark.parametrize(
    ("net", "degree", "rules", "reason"),
    [
        (own_attention(heads=2), 2, RULES, "does not run .*shape data as"),
        (own_attention(), 2, {"[qv]": "column", "o": "row"}, "learned data is used between them"),
        (own_attention(), 4, RULES, "does not run|do not add up"),
        (own_attention(scale=True), 2, RULES, "the parameter 's' is used between them"),
        (own_attention(drop=0.1), 2, RULES, "a dropout is between them"),
        (own_attention(), 2, {"o": "column"}, "is returned by the model"),
        (own_attention(), 2, {"q": "column"}, "goes into 'o', which is no row"),
        (own_attention(), 2, {"o": "row"}, "does not run"),
        (own_attention(), 2, {"p": "column"}, "'p' matches no module; the names are like 'q'"),
        (own_attention(), 2, {"q": "columns"}, "'columns', which is no way to cut; use one of column"),
        (own_attention(), 2, {"q": "heads"}, "'q' is a Linear, which cannot be cut by 'heads'"),
    ],
)
def test_rules_that_cannot_be_are_refused(net: Net, degree: int, rules: dict[str, str], reason: str) -> None:
    before = {name: module.forward for name, module in net.named_modules() if name}
    with pytest.raises(ConfigError, match=reason):
        cuts_of(net, Y, degree=degree, rules=rules)
    assert all("forward" not in net.get_submodule(name).__dict__ for name in before)


def test_a_cut_through_a_head_is_seen() -> None:
    """Two heads of 4 as four of 2: the shapes fit, and only the numbers tell."""

    def forward(net: Net, x: Tensor) -> Tensor:
        q, k = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (net.q, net.k))
        return net.o(((q @ k.mT).softmax(-1) @ k).transpose(1, 2).flatten(2))

    net = Net(forward, **{name: nn.Linear(8, 8) for name in "qko"})
    with pytest.raises(ConfigError, match="the parts of 'o' do not add up to what it gives whole"):
        cuts_of(net, Y, rules={"[qk]": "column", "o": "row"})


def test_rules_for_frozen_and_quantised_layers_are_refused() -> None:
    frozen = TOYS["frozen"].model()
    with pytest.raises(ConfigError, match="'middle' is frozen"):
        cuts_of(frozen, torch.zeros(2, 5), rules={"middle": "row"})
    net = two(lambda net, x: net.b(net.a(x)))
    net.a.weight = nn.Parameter(torch.ones(6, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ConfigError, match="'a' is quantised"):
        cuts_of(net, X, rules={"a": "column"})


def test_whole_breaks_a_pair_and_includes_what_is_below() -> None:
    net = nn.Sequential(
        nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    )
    cuts = cuts_of(net, X, rules={"0": "whole"})
    assert hows(cuts) == {"1.0": "column", "1.1": "row"}
    assert dict(cuts.whole)["0.1"] == "tensor_rules says so"


# Options


def test_options_without_use_are_refused() -> None:
    cuts = cuts_of(two(lambda net, x: net.b(net.a(x))), X)
    with pytest.raises(ConfigError, match=r"tp2\(loss=true\) needs a head"):
        check_options(cuts, TensorOptions(loss=True))
    with pytest.raises(
        ConfigError, match=r"tp2\(sequence=true\) cannot be done here: it knows blocks of the kinds"
    ):
        check_options(cuts, TensorOptions(sequence=True))


def encoder(heads: int = 2, skip: bool = False) -> nn.Module:
    layers = [nn.TransformerEncoderLayer(8, heads, 6, batch_first=True) for _ in range(2)]

    def forward(net: Net, x: Tensor) -> Tensor:
        inner = net.one(x)
        return net.two(inner) + (inner if skip else 0)

    return Net(forward, one=layers[0], two=layers[1])


def test_blocks_for_slices_of_the_sequence() -> None:
    cuts = cuts_of(encoder(), torch.zeros(2, 4, 8))
    assert [block.module for block in cuts.blocks] == ["one", "two"]
    check_options(cuts, TensorOptions(sequence=True))
    odd = cuts_of(encoder(), torch.zeros(2, 3, 8))
    with pytest.raises(ConfigError, match="a sequence of 3 positions cannot be shared evenly"):
        check_options(odd, TensorOptions(sequence=True))
    assert cuts_of(encoder(skip=True), torch.zeros(2, 4, 8)).obstacle == (
        "the output of 'one' goes elsewhere than into 'two'"
    )
    ruled = cuts_of(encoder(), torch.zeros(2, 4, 8), rules={"two.self_attn": "whole"})
    assert ruled.obstacle == "'two.self_attn' is not cut"


# Layout


@given(
    degree=st.integers(1, 5),
    groups=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    dim=st.integers(0, 1),
)
def test_parts_make_the_whole(degree: int, groups: list[int], dim: int) -> None:
    layout = TensorLayout({"w": TensorCut(dim, tuple(groups))}, degree)
    shape = [3, 3]
    shape[dim] = sum(groups)
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    parts = [cut("w", whole, layout, rank) for rank in range(degree)]
    assert torch.equal(assemble("w", parts, layout), whole)
    assert [part.shape[dim] for part in parts] == [layout.pieces["w"].local(degree, r) for r in range(degree)]
    if len(groups) == 1:
        chunks = whole.chunk(degree, dim)
        assert all(torch.equal(a, b) for a, b in zip(parts, chunks, strict=False))
    assert cut("other", whole, layout, 0) is whole


def test_description_folds_layers_that_are_alike() -> None:
    block = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4), nn.LayerNorm(4))
    text = describe_cuts(cuts_of(nn.Sequential(block, copy.deepcopy(block)), X))
    assert text.splitlines() == [
        "cut 2 ways  how     count  why",
        "*.0         column      2  a pair with '*.2'",
        "*.2         row         2  a pair with '*.0'",
        "",
        "left whole  count  why",
        "*.3             2  a LayerNorm is not cut",
    ]
