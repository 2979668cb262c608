"""A cut model computes what it computed whole: outputs, gradients and ten steps of AdamW, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.errors import ConfigError
from shoal.tensor import TensorLayout, TensorOptions, apply_cuts, cut, find_cuts, join, loss_context
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.world.world import World

Batch = dict[str, Any]
Case = tuple[nn.Module, Batch, Callable[[Any, Batch], Tensor]]
STEPS = 10


def words(rows: int, high: int = 13) -> Tensor:
    return torch.randint(0, high, (rows, 8), generator=torch.Generator().manual_seed(rows))


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def next_word(output: Any, batch: Batch) -> Tensor:
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"].roll(-1, 1).flatten(), reduction="sum")


def squares(output: Any, batch: Batch) -> Tensor:  # noqa: ARG001
    return sum((leaf**2 * torch.linspace(0, 1, leaf.shape[-1])).sum() for leaf in output if leaf is not None)


class Encoder(nn.Module):
    """Embedding with a padding row, positions, blocks and an untied head."""

    def __init__(self, drop: float = 0.0, norm_first: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8, padding_idx=9)
        self.place = nn.Embedding(8, 8)
        layer = nn.TransformerEncoderLayer(
            8, 4, 12, drop, "gelu", norm_first=norm_first, batch_first=batch_first, dtype=torch.float64
        )
        self.body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
        self.head = nn.Linear(8, 13)
        self.batch_first = batch_first

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.place(torch.arange(8))
        mask = nn.Transformer.generate_square_subsequent_mask(8, dtype=torch.float64)
        if not self.batch_first:
            return self.head(self.body(x.transpose(0, 1), mask).transpose(0, 1))
        padding = input_ids == 3
        padding[:, 0] = False  # a position that sees nothing is NaN in torch's fused layer
        return self.head(self.body(x, mask, src_key_padding_mask=padding))


class Translator(nn.Module):
    """A decoder layer: attention to itself and to another sequence, dropout everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(8, 2, 10, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor]:
        return (self.layer(x, memory),)


class Attends(nn.Module):
    """Attention in the ways it can be called."""

    def __init__(self, need: bool = True, average: bool = True, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, **options)
        self.need, self.average = need, average
        self.batch_first = bool(options.get("batch_first"))

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor | None]:
        mask = noise(2 * 4, 6, 5)  # one per sample and head
        padding = torch.zeros(2, 5, dtype=torch.bool)
        padding[1, 3:] = True
        if not self.batch_first:
            x, other = x.transpose(0, 1), other.transpose(0, 1)
        value = other[..., :3] if self.attention.vdim == 3 else other
        out, weights = self.attention(
            x, other, value, padding, self.need, mask, average_attn_weights=self.average
        )
        return out, weights


