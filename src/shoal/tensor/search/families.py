"""Attention written by others: where its projections are, by the name of its class.

The modules named here shape their data as (…, -1, size of a head), so that with fewer heads they do the same work for
fewer heads. What is not so in a class stands in its entry.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal.tensor.projection import is_projection, outputs


@dataclass(frozen=True)
class Family:
    """Where an attention has its parts: `columns` make queries, keys and values, `row` takes what comes out.

    `packed` groups lie in one matrix; `size` is the attribute with the size of a head; `divide` are attributes that
    count values of all heads, so that they become smaller; `inside` is the module below that does the attention.
    """

    columns: tuple[str, ...]
    row: str
    size: str
    packed: int = 1
    divide: tuple[str, ...] = ()
    inside: str = ""


SEPARATE = Family(("q_proj", "k_proj", "v_proj"), "o_proj", "head_dim")

FAMILIES: dict[str, Family] = {
    "LlamaAttention": SEPARATE,
    "MistralAttention": SEPARATE,
    "Qwen2Attention": SEPARATE,
    "GPT2Attention": Family(("c_attn",), "c_proj", "head_dim", packed=3, divide=("split_size",)),
    "BertAttention": Family(
        ("self.query", "self.key", "self.value"), "output.dense", "attention_head_size", inside="self"
    ),
}


def family_of(module: nn.Module) -> Family | None:
    """The entry for this module, if there is one and the module has the parts that it names."""
    family = FAMILIES.get(type(module).__name__)
    if family is None:
        return None
    below = dict(module.named_modules())
    parts = [below.get(name) for name in (*family.columns, family.row)]
    return family if all(part is not None and is_projection(part) for part in parts) else None


def heads_of(module: nn.Module, family: Family) -> dict[str, int]:
    """How many heads each of the column projections makes (in each of its packed groups)."""
    size = int(getattr(module.get_submodule(family.inside), family.size))
    return {name: outputs(module.get_submodule(name)) // family.packed // size for name in family.columns}


@dataclass(frozen=True)
class BlockShape:
    """A block whose norms and dropouts see each position of the sequence by itself."""

    attention: str
    norms: tuple[str, ...]
    dropouts: tuple[str, ...] = ()


LLAMA = BlockShape("self_attn", ("input_layernorm", "post_attention_layernorm"))

BLOCKS: dict[str, BlockShape] = {
    "TransformerEncoderLayer": BlockShape("self_attn", ("norm1", "norm2"), ("dropout1", "dropout2")),
    "LlamaDecoderLayer": LLAMA,
    "MistralDecoderLayer": LLAMA,
    "Qwen2DecoderLayer": LLAMA,
    "GPT2Block": BlockShape("attn", ("ln_1", "ln_2"), ("attn.resid_dropout", "mlp.dropout")),
}
