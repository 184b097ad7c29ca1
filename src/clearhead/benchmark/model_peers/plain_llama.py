"""A Llama model written in the operations that exporters translate, with its cache as arguments and results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PlainLlama", "empty_cache"]


class PlainLlama(nn.Module):
    """A Llama model of transformers with the same weights, whose cached keys and values are tensors.

    Exporters of transformers' own class trace the building of its masks and caches, which changes between releases.

    Args:
        model: a ``LlamaForCausalLM``, whose modules are used.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        config = model.config
        self.embedding, self.norm, self.head = model.model.embed_tokens, model.model.norm, model.lm_head
        self.layers = model.model.layers
        self.frequencies: Tensor
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.register_buffer("frequencies", model.model.rotary_emb.inv_freq.detach().clone())

    def forward(self, ids: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Compute the logits ``[batch, length, vocab]`` of new tokens.

        Args:
            ids: token ids ``[batch, length]``.
            *past: for each layer its cached keys and its values, ``[batch, kv_heads, cached, head_dim]``.

        Returns:
            The logits, and for each layer its keys and its values with those of the new tokens.
        """
        cached, total = past[0].shape[2], past[0].shape[2] + ids.shape[1]
        places = torch.arange(cached, total)
        angles = places[:, None].to(torch.float32) * self.frequencies[None]
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos()[None, None], angles.sin()[None, None]
        allowed = torch.arange(total)[None] <= places[:, None]
        bias = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)[None, None]
        hidden, present = self.embedding(ids), []
        for number, layer in enumerate(self.layers):
            normed = layer.input_layernorm(hidden)
            attended, key, value = self._attention(
                layer.self_attn, normed, past[2 * number], past[2 * number + 1], cos, sin, bias
            )
            present += [key, value]
            hidden = hidden + attended
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return self.head(self.norm(hidden)), *present

    def _attention(
        self, layer: Any, x: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        query = _rotated(self._heads(layer.q_proj(x), self.heads), cos, sin)
        key = torch.cat((key, _rotated(self._heads(layer.k_proj(x), self.kv_heads), cos, sin)), dim=2)
        value = torch.cat((value, self._heads(layer.v_proj(x), self.kv_heads)), dim=2)
        groups = self.heads // self.kv_heads
        output = F.scaled_dot_product_attention(query, _repeated(key, groups), _repeated(value, groups), bias)
        return layer.o_proj(output.transpose(1, 2).flatten(2)), key, value

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.shape[0], x.shape[1], heads, self.head_dim).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _repeated(x: Tensor, groups: int) -> Tensor:
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, groups, length, width).reshape(batch, heads * groups, length, width)


def empty_cache(model: PlainLlama, batch: int) -> list[Tensor]:
    """The arguments ``past`` of a call without cached tokens."""
    shape = (batch, model.kv_heads, 0, model.head_dim)
    return [torch.zeros(shape) for _ in range(2 * len(model.layers))]
