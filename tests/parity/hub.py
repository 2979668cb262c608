"""Small Hugging Face models from their configurations, as toys: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.testing.spawn import preload
from shoal.testing.toys import Toy, classify


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 4, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    )


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=8,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def of_logits(output: Any, batch: Any) -> tuple[torch.Tensor, int]:
    return classify(output.logits, batch)


HUB = {
    "gpt2": Toy("GPT-2", gpt2, tokens=True, clip=0.5, loss=of_logits),
    "llama": Toy("Llama", llama, tokens=True, loss=of_logits),
}


def load_for_workers() -> None:
    """Let workers be forked from a process that has these models: else each takes four seconds to import them."""
    preload(*(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama")))
