"""Models cut into stages: where, with which parameters, and that nothing changes by it."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.errors import ConfigError
from shoal.pipeline.proof import prove
from shoal.pipeline.spine import observe
from shoal.pipeline.split import Split, choose_cuts, describe_split, find_split, span_costs
from shoal.pipeline.stage import StageModule, plan_stages
from shoal.pipeline.trim import trim
from shoal.testing.toys import TABLE as TOYS

Make = Callable[[], nn.Module]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + F.dropout(mask @ torch.tanh(self.mix(self.norm(x))), 0.2, self.training)


class Transformer(nn.Module):
    """A position parameter and a final scale at the root, a causal mask buffer, a tied head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.place = nn.Parameter(torch.randn(1, 6, 8) * 0.1)
        self.blocks = nn.ModuleList(Block(8) for _ in range(layers))
        self.norm = nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(6, 6).tril())

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed(tokens)
        x += self.place[:, :length]  # in place, as many models do
        for block in self.blocks:
            x = block(x, mask=self.mask[:length, :length])
        return self.head(self.norm(x)) * self.scale


class Functional(Transformer):
    """The tied weight is used at the end without its module."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x=x, mask=self.mask)
        return F.linear(self.norm(x), self.embed.weight)


class Encoder(nn.Module):
    """torch's own layers, called with a mask; a tuple comes back from the wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(3))
        self.pool = nn.Conv1d(6, 4, 3)
        self.out = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=x.dtype)
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return {"output": self.out(self.pool(x).flatten(1))}


class Images(nn.Module):
    """A convolution changes every size, batch norm remembers; blocks give tuples."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv2d(4, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4)

        def forward(self, hidden_states: Tensor, flag: bool) -> tuple[Tensor, None]:
            assert flag
            return hidden_states + torch.relu(self.norm(self.mix(hidden_states))), None

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(self.Pair() for _ in range(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(flag=True, hidden_states=x)[0]
        return self.head(x.mean((2, 3)))


class Detour(nn.Module):
    """A residual around `second`, and one around all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(5, 5) for _ in range(3))
        self.fourth = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + torch.tanh(self.second(x))
        return self.fourth(self.third(x))


class Remembers(nn.Module):
    """Blocks leave a number behind that the end of the pass adds up: it goes around every boundary."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            self.penalty = x.square().mean()
            return torch.tanh(self.mix(x))

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x + sum(part.penalty for part in self.parts)


class Sometimes(nn.Module):
    """`extra` runs only if a sample asks for it, and the middle block only if none forbids it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(5, 5) for _ in range(3))
        self.extra = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if not bool((x > 50).any()):
            h = self.second(torch.tanh(h))
        if bool((x[:, 0] > 10).any()):
            h = h + self.extra(h)
        return self.third(torch.tanh(h))


def tokens(batch: int = 3) -> Tensor:
    return torch.randint(0, 13, (batch, 6), generator=torch.Generator().manual_seed(batch))


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gpt2(**more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=13, n_positions=8, n_embd=8, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0, **more
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=8, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=13, hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )
    return transformers.BertForMaskedLM(config)


def sequential() -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU(inplace=True))
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), inner, nn.Linear(8, 3))