class Own(nn.Module):
    """Attention as people write it; cut by rules only."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor]:
        q, k, v = (p(x).view(*x.shape[:2], -1, 2).transpose(1, 2) for p in (self.q, self.k, self.v))
        return (self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)),)


def toy(name: str) -> Case:
    samples = [TOYS[name].data()[place] for place in range(12)]
    x, y = (torch.stack(list(column)) for column in zip(*samples, strict=True))
    x = x if x.dtype == torch.int64 else x.double()

    def loss(output: Any, batch: Batch) -> Tensor:  # noqa: ARG001
        labels = y.reshape(-1)
        return F.cross_entropy(output.reshape(len(labels), -1), labels, reduction="sum", ignore_index=-1)

    batch = {"tokens" if x.dtype == torch.int64 else "x": x}
    return TOYS[name].model(), batch, loss


def hugging(name: str, **options: Any) -> Case:
    import transformers

    small = {"vocab_size": 13, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 9, "use_cache": False}
    kinds = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 8}),
        "llama": (
            "LlamaForCausalLM",
            "LlamaConfig",
            {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
            | {"intermediate_size": 14},
        ),
        "bert": (
            "BertForMaskedLM",
            "BertConfig",
            {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 12}
            | {"max_position_embeddings": 8},
        ),
    }
    model, config, sizes = kinds[name]
    made = getattr(transformers, model)(getattr(transformers, config)(**(small | sizes | options)))
    return made, {"input_ids": words(3)}, next_word


CASES: dict[str, tuple[Callable[[], Case], TensorOptions, dict[str, str]]] = {
    **{
        name: (lambda name=name: toy(name), TensorOptions(), {})
        for name in ("tied", "frozen", "odd", "dropout")
    },
    "encoder": (lambda: (Encoder(), {"input_ids": words(3)}, next_word), TensorOptions(), {}),
    "encoder, dropout": (lambda: (Encoder(0.2), {"input_ids": words(3)}, next_word), TensorOptions(), {}),
    "encoder, sequence": (
        lambda: (Encoder(0.2), {"input_ids": words(3)}, next_word),
        TensorOptions(sequence=True),
        {},
    ),
    "encoder, norms last, time first, sequence, loss": (
        lambda: (Encoder(0.2, False, False), {"input_ids": words(3)}, next_word),
        TensorOptions(sequence=True, loss=True),
        {},
    ),
    "decoder": (
        lambda: (Translator(), {"x": noise(2, 6, 8), "memory": noise(2, 5, 8)}, squares),
        TensorOptions(),
        {},
    ),
    "attention": (
        lambda: (Attends(batch_first=True), {"x": noise(2, 6, 8), "other": noise(2, 5, 8)}, squares),
        TensorOptions(),
        {},
    ),
    "attention, separate": (
        lambda: (
            Attends(average=False, kdim=5, vdim=3, dropout=0.3, add_zero_attn=True),
            {"x": noise(2, 6, 8), "other": noise(2, 5, 5)},
            squares,
        ),
        TensorOptions(),
        {},
    ),
    "attention, no weights": (
        lambda: (Attends(need=False, bias=False), {"x": noise(2, 6, 8), "other": noise(2, 5, 8)}, squares),
        TensorOptions(),
        {},
    ),
    "rules": (
        lambda: (Own(), {"x": noise(2, 6, 8)}, squares),
        TensorOptions(),
        {"[qkv]": "column", "o": "row"},
    ),
    "gpt2": (lambda: hugging("gpt2"), TensorOptions(), {}),
    "gpt2, eager, sequence, loss": (
        lambda: hugging("gpt2", attn_implementation="eager"),
        TensorOptions(sequence=True, loss=True),
        {},
    ),
    "llama": (lambda: hugging("llama"), TensorOptions(), {}),
    "llama, eager, sequence, loss": (
        lambda: hugging("llama", attn_implementation="eager", attention_dropout=0.1),
        TensorOptions(sequence=True, loss=True),
        {},
    ),
    "bert": (lambda: hugging("bert"), TensorOptions(), {}),
}


HUGGING = [name for name in CASES if name.startswith(("gpt2", "llama", "bert"))]
PLAIN = [name for name in CASES if name not in HUGGING]


def build(name: str) -> Case:
    torch.manual_seed(1)
    with torch.random.fork_rng():
        model, batch, loss = CASES[name][0]()
    return model.double().train(), batch, loss


def steps(
    model: nn.Module, batch: Batch, loss: Callable[[Any, Batch], Tensor], options: TensorOptions
) -> tuple[list[float], dict[str, Tensor]]:
    """Ten steps of AdamW on local tensors: the losses, and the gradients of the first."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    locals_ = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in named.items()}
    held = [nn.Parameter(local.detach()) for local in locals_.values()]
    # The bias of an attention's keys has a gradient of zero, so all that is seen of it is rounding, 1e-17 to 1e-15 by
    # processor, which AdamW divides by its eps. Its default of 1e-8 would show that here, however right the sums are.
    optimizer = torch.optim.AdamW(held, lr=1e-3, eps=1e-6, weight_decay=0.1)
    losses: list[float] = []
    first: dict[str, Tensor] = {}
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        with loss_context(options):
            total = loss(model(**batch), batch)
            total.backward()
        losses.append((total.full_tensor() if isinstance(total, DTensor) else total).item())
        for (name, p), local in zip(named.items(), held, strict=True):
            grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            local.grad = None if grad is None else grad.clone()
            if step == 0 and grad is not None:
                first[name] = grad.clone()
            p.grad = None
        optimizer.step()
    return losses, first


def compare(world: World, name: str) -> dict[str, float]:
    """Train whole and cut; the largest differences."""
    del world
    options, rules = CASES[name][1:]
    whole, batch, loss = build(name)
    model, _, _ = build(name)
    degree = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tensor",))
    names = [name for name, _ in model.named_parameters()]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    before = torch.get_rng_state()
    cuts = find_cuts(model, lambda: model(**batch), degree, rules)
    assert torch.equal(before, torch.get_rng_state()), "the trial pass must not touch the random state"
    layout = apply_cuts(model, cuts, mesh, options)
    assert [name for name, _ in model.named_parameters()] == names
    check_parts(model, layout, start, mesh.get_local_rank())
    true_losses, true_grads = steps(whole, batch, loss, TensorOptions())
    losses, grads = steps(model, batch, loss, options)
    assert set(grads) == set(true_grads)
    group = mesh.get_group()
    result = {"loss": max(abs(a - b) for a, b in zip(losses, true_losses, strict=True))}
    result["gradients"] = max(
        float((join(name, grad, layout, group) - true_grads[name]).abs().max())
        for name, grad in grads.items()
    )
    true = dict(whole.named_parameters())
    found = {
        name: join(name, p.to_local() if isinstance(p, DTensor) else p, layout, group)
        for name, p in model.named_parameters()
    }
    result["parameters"] = max(float((p - true[name]).detach().abs().max()) for name, p in found.items())
    result["moved"] = max(float((true[name].detach() - start[name]).abs().max()) for name in start)
    check_eval(model, whole, batch)
    return result


