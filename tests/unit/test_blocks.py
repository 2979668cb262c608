"""Which parts of a model are its blocks: a table of models, and properties of whatever is found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from shoal.blocks import find_blocks
from shoal.testing.toys import TABLE as TOYS


class Layer(nn.Module):
    """A layer with a repeated list of its own, which must not be taken for the blocks."""

    def __init__(self, width: int = 8, inner: int = 2, table: bool = False) -> None:
        super().__init__()
        self.steps = nn.ModuleList(nn.Linear(width, width) for _ in range(inner))
        if table:
            self.table = nn.Embedding(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            x = step(x)
        return x


class Holder(nn.Module):
    """Any named children, as a model."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


def layers(count: int, **options: int) -> nn.ModuleList:
    return nn.ModuleList(Layer(**options) for _ in range(count))


def one_layer_three_times() -> nn.Module:
    layer = Layer(width=16)
    return Holder(layers=nn.ModuleList([layer, layer, layer]), head=nn.Linear(16, 40))


def tied_to_outside() -> nn.Module:
    model = Holder(layers=layers(3), head=nn.Linear(8, 8))
    model.head.weight = model.layers[1].steps[0].weight
    return model


def tied_embedding() -> nn.Module:
    model = Holder(embed=nn.Embedding(50, 8), layers=layers(3), head=nn.Linear(8, 50, bias=False))
    model.head.weight = model.embed.weight
    return model


def tied_in_pairs() -> nn.Module:
    """Layers are lists of two parts that share a weight: the list is closed and its parts are not."""
    pairs = [nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(2)]
    for pair in pairs:
        pair[1].weight = pair[0].weight
    return Holder(pairs=nn.ModuleList(pairs))


def residual_net() -> nn.Module:
    """No two layers are alike, and the last stage holds most of the model."""

    def stage(width: int) -> nn.Module:
        first = Holder(project=nn.Linear(width, width), main=nn.Linear(width, 2 * width))
        return nn.Sequential(first, Holder(main=nn.Linear(2 * width, width)))

    return Holder(stem=nn.Linear(3, 4), a=stage(4), b=stage(10), c=stage(20))


MODELS: list[tuple[str, Callable[[], nn.Module], tuple[str, ...]]] = [
    ("a list", lambda: Holder(embed=nn.Embedding(9, 8), layers=layers(2)), ("layers.0", "layers.1")),
    ("a sequence", lambda: nn.Sequential(*layers(2), nn.Linear(8, 2)), ("0", "1")),
    (
        "two lists",
        lambda: Holder(encoder=Holder(layers=layers(2)), decoder=Holder(layers=layers(2, inner=3))),
        ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"),
    ),
    (
        "the first differs",
        lambda: Holder(layers=nn.ModuleList([Layer(table=True), Layer(), Layer()])),
        ("layers.0", "layers.1", "layers.2"),
    ),
    (
        "one of two has something more",
        lambda: Holder(layers=nn.ModuleList([Layer(table=True), Layer()])),
        ("layers.0", "layers.1"),
    ),
    (
        "norms repeat and matter little",
        lambda: nn.Sequential(
            nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)
        ),
        ("2",),
    ),
    (
        "lists of lists are not called",
        lambda: nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 16)]) for _ in range(2)),
        ("0.0", "0.1", "1.0", "1.1"),
    ),
    (
        "parametrized members are alike",
        lambda: nn.Sequential(*(weight_norm(nn.Linear(8, 8)) for _ in range(3))),
        ("0", "1", "2"),
    ),
    (
        "torch's encoder",
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2),
        ("layers.0", "layers.1"),
    ),
    ("torch's attention is not looked into", lambda: nn.MultiheadAttention(8, 2), ()),
    ("nor is a recurrent layer", lambda: Holder(lstm=nn.LSTM(8, 8, 2)), ("lstm",)),
    ("nothing inside", lambda: nn.Linear(8, 8), ()),
    ("no parameters", lambda: nn.Sequential(nn.ReLU(), nn.ReLU()), ()),
    ("one layer three times", one_layer_three_times, ("head",)),
    ("a layer tied to the outside", tied_to_outside, ("layers.0", "layers.2")),
    ("tied ends stay outside", tied_embedding, ("layers.0", "layers.1", "layers.2")),
    ("parts tied to each other", tied_in_pairs, ()),
    ("children by size", residual_net, ("b", "c.0", "c.1")),
    (
        "small repetition beside large parts",
        lambda: Holder(
            body=nn.Linear(64, 64),
            tiny=nn.Linear(2, 2),
            heads=nn.ModuleList(nn.Linear(8, 8) for _ in range(2)),
        ),
        ("body", "heads.0", "heads.1"),
    ),
    (
        "large parts beside repetition in one child",
        lambda: Holder(
            left=Holder(wide=nn.Linear(30, 30), layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(2))),
            right=nn.Linear(50, 50),
        ),
        ("left.wide", "left.layers.0", "left.layers.1", "right"),
    ),
    (
        "a child whose other parts are small",
        lambda: Holder(
            body=nn.Linear(64, 64),
            left=Holder(
                layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), a=nn.Linear(9, 9), b=nn.Linear(9, 10)
            ),
        ),
        ("body", "left.layers.0", "left.layers.1"),
    ),
    ("toy tied", TOYS["tied"].model, ("mix",)),
    ("toy frozen", TOYS["frozen"].model, ("first", "middle", "last")),
    ("toy odd", TOYS["odd"].model, ("first", "second")),
]


