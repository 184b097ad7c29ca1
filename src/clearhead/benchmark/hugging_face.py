"""Models of transformers: after ``swap``, with torch's own attention, and in ONNX Runtime.

The weights are random, not downloaded: speed does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from clearhead.benchmark.cases import Comparison, PlainRow
from clearhead.benchmark.peers import OURS, Call, Groups
from clearhead.integrations.swap import swap

__all__ = ["ENCODERS", "ONNX_MODEL", "SDPA_MODEL", "CausalRow", "EncoderModelRow", "EncoderStates"]

SDPA_MODEL: Final = "transformers, sdpa"
ONNX_MODEL: Final = "ONNX Runtime"

#: Sizes of BERT base (Devlin et al. 2019, section 3) and of MiniLM with 6 layers (Wang et al. 2020, section 4.1).
ENCODERS: Final = {
    "BERT base": {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072},
    "MiniLM 6x384": {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 6, "intermediate_size": 1536},
}
_CHECKED: Final = 2
#: Up to this many tokens, Python's overhead is a visible part of the time.
_FEW: Final = 64
_DECODED: Final = 8


def _seeded(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def _ours(model: nn.Module) -> nn.Module:
    handed_over = deepcopy(model)
    swap(handed_over)
    return handed_over


@dataclass(frozen=True, kw_only=True)
class EncoderModelRow(PlainRow):
    """The forward pass of a BERT model, float32.

    Args:
        model: ``"BERT base"`` or ``"MiniLM 6x384"``.
        batch: number of sequences.
        length: tokens of each sequence, or of the longest where they are ragged.
        ragged: whether the lengths are spread from 1 to ``length``, so that half of the batch is padding.
        layers: number of layers, by default the model's.
    """

    model: str
    batch: int
    length: int
    ragged: bool = False
    layers: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        """Description of the work."""
        return f"{self.model} size, {self.batch}x{self.length} tokens{' half filled' * self.ragged}, forward"

    @property
    def group(self) -> str:
        """``"encoder"``, ``"encoder, ragged"`` or ``"encoder, few tokens"``."""
        if self.ragged:
            return "encoder, ragged"
        return "encoder" if self.batch * self.length > _FEW else "encoder, few tokens"

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence."""
        if not self.ragged:
            return torch.full((self.batch,), self.length)
        return torch.linspace(1, self.length, self.batch).round().long()

    @property
    def operations(self) -> float:
        """Operations of the linear layers and of attention."""
        size = ENCODERS[self.model]
        width, inner = size["hidden_size"], size["intermediate_size"]
        work: float = sum(
            (8.0 * width**2 + 4.0 * width * inner + 4.0 * count * width) * count for count in self.lengths.tolist()
        )
        return (self.layers or size["num_hidden_layers"]) * work

    def comparison(self) -> Comparison:
        """The contenders; only the last sequences are compared with float64."""
        from transformers import BertConfig, BertModel

        size = {**ENCODERS[self.model], **({} if self.layers is None else {"num_hidden_layers": self.layers})}
        config = BertConfig(**size, max_position_embeddings=max(512, self.length), attn_implementation="sdpa")
        theirs = _seeded(lambda: BertModel(config, add_pooling_layer=False))
        ids = torch.randint(0, config.vocab_size, (self.batch, self.length), generator=torch.Generator().manual_seed(1))
        real = torch.arange(self.length) < self.lengths[:, None]
        eager = deepcopy(theirs)
        eager.set_attn_implementation("eager")
        foreign, left_out = _onnx_call(theirs, ids, real)
        # The last sequences are the longest.
        last, checked = slice(-_CHECKED, None), int(self.lengths[-_CHECKED:].sum())
        return Comparison(
            title=self.title,
            calls={
                OURS: partial(_hidden, _ours(theirs), ids, real),
                SDPA_MODEL: partial(_hidden, theirs, ids, real),
                **foreign,
            },
            left_out=left_out,
            exact=lambda: _hidden(deepcopy(eager).double(), ids[last], real[last]),
            plain=lambda: _hidden(eager, ids[last], real[last]),
            pick=lambda groups: ((groups[0][0][-checked:],),),
            # All begin alike, with an untimed call: each has weights of its own.
            isolated=(OURS, SDPA_MODEL, *foreign) if foreign else (),
            backend=lambda: "model",
        )

    def small(self) -> Self:
        """Two layers, a few tokens."""
        return replace(self, batch=min(2, self.batch), length=8, layers=2)