def build(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def logits(output: Any) -> Tensor:
    found: Tensor = output["output"] if isinstance(output, dict) and "output" in output else output
    return found if isinstance(found, Tensor) else found.logits


def chained(workers: Sequence[tuple[nn.Module, Sequence[int]]], split: Split, inputs: Any) -> Tensor:
    """A forward and backward pass through all stages by hand; gives the output."""
    state: list[Tensor] = []
    home = {number: model for model, mine in workers for number in mine}
    received: Tensor | None = None
    passed = []
    for stage in split.stages:
        go_on = (lambda: torch.set_rng_state(state[-1])) if state else None
        output = StageModule(home[stage.number], stage, go_on)(received, inputs)
        state.append(torch.get_rng_state())
        passed.append((received, logits(output)))
        received = passed[-1][1].detach().requires_grad_()
    gradient: Tensor | None = None
    for taken, given_on in reversed(passed):
        if not given_on.requires_grad:
            break  # a first stage without parameters hands the inputs on
        (given_on.square().sum() if gradient is None else (given_on * gradient).sum()).backward()
        gradient = None if taken is None else taken.grad
    return passed[-1][1]


def assert_same_gradients(make: Make, inputs: Any, split: Split, parts: Sequence[Sequence[int]]) -> None:
    """Every worker trimmed to its stages; gradients of tied copies added; compared with the whole model."""
    whole = build(make)
    torch.manual_seed(7)
    expected = logits(whole(inputs))
    expected.square().sum().backward()
    workers = [(build(make), mine) for mine in parts]
    for model, mine in workers:
        trim(model, split.stages, mine)
    torch.manual_seed(7)
    assert torch.equal(chained(workers, split, inputs), expected)

    found = {(i, name): p.grad for i, (m, _) in enumerate(workers) for name, p in m.named_parameters()}
    home = {number: i for i, (_, mine) in enumerate(workers) for number in mine}
    for group in split.tied:
        copies = {(home[number], name) for number, name in group} & found.keys()
        grads = [found[copy] for copy in copies if found[copy] is not None]
        for copy_ in copies:
            found[copy_] = sum(grads) if grads else None
    seen = set()
    same = {name: first for first, names in aliases(whole).items() for name in names}
    reference = dict(whole.named_parameters())
    for (_, name), grad in found.items():
        true = reference[same[name]].grad
        seen.add(same[name])
        assert (grad is None) == (true is None), name
        if true is not None:
            assert (grad - true).abs().max() <= 1e-12 * max(1.0, float(true.abs().max())), name
    assert seen == set(reference)


def aliases(model: nn.Module) -> dict[str, list[str]]:
    """For each name that named_parameters gives, all names of that weight."""
    everything = list(model.named_parameters(remove_duplicate=False))
    return {name: [other for other, q in everything if q is p] for name, p in model.named_parameters()}


X = floats(3, 5)
CASES: dict[str, tuple[Make, Any, int, tuple[str, ...]]] = {
    "sequential": (sequential, X, 3, ("2.0", "3")),
    "transformer": (Transformer, tokens(), 3, ("blocks.1", "norm")),
    "functional": (Functional, tokens(), 2, ("blocks.2",)),
    "encoder": (Encoder, floats(3, 6, 5), 3, ("layers.1", "out")),
    "images": (Images, floats(3, 3, 9, 9), 3, ("blocks.1", "blocks.2")),
    "tied": (TOYS["tied"].model, tokens() % 11, 3, ("mix", "head")),
    "frozen": (TOYS["frozen"].model, X, 3, ("middle", "last")),
    "odd": (TOYS["odd"].model, X, 3, ("second", "last")),
    "dropout": (TOYS["dropout"].model, X, 2, ("last",)),
    "unused": (TOYS["unused"].model, X, 2, ("body",)),
    "gpt2": (gpt2, tokens(), 4, ("transformer.h.1", "transformer.h.3", "lm_head")),
    "gpt2 eager": (lambda: gpt2(attn_implementation="eager"), tokens(), 2, ("transformer.h.2",)),
    "llama": (llama, tokens(), 3, ("model.layers.1", "model.norm")),
    "bert": (bert, tokens(), 3, ("bert.encoder.layer.1", "cls.predictions.transform")),
}


@pytest.mark.parametrize("name", CASES)
def test_stages_compute_what_the_model_computes(name: str) -> None:
    make, inputs, stages, named = CASES[name]
    split = find_split(build(make), inputs, stages, named)
    assert split.boundaries == named
    assert_same_gradients(make, inputs, split, [[number] for number in range(stages)])


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"unused"}))
def test_places_are_found(name: str) -> None:
    make, inputs, stages, _ = CASES[name]
    model = build(make)
    split = find_split(model, inputs, stages)
    assert len(split.boundaries) == stages - 1
    prove(model, inputs, split.stages)
    assert_same_gradients(make, inputs, split, [[number] for number in range(stages)])