@pytest.mark.parametrize(("make", "blocks"), [row[1:] for row in MODELS], ids=[row[0] for row in MODELS])
def test_blocks_of(make: Callable[[], nn.Module], blocks: tuple[str, ...]) -> None:
    assert find_blocks(make()) == blocks
    with torch.device("meta"):
        assert find_blocks(make()) == blocks


def test_a_block_that_is_too_large_is_divided() -> None:
    model = Holder(layers=layers(2))
    assert find_blocks(model, largest=144) == ("layers.0", "layers.1")
    assert find_blocks(model, largest=143) == tuple(f"layers.{i}.steps.{k}" for i in (0, 1) for k in (0, 1))
    assert find_blocks(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), largest=1) == ("0", "1")
    # One child by size, too large, and nothing repeats inside.
    inner = Holder(a=nn.Linear(8, 8), b=nn.Linear(8, 9))
    assert find_blocks(Holder(inner=inner, other=nn.Linear(13, 13)), largest=180) == ("inner", "other")
    assert find_blocks(Holder(inner=inner, other=nn.Linear(13, 13)), largest=100) == (
        "inner.a",
        "inner.b",
        "other",
    )


def test_hugging_face_models() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 97, "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 32}
    with torch.device("meta"):
        gpt2 = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=97, n_positions=32, n_layer=3, n_embd=16, n_head=2)
        )
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=2, **small))
        bert = transformers.BertForMaskedLM(transformers.BertConfig(num_attention_heads=2, **small))
        t5 = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=97, d_model=16, d_ff=32, num_layers=2, num_heads=2, d_kv=8)
        )
    assert find_blocks(gpt2) == ("transformer.h.0", "transformer.h.1", "transformer.h.2")
    assert find_blocks(llama) == ("model.layers.0", "model.layers.1", "model.layers.2")
    assert find_blocks(bert) == tuple(f"bert.encoder.layer.{i}" for i in range(3))
    assert find_blocks(t5) == tuple(f"{side}.block.{i}" for side in ("encoder", "decoder") for i in (0, 1))


@st.composite
def models(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """Trees of lists, dictionaries, models and layers."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        return nn.Linear(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    children = draw(st.lists(models(depth=depth - 1), min_size=1, max_size=4))
    kind = draw(st.sampled_from(("list", "sequence", "holder", "dictionary")))
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "sequence":
        return nn.Sequential(*children)
    named = {f"part{i}": child for i, child in enumerate(children)}
    return nn.ModuleDict(named) if kind == "dictionary" else Holder(**named)


@settings(deadline=None, max_examples=150)
@given(model=models(), data=st.data(), largest=st.sampled_from((5, 20, 2**30)))
def test_what_always_holds(model: nn.Module, data: st.DataObject, largest: int) -> None:
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(data.draw(st.integers(0, 2))):  # tie some weights, across and inside what may be a block
        one, other = data.draw(st.sampled_from(linears)), data.draw(st.sampled_from(linears))
        one.weight = other.weight
    names = find_blocks(model, largest)

    order = [name for name, _ in model.named_modules()]
    assert list(names) == sorted(set(names), key=order.index)
    assert not [pair for pair in combinations(names, 2) if pair[1].startswith(f"{pair[0]}.")]
    inside: dict[str, set[int]] = {}
    for name in names:
        block = model.get_submodule(name)
        assert not isinstance(block, nn.ModuleList | nn.ModuleDict)
        inside[name] = {id(parameter) for parameter in block.parameters()}
        assert inside[name]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        for block, held in inside.items():
            assert (id(parameter) in held) == name.startswith(f"{block}."), f"{name} is also in {block}"