def _hidden(model: nn.Module, ids: Tensor, real: Tensor | None = None) -> Groups:
    """The states of the real tokens; the model gets no attention mask where all tokens are real."""
    padded = real is not None and not bool(real.all())
    with torch.no_grad():
        states = model(input_ids=ids, attention_mask=real.long() if padded and real is not None else None)
    output: Tensor = states.last_hidden_state
    return ((output if real is None else output[real],),)


class EncoderStates(nn.Module):
    """Wrapper for the exporter: it calls a model with token ids and an optional attention mask."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, real: Tensor | None = None) -> Tensor:
        states: Tensor = self.model(input_ids=ids, attention_mask=real).last_hidden_state
        return states


def _onnx_call(model: nn.Module, ids: Tensor, real: Tensor) -> tuple[dict[str, Call], dict[str, str]]:
    """The model exported by torch and optimised by ONNX Runtime, with as many threads as torch."""
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ModuleNotFoundError as error:
        return {}, {ONNX_MODEL: f"needs the package {error.name}; install clearhead[bench]"}
    content: Any = BytesIO()
    eager: Any = deepcopy(model)
    eager.set_attn_implementation("eager")
    given = (ids,) if bool(real.all()) else (ids, real.long())
    torch.onnx.export(EncoderStates(eager).eval(), given, content, dynamo=False, opset_version=17, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content.getvalue(), options, providers=["CPUExecutionProvider"])
    numbers = {node.name: tensor.numpy() for node, tensor in zip(session.get_inputs(), given, strict=True)}

    def call() -> Groups:
        return ((torch.from_numpy(session.run(None, numbers)[0])[real],),)

    return {ONNX_MODEL: call}, {}


def _gpt2(layers: int, positions: int) -> Any:
    """GPT-2 small (Radford et al. 2019), which has 12 layers."""
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(n_layer=layers, n_positions=positions, attn_implementation="sdpa"))


def _qwen2(layers: int, positions: int) -> Any:
    """Sizes of Qwen2.5 0.5B (Qwen team 2024, table 1), which has 24 layers; with a small vocabulary."""
    from transformers import Qwen2Config, Qwen2Model

    return Qwen2Model(Qwen2Config(**_qwen2_size(layers, positions)))


def _qwen2_size(layers: int, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": 32768,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": layers,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": max(positions, 128),
        "attn_implementation": "sdpa",
    }


def _whisper(layers: int, positions: int) -> Any:
    """The decoder of Whisper base (Radford et al. 2022, table 1), which has 6 layers."""
    from transformers import AutoModel, WhisperConfig

    config = WhisperConfig(
        d_model=512,
        encoder_layers=1,
        encoder_attention_heads=8,
        decoder_layers=layers,
        decoder_attention_heads=8,
        decoder_ffn_dim=2048,
        max_target_positions=max(positions, 448),
    )
    return AutoModel.from_config(config, attn_implementation="sdpa").get_decoder()


def _gemma3(layers: int, positions: int) -> Any:
    """Sizes of Gemma 3 270M, which has 18 layers, all but every sixth with a window; with a small vocabulary."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    config = Gemma3TextConfig(
        vocab_size=32768,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        max_position_embeddings=max(positions, 128),
        attn_implementation="sdpa",
    )
    return Gemma3TextModel(config)


def _granite(layers: int, positions: int) -> Any:
    """Width of Qwen2.5 0.5B with layers that clearhead does not support: it scales the output of each sublayer."""
    from transformers import GraniteConfig, GraniteModel

    return GraniteModel(GraniteConfig(**_qwen2_size(layers, positions), residual_multiplier=0.22))


_CAUSAL: Final[dict[str, Callable[[int, int], Any]]] = {
    "GPT-2": _gpt2,
    "Qwen2.5 0.5B": _qwen2,
    "Whisper base": _whisper,
    "Gemma 3 270M": _gemma3,
    "Granite": _granite,
}
#: The suffix of a model's group in the floors; other models are "Llama's kind".
_KINDS: Final = {
    "GPT-2": "",
    "Whisper base": ", with a memory",
    "Gemma 3 270M": ", windows",
    "Granite": ", layers of other kinds",
}
#: Length of the encoder's output, for models with cross-attention: 30 seconds of speech.
_MEMORY_LEN: Final = {"Whisper base": 1500}