def test_one_worker_may_have_several_stages() -> None:
    split = find_split(build(Transformer), tokens(), 4, costs=[1.0] * 7)
    assert_same_gradients(Transformer, tokens(), split, [[0, 2], [1, 3]])
    assert_same_gradients(Transformer, tokens(), split, [[0, 3], [1, 2]])
    assert_same_gradients(
        Images, floats(3, 3, 9, 9), find_split(build(Images), floats(3, 3, 9, 9), 4), [[0, 2], [1, 3]]
    )


def test_another_batch_size_and_length_than_in_the_trial() -> None:
    split = find_split(build(Transformer), tokens(3), 3)
    assert_same_gradients(Transformer, tokens(5)[:, :4], split, [[0], [1], [2]])
    split = find_split(build(gpt2), tokens(3), 3)
    assert_same_gradients(gpt2, tokens(1)[:, :3], split, [[0], [1], [2]])


def test_who_owns_what() -> None:
    model = build(Transformer)
    split = find_split(model, tokens(), 3, ("blocks.1", "blocks.3"))
    assert split.owners["embed.weight"] == split.owners["place"] == split.owners["blocks.0.mix.bias"] == 0
    assert split.owners["blocks.2.norm.weight"] == 1
    assert split.owners["scale"] == split.owners["head.weight"] == 2
    assert split.owners["mask"] == 0
    assert split.tied == (((0, "embed.weight"), (2, "head.weight")),)
    assert split.activations == (((6, 8), torch.float64),) * 2
    assert split.stages[1].parameters == tuple(
        n for n, _ in model.named_parameters() if n.startswith(("blocks.1", "blocks.2"))
    )
    every = {n for n, _ in model.named_parameters(remove_duplicate=False)} | {
        n for n, _ in model.named_buffers()
    }
    assert split.owners.keys() == every


def test_a_weight_used_in_two_stages_under_one_name_has_two_copies() -> None:
    split = find_split(build(Functional), tokens(), 2, ("norm",))
    assert ((0, "embed.weight"), (1, "embed.weight")) in split.tied


def test_a_trimmed_model_has_its_own_parameters_only() -> None:
    model = build(Transformer)
    split = find_split(model, tokens(), 3, ("blocks.1", "blocks.3"))
    trim(model, split.stages, {1})
    assert tuple(name for name, _ in model.named_parameters()) == split.stages[1].parameters
    left = [t for m in model.modules() for t in m.__dict__.values() if isinstance(t, Tensor)]
    assert left
    assert all(t.untyped_storage().nbytes() == t.element_size() for t in left)


def test_buffers_of_other_stages_go_and_those_that_are_needed_stay() -> None:
    model = build(Images)
    split = find_split(model, floats(3, 3, 9, 9), 2, ("blocks.1",))
    assert split.owners["blocks.0.norm.running_mean"] == 0
    assert split.stages[1].kept == ("stem",)
    trim(model, split.stages, {1})
    assert "blocks.0.norm.running_mean" not in dict(model.named_buffers())
    assert "blocks.1.norm.running_mean" in dict(model.named_buffers())
    whole = build(Transformer)
    trim(whole, find_split(whole, tokens(), 2).stages, {1})
    assert "mask" in dict(whole.named_buffers())


