"""The work of the suite ``peers``: a model of transformers with random weights, its tokens, and its exact outputs.

All peers of a row get the same weights. They are rounded to bfloat16 when the model is made, so a peer that stores them
in bfloat16 has the weights that float64 has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor, nn

from clearhead.benchmark.encoders import dropping
from clearhead.benchmark.hugging_face import ENCODERS
from clearhead.benchmark.peers import Call, Groups

__all__ = ["DECODED", "KINDS", "MODELS", "ModelWork", "decoding_call", "encoder_call", "prefill_call", "training_call"]

KINDS: Final = ("encoder", "prefill", "token", "training")
#: A call decodes one token; after this many calls the cache is made anew.
DECODED: Final = 128
#: Sequences of a batch whose outputs are compared with float64.
_CHECKED: Final = 2
#: Standard deviation of what is added to biases and to the gains of norms, which transformers makes 0 and 1.
_SPREAD: Final = 0.02

MODELS: Final[Mapping[str, Mapping[str, int]]] = {
    **ENCODERS,
    "BERT 4x768": {**ENCODERS["BERT base"], "num_hidden_layers": 4, "vocab_size": 1024},
    "Llama 8x1024": {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 8,
        "intermediate_size": 3584,
        "vocab_size": 4096,
    },
}
"""Sizes of the models. BERT base: Devlin et al. 2019, section 3; MiniLM: Wang et al. 2020, section 4.1."""


@dataclass(frozen=True, kw_only=True)
class ModelWork:
    """One piece of work, the same for all peers.

    Args:
        kind: one of ``KINDS``: the states of an encoder; the logits of all tokens of a prompt; the logits of one token
            after a cached prompt; the states of an encoder and the gradients of its parameters.
        size: the fields of the config that differ from transformers' defaults.
        batch: number of sequences.
        length: tokens of each sequence, of the longest if half of the batch is padding, or of the prompt.
        half_filled: whether the lengths are spread from 1 to ``length``.
        dropout: probability of the dropout in training.
    """

    kind: str
    size: Mapping[str, int]
    batch: int
    length: int
    half_filled: bool = False
    dropout: float = 0.0

    @cached_property
    def model(self) -> Any:
        """The model in float32 with torch's scaled_dot_product_attention, in eval mode. Copy it before changing it."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = _llama(self.size) if self.kind in ("prefill", "token") else _bert(self.size)
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter += _SPREAD * torch.randn(parameter.shape)
                parameter.copy_(parameter.bfloat16())
        return model.eval()

    @cached_property
    def ids(self) -> Tensor:
        """Token ids ``[batch, length]``; for ``"token"`` also those to decode, ``[batch, length + DECODED]``."""
        count = self.length + (DECODED if self.kind == "token" else 0)
        words = int(self.model.config.vocab_size)
        return torch.randint(1, words, (self.batch, count), generator=torch.Generator().manual_seed(1))

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each sequence."""
        if not self.half_filled:
            return torch.full((self.batch,), self.length)
        return torch.linspace(1, self.length, self.batch).round().long()

    @cached_property
    def padding_mask(self) -> Tensor | None:
        """int64 ``[batch, length]``, 1 at real tokens; None if all tokens are real."""
        return (torch.arange(self.length) < self.lengths[:, None]).long() if self.half_filled else None

    @cached_property
    def upstream(self) -> Tensor:
        """The gradient of the states in training, ``[batch, length, width]``."""
        shape = (self.batch, self.length, self.size["hidden_size"])
        return torch.randn(shape, generator=torch.Generator().manual_seed(2))

    def exact(self) -> Groups:
        """The outputs in float64, of the sequences that are checked."""
        return self.eager(torch.float64)

    def eager(self, dtype: torch.dtype) -> Groups:
        """The outputs of transformers' eager attention in ``dtype``, of the sequences that are checked."""
        model = deepcopy(self.model).to(dtype)
        model.set_attn_implementation("eager")
        mask = None if self.padding_mask is None else self.padding_mask[-_CHECKED:]
        if self.kind == "training":
            return training_call(model, self.ids, self.upstream, dropout=0.0)()
        if self.kind == "encoder":
            return encoder_call(model, self.ids[-_CHECKED:], mask)()
        if self.kind == "prefill":
            return prefill_call(model, self.ids[-_CHECKED:])()
        with torch.no_grad():
            logits: Tensor = model(input_ids=self.ids[-_CHECKED:, : self.length + 1], logits_to_keep=1).logits
        return ((logits[:, 0],),)

    def pick(self, groups: Groups) -> Groups:
        """The checked part of a call's outputs: the last sequences, without padding."""
        if self.kind == "training":
            return groups
        output = groups[0][0][-_CHECKED:]
        return ((output if self.padding_mask is None else output[self.padding_mask[-_CHECKED:].bool()],),)


def _bert(size: Mapping[str, int]) -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(**size, attn_implementation="sdpa")
    return BertModel(config, add_pooling_layer=False)


def _llama(size: Mapping[str, int]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    # Generation is stopped by the peers' own limits, not by a token.
    config = LlamaConfig(**size, attn_implementation="sdpa", eos_token_id=None, pad_token_id=None)
    return LlamaForCausalLM(config)


def encoder_call(model: Callable[..., Any], ids: Tensor, mask: Tensor | None) -> Call:
    """The call that returns an encoder's states ``[batch, length, width]``."""

    def call() -> Groups:
        with torch.no_grad():
            return ((model(input_ids=ids, attention_mask=mask).last_hidden_state,),)

    return call


def prefill_call(model: Callable[..., Any], ids: Tensor) -> Call:
    """The call that returns the logits ``[batch, length, vocab]`` of a prompt."""

    def call() -> Groups:
        with torch.no_grad():
            return ((model(input_ids=ids).logits,),)

    return call


def decoding_call(step: Callable[..., Any], prompt: Callable[[], Mapping[str, Any]], ids: Tensor, length: int) -> Call:
    """The call that decodes the next token and returns its logits ``[batch, vocab]``.

    Args:
        step: the model, called with token ids ``[batch, 1]`` and what ``prompt`` returns.
        prompt: returns, under the argument's name, a cache that has the first ``length`` tokens.
        ids: tokens of the prompt and those to decode, ``[batch, length + count]``.
        length: tokens of the prompt.
    """
    place, cached = length, prompt()

    def call() -> Groups:
        nonlocal place, cached
        if place == ids.shape[1]:
            place, cached = length, prompt()
        with torch.no_grad():
            logits: Tensor = step(input_ids=ids[:, place : place + 1], **cached).logits
        place += 1
        return ((logits[:, -1],),)

    return call


def training_call(
    model: nn.Module, ids: Tensor, upstream: Tensor, *, dropout: float, wrap: Callable[[Any], Any] = lambda model: model
) -> Call:
    """The call that returns the states in training mode and the gradients of all parameters, ordered by name.

    Args:
        model: an encoder; a copy is trained.
        ids: token ids ``[batch, length]``.
        upstream: the gradient of the states, ``[batch, length, width]``.
        dropout: probability of all dropouts.
        wrap: makes what is called from the copy, as ``torch.compile`` does.
    """
    copy = dropping(model, dropout).train()
    step = wrap(copy)
    parameters = [parameter for _, parameter in sorted(copy.named_parameters())]
    gradient = upstream.to(parameters[0].dtype)

    def call() -> Groups:
        states = step(input_ids=ids).last_hidden_state
        return (states.detach(),), torch.autograd.grad(states, parameters, gradient)

    return call