@dataclass(frozen=True, kw_only=True)
class CausalRow(PlainRow):
    """Prefill of a long prompt by a causal model, or decoding after one.

    Args:
        decode: whether to time decoding steps with a cache instead of the prefill.
        model: ``"GPT-2"``, ``"Qwen2.5 0.5B"``, ``"Gemma 3 270M"``, ``"Granite"``, or ``"Whisper base"``, of which this
            is the decoder.
        length: tokens of the prompt.
        layers: number of layers.
        batch: number of sequences; with several, the prompts have from ``length / 2`` to ``length`` tokens, padded on
            the left.
    """

    decode: bool
    model: str = "GPT-2"
    length: int = 1024
    layers: int = 12
    batch: int = 1
    dtype: torch.dtype = torch.float32

    @property
    def title(self) -> str:
        """Description of the work."""
        what = f"{_DECODED} tokens decoded behind {self.length}" if self.decode else f"prefill of {self.length} tokens"
        what += f", {self.batch} padded sequences" * (self.batch > 1)
        size = f"{self.model} size" if self.model == "GPT-2" else f"{self.model} size, {self.layers} layers"
        return f"{size}, {what}" + ("" if self.dtype is torch.float32 else f", {str(self.dtype).split('.')[1]}")

    @property
    def group(self) -> str:
        """Prefill or decode, the kind of model, and the dtype where it is not float32."""
        what = "decode" if self.decode else "prefill"
        named = what + _KINDS.get(self.model, ", Llama's kind")
        named += ", padded" * (self.batch > 1)
        return named if self.dtype is torch.float32 else f"{named}, {str(self.dtype).split('.')[1]}"

    @property
    def operations(self) -> None:
        """None: the operations are not counted."""

    def comparison(self) -> Comparison:
        """The contenders."""
        positions = self.length + _DECODED
        theirs = _seeded(lambda: _CAUSAL[self.model](self.layers, positions)).to(self.dtype)
        words = theirs.config.vocab_size
        ids = torch.randint(1, words, (self.batch, positions), generator=torch.Generator().manual_seed(1))
        first = torch.linspace(self.length // 2, 0, self.batch).long() if self.batch > 1 else torch.zeros(1)
        real = torch.arange(positions) >= first[:, None]
        eager = deepcopy(theirs)
        eager.set_attn_implementation("eager")
        build = partial(
            _decoding if self.decode else _prefill, ids=ids, real=real, memory_len=_MEMORY_LEN.get(self.model)
        )
        return Comparison(
            title=self.title,
            calls={OURS: build(_ours(theirs)), SDPA_MODEL: build(theirs)},
            # Eager attention computes its softmax in float32, where float64's lowest number is -inf: NaN at padding.
            exact=lambda: build(deepcopy(theirs).double())(),
            plain=lambda: build(eager)(),
            backend=lambda: "model",
        )

    def small(self) -> Self:
        """One layer, a few tokens."""
        return replace(self, length=12, layers=1)


def _prefill(model: nn.Module, *, ids: Tensor, real: Tensor, memory_len: int | None) -> Call:
    assert memory_len is None
    return lambda: _hidden(model, ids[:, :-_DECODED], real[:, :-_DECODED])


#: Attributes of a cache's layer that change with its tokens.
_STATE: Final = ("keys", "values", "cumulative_length")


def _decoding(model: Any, *, ids: Tensor, real: Tensor, memory_len: int | None) -> Call:
    """Each call decodes the same tokens after the same prompt, then restores the cache."""
    from transformers import DynamicCache, EncoderDecoderCache

    from clearhead.integrations.transformers.calls import cache_argument

    self_cache = DynamicCache(config=model.config) if hasattr(model.config, "layer_types") else DynamicCache()
    cache: Any = self_cache
    given: dict[str, Any] = {}
    if memory_len is not None:
        cache = EncoderDecoderCache(cache, DynamicCache())
        size, source = (len(ids), memory_len, model.config.d_model), torch.Generator().manual_seed(2)
        given["encoder_hidden_states"] = torch.randn(size, generator=source).to(model.dtype)
    given |= cache_argument(model, cache)
    places = (real.long().cumsum(1) - 1).clamp(min=0)

    def states(begin: int, end: int) -> Tensor:
        if not bool(real.all()):
            given.update(attention_mask=real[:, :end].long(), position_ids=places[:, begin:end])
        output: Tensor = model(input_ids=ids[:, begin:end], **given).last_hidden_state
        return output

    prompt = ids.shape[1] - _DECODED
    with torch.no_grad():
        states(0, prompt)
    # A sliding-window cache cannot be truncated, so its state is saved and restored.
    before = [{name: getattr(layer, name) for name in _STATE if hasattr(layer, name)} for layer in self_cache.layers]

    def call() -> Groups:
        with torch.no_grad():
            outputs = [states(place, place + 1) for place in range(prompt, ids.shape[1])]
        for layer, state in zip(self_cache.layers, before, strict=True):
            for name, value in state.items():
                setattr(layer, name, value)
        return ((torch.cat(outputs, dim=1),),)

    return call