def test_looking_at_a_model_leaves_no_trace() -> None:
    model = build(Images)
    before = copy.deepcopy(model.state_dict())
    attributes = [set(m.__dict__) for m in model.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    find_split(model, floats(3, 3, 9, 9), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [set(m.__dict__) for m in model.modules()] == attributes
    assert list(model.state_dict()) == list(before)
    assert all(p.grad is None for p in model.parameters())


def test_batch_norm_counts_only_where_it_belongs() -> None:
    """A stage that shares the model runs the stem again to learn a shape; its statistics must not move."""
    make, x = Images, floats(3, 3, 9, 9)
    whole, cut = build(make), build(make)
    whole(x)
    split = find_split(cut, x, 2, ("blocks.1",))
    StageModule(cut, split.stages[1])(StageModule(cut, split.stages[0])(None, x), x)
    left, right = dict(whole.named_buffers()), dict(cut.named_buffers())
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_detour_around_a_boundary_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"carries data around 'second' .* modules that split= names"):
        find_split(build(Detour), X, 2, ("second",))
    model = build(Detour)
    with pytest.raises(ConfigError, match="around 'second'"):
        prove(model, X, plan_stages(model, observe(model, X), ("second", "third")))


def test_places_that_cannot_be_cut_are_avoided() -> None:
    split = find_split(build(Detour), X, 3, costs=[1, 1, 1, 1])
    assert split.boundaries == ("third", "fourth")
    assert split.costs == (2, 1, 1)
    with pytest.raises(ConfigError, match="around 'second'"):
        find_split(build(Detour), X, 4)


def test_what_modules_remember_does_not_hide_a_detour() -> None:
    with pytest.raises(ConfigError, match="carries data around"):
        find_split(build(Remembers), X, 2)


def test_a_module_that_runs_only_sometimes() -> None:
    """The trial did not call `extra`; each stage has a copy, and the one that runs it gets the gradient."""
    split = find_split(build(Sometimes), X, 2, ("third",))
    assert ((0, "extra.weight"), (1, "extra.weight")) in split.tied
    assert_same_gradients(Sometimes, X, split, [[0], [1]])
    assert_same_gradients(Sometimes, X + 20, split, [[0], [1]])
    split = find_split(build(Sometimes), X + 20, 2, ("second",))
    assert split.owners["extra.weight"] == 1
    assert_same_gradients(Sometimes, X, split, [[0], [1]])


@pytest.mark.parametrize(("named", "stage"), [("second", 1), ("second", 0)])
def test_a_batch_that_takes_another_way_is_refused(named: str, stage: int) -> None:
    model = build(Sometimes)
    split = find_split(model, X, 2, (named,))
    received = X if stage else None
    with pytest.raises(ConfigError, match=f"takes another way .* stage {stage} does not come to '{named}'"):
        StageModule(model, split.stages[stage])(received, X + 100)


def test_a_module_called_outside_of_its_stage_is_refused() -> None:
    class Late(Sometimes):
        def forward(self, x: Tensor) -> Tensor:
            h = self.second(torch.tanh(self.first(x)))
            return self.first(h) if bool((x > 50).any()) else h

    model = build(Late)
    split = find_split(model, X, 2, ("second",))
    trim(model, split.stages, {1})
    with pytest.raises(ConfigError, match="'first' is called outside of its stage"):
        StageModule(model, split.stages[1])(X, X + 100)


def test_the_state_of_modules_is_put_back_after_a_stage() -> None:
    model = build(Transformer).eval()
    split = find_split(model, tokens(), 3)
    expected = model(tokens())
    for stage in split.stages:
        received = torch.zeros(3, 6, 8).double() if stage.number else None
        StageModule(model, stage)(received, tokens())
        assert torch.is_grad_enabled()
    assert torch.equal(model(tokens()), expected)


def test_a_stage_keeps_nothing_alive() -> None:
    """The exception that leaves the model refers to its frames; they must be gone when the stage returns."""
    model = build(Transformer)
    split = find_split(model, tokens(), 2)
    seen: list[weakref.ref[Tensor]] = []
    model.embed.register_forward_hook(lambda *a: seen.append(weakref.ref(a[2])))
    gc.disable()
    try:
        with torch.no_grad():
            StageModule(model, split.stages[0])(None, tokens())
        assert seen[0]() is None
    finally:
        gc.enable()


def test_hooks_of_the_boundary_modules_see_what_is_received() -> None:
    model = build(sequential).eval()
    split = find_split(model, X, 2, ("3",))
    seen = []
    model[3].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    given_on = StageModule(model, split.stages[0])(None, X)
    assert seen == []
    StageModule(model, split.stages[1])(given_on, X)
    assert seen[0] is given_on


def test_what_lies_before_a_stage_does_no_work() -> None:
    model = build(gpt2)
    split = find_split(model, tokens(), 2, ("transformer.h.2",))
    ran: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    StageModule(model, split.stages[1])(torch.zeros(3, 6, 8).double(), tokens())
    assert "transformer.h.2.mlp" in ran
    assert not [
        name for name in ran if name.startswith(("transformer.wte", "transformer.h.0", "transformer.h.1"))
    ]


def test_blocks_may_be_recomputed() -> None:
    def make() -> nn.Module:
        model = Transformer()
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        return model

    assert_same_gradients(make, tokens(), find_split(build(make), tokens(), 3), [[0], [1], [2]])


def test_under_autocast_activations_have_its_dtype() -> None:
    torch.manual_seed(0)
    model = sequential()
    with torch.autocast("cpu", torch.bfloat16):
        split = find_split(model, X.float(), 2, ("3",))
        expected = model.eval()(X.float())
        received = StageModule(model, split.stages[0])(None, X.float())
        assert torch.equal(StageModule(model, split.stages[1])(received, X.float()), expected)
    assert split.activations == (((8,), torch.bfloat16),)
    assert received.dtype == torch.bfloat16


@given(
    costs=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    stages=st.integers(1, 8),
)
def test_the_largest_stage_is_as_small_as_can_be(costs: list[int], stages: int) -> None:
    stages = min(stages, len(costs))

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

    found = choose_cuts(costs, stages)
    assert len(found) == stages - 1
    assert list(found) == sorted(set(found))
    assert all(0 < cut < len(costs) for cut in found)
    assert largest(found) == min(map(largest, itertools.combinations(range(1, len(costs)), stages - 1)))


def test_costs_decide_and_can_come_from_elsewhere() -> None:
    model = build(Transformer)
    assert len(span_costs(model, tokens())) == 7
    assert all(cost > 0 for cost in span_costs(model, tokens()))
    assert find_split(model, tokens(), 2, costs=[9, 1, 1, 1, 1, 1, 1]).boundaries == ("blocks.0",)
    assert find_split(model, tokens(), 2, costs=[1, 1, 1, 1, 1, 1, 9]).boundaries == ("head",)
    assert find_split(model, tokens(), 2, ("blocks.1", "blocks.2"), costs=[1, 1, 9]).boundaries == (
        "blocks.2",
    )


def test_one_stage_is_the_whole_model() -> None:
    model = build(Transformer).eval()
    split = find_split(model, tokens(), 1)
    assert split.boundaries == split.tied == ()
    assert torch.equal(StageModule(model, split.stages[0])(None, tokens()), model(tokens()))


def test_the_table_for_people() -> None:
    split = find_split(build(Transformer), tokens(), 2, costs=[1, 1, 1, 1, 1, 1, 4])
    assert describe_split(split).splitlines() == [
        "stage  modules            parameters  share of cost",
        "    0  embed to blocks.3         504           50 %",
        "    1  norm to head              121           50 %",
    ]


@pytest.mark.parametrize(
    ("make", "inputs", "stages", "named", "sentence"),
    [
        (
            Transformer,
            tokens(),
            9,
            (),
            r"9 stages need 8 places .* it has 6 \(blocks.0, .*\); use 7 stages, or name",
        ),
        (lambda: nn.Linear(5, 2), X, 2, (), r"2 stages need 1 places .* it has 0 \(none\); name modules"),
        (Transformer, tokens(), 3, ("blocks.1",), r"3 stages need 2 places .* it has 1 \(blocks.1\)"),
        (Transformer, tokens(), 2, ("block.1",), "no module of the model; did you mean 'blocks.1'"),
        (Transformer, tokens(), 2, ("embed",), "'embed', whose first argument is no floating-point tensor"),
        (Transformer, tokens(), 2, ("blocks",), "'blocks', which one pass calls 0 times"),
        (lambda: Twice(), X, 2, ("mix",), "'mix', which one pass calls 2 times"),
        (
            lambda: Turned(),
            X,
            2,
            ("second",),
            r"fed a tensor of shape \(5, 3\), whose first .* not the 3 samples",
        ),
        (lambda: Turned(), X, 2, (), r"fed a tensor of shape \(5, 3\)"),
        (lambda: own_checkpointing(), tokens(), 2, (), r"call model.gradient_checkpointing_disable\(\) and"),
        (lambda: Restless(), X, 2, ("second",), "two passes of the model over one batch"),
    ],
)
def test_what_cannot_be_split(
    make: Make, inputs: Any, stages: int, named: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find_split(build(make), inputs, stages, named)


def own_checkpointing() -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable()
    return model


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.mix(self.first(x)))


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).T).T


class Restless(nn.Module):
    """Counts its passes where nobody can put it back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.passes = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * next(self.passes))
