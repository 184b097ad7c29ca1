"""Models of transformers that return their attention weights: after ``swap``, and with eager attention."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final, Self

import torch
from torch import Tensor

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.integrations.swap import swap

__all__ = ["EAGER_WEIGHTS", "WeightsRow", "weights_rows"]

EAGER_WEIGHTS: Final = "transformers, eager"
#: Width, heads and feedforward of BERT base (Devlin et al. 2019, section 3); Llama's kind has a third of the key heads.
_WIDTH, _HEADS, _INNER = 768, 12, 3072
_WORDS: Final = 1000


def _bert(layers: int, positions: int) -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=_WORDS, num_hidden_layers=layers, max_position_embeddings=positions, attn_implementation="eager"
    )
    return BertModel(config, add_pooling_layer=False)


def _llama(layers: int, positions: int) -> Any:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=_WORDS,
        hidden_size=_WIDTH,
        intermediate_size=_INNER,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 3,
        max_position_embeddings=positions,
        attn_implementation="eager",
    )
    return LlamaModel(config)


_MODELS: Final = {"BERT base": _bert, "Llama's kind": _llama}


@dataclass(frozen=True, kw_only=True)
class WeightsRow(PlainRow):
    """A call with ``output_attentions=True``, and its backward pass where ``training``.

    Args:
        model: ``"BERT base"`` or ``"Llama's kind"``, in BERT base's width.
        batch: number of sequences; a quarter of the last is padding, on the right.
        length: tokens of each sequence.
        training: whether a loss of states and weights is differentiated too.
        layers: number of layers.
    """

    model: str
    batch: int
    length: int
    training: bool = False
    layers: int = 2
    dtype: torch.dtype = torch.float32
    #: The peak memory is measured too.
    memory: bool = True

    @property
    def title(self) -> str:
        """Description of the work."""
        what = "forward and backward" if self.training else "forward"
        return f"{self.model}, {self.layers} layers, {self.batch}x{self.length} tokens, {what}, {str(self.dtype)[6:]}"

    @property
    def group(self) -> str:
        """``"weights"`` or ``"weights, training"``."""
        return "weights, training" if self.training else "weights"

    @property
    def operations(self) -> None:
        """None: the operations are not counted."""

    def comparison(self) -> Comparison:
        """The contenders; states of the real tokens and all weights are compared."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            theirs = _MODELS[self.model](self.layers, max(self.length, 128)).eval().to(self.dtype)
        ours = deepcopy(theirs)
        swap(ours)
        ids = torch.randint(1, _WORDS, (self.batch, self.length), generator=torch.Generator().manual_seed(1))
        real = torch.ones_like(ids)
        real[-1, self.length - self.length // 4 :] = 0
        return Comparison(
            title=self.title,
            calls={OURS: self._call(ours, ids, real), EAGER_WEIGHTS: self._call(theirs, ids, real)},
            exact=self._call(deepcopy(theirs).double(), ids, real),
            plain=self._call(theirs, ids, real),
            backend=lambda: "model",
        )

    def small(self) -> Self:
        """One layer, a few tokens."""
        return replace(self, batch=min(2, self.batch), length=12, layers=1)

    def _call(self, model: Any, ids: Tensor, real: Tensor) -> Call:
        keep = real.bool()

        def call() -> Groups:
            with torch.set_grad_enabled(self.training):
                outputs = model(input_ids=ids, attention_mask=real, output_attentions=True, use_cache=False)
            # No copy of the weights: it would count as the contender's memory.
            states, attentions = outputs.last_hidden_state[keep], outputs.attentions
            if not self.training:
                return ((states,), tuple(attentions))
            loss = sum((part.square().sum() for part in attentions), states.sum())
            parameters = [part for part in model.parameters() if part.requires_grad]
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            return ((states.detach(),), tuple(grad for grad in grads if grad is not None))

        return call


def weights_rows() -> list[WeightsRow]:
    """Short and long texts, in eval mode and in training."""
    sizes = ((1, 8), (8, 32), (1, 128), (8, 128), (1, 512), (1, 2048))
    rows = [WeightsRow(model=model, batch=batch, length=length) for model, (batch, length) in product(_MODELS, sizes)]
    rows += [WeightsRow(model=model, batch=1, length=512, dtype=torch.bfloat16) for model in _MODELS]
    rows.append(WeightsRow(model="BERT base", batch=1, length=4096, layers=1))
    return [*rows, *(replace(row, training=True) for row in rows if row.length in (32, 512) and row.dtype.itemsize > 2)]