def check_parts(model: nn.Module, layout: TensorLayout, start: dict[str, Tensor], rank: int) -> None:
    for name, p in model.named_parameters():
        local = p.to_local() if isinstance(p, DTensor) else p
        assert isinstance(p, DTensor) == (name in layout.pieces)
        assert p.shape == start[name].shape
        assert torch.equal(local, cut(name, start[name], layout, rank))


def check_eval(model: nn.Module, whole: nn.Module, batch: Batch) -> None:
    """In evaluation, where torch would like to take a fused path past the cut layers."""
    with torch.no_grad():
        found, true = model.eval()(**batch), whole.eval()(**batch)
    for a, b in zip(leaves(found), leaves(true), strict=True):
        assert torch.allclose(a, b, atol=1e-8)


def leaves(output: Any) -> list[Tensor]:
    values = (
        [output] if isinstance(output, Tensor) else output if isinstance(output, tuple) else [output.logits]
    )
    return [v.full_tensor() if isinstance(v, DTensor) else v for v in values if v is not None]


def compare_all(world: World, names: list[str]) -> dict[str, dict[str, float]]:
    return {name: compare(world, name) for name in names}


def check(found: dict[str, float]) -> None:
    assert found["moved"] > 1e-3
    assert all(found[what] < 1e-10 for what in ("loss", "gradients", "parameters")), found


@pytest.mark.parametrize("name", PLAIN)
def test_equal_to_one_process(name: str) -> None:
    for found in spawn(compare, 2, name):
        check(found)


def test_hugging_face() -> None:
    """One set of workers for all of them: to import the library takes longer than to train."""
    for result in spawn(compare_all, 2, HUGGING):
        assert list(result) == HUGGING
        for found in result.values():
            check(found)


@pytest.mark.parametrize("name", ["odd", "tied", "encoder, norms last, time first, sequence, loss"])
def test_four_workers(name: str) -> None:
    for found in spawn(compare, 4, name):
        check(found)


def test_gloo() -> None:
    for found in spawn(compare, 2, "encoder, sequence", backend="gloo"):
        check(found)


def refused(world: World) -> str:
    """A sequence that only the training data has: the trial pass could not know."""
    model = Encoder().double()
    cuts = find_cuts(model, lambda: model(words(3)), 2, {})
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    apply_cuts(model, cuts, mesh, TensorOptions(sequence=True))
    layer = model.get_submodule("body.layers.0")
    with pytest.raises(ConfigError) as error:
        layer(noise(2, 7, 8))
    return str(error.value)


def test_an_odd_sequence_is_refused() -> None:
    for sentence in spawn(refused, 2):
        assert sentence.startswith("a sequence of 7 positions cannot be shared evenly by tp2(sequence=true)")


def recomputed(world: World) -> float:
    """Blocks that are computed again in backward, with dropout: the largest difference of a gradient."""
    whole, batch, loss = build("encoder, dropout")
    model, _, _ = build("encoder, dropout")
    mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("tensor",))
    layout = apply_cuts(model, find_cuts(model, lambda: model(**batch), 2, {}), mesh, TensorOptions())
    for one in model.get_submodule("body.layers").children():
        one.forward = partial(checkpoint, one.forward, use_reentrant=False)
    for one in (whole, model):
        for _ in range(2):
            one.zero_grad()
            torch.manual_seed(4)
            loss(one(**batch), batch).backward()
    true = {name: p.grad for name, p in whole.named_parameters()}
    grads = {name: p.grad for name, p in model.named_parameters()}
    locals_ = {name: g.to_local() if isinstance(g, DTensor) else g for name, g in grads.items()}
    return max(
        float((join(name, g, layout, mesh.get_group()) - true[name]).abs().max())
        for name, g in locals_.items()
    )


def test_blocks_may_be_recomputed() -> None:
    for difference in spawn(recomputed, 2):
        assert difference < 1e-12
