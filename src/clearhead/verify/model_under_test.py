"""How the models that ``verify_model`` knows are called: sequences in rows, packed, in chunks, from a cache."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from clearhead.errors import UnsupportedError
from clearhead.masks import Documents
from clearhead.nn import Decoder, DecoderBlock, Encoder, EncoderBlock, LanguageModel, SequenceClassifier
from clearhead.verify.law import NotApplicable

__all__ = ["Generated", "ModelCall", "ModelUnderTest", "Piece", "chunked", "rows_of", "under_test"]

#: Values and ids at the padding, which must not matter.
_PADDING: Final = 9.0


@dataclass(frozen=True)
class Piece:
    """Tokens ``start`` to ``stop`` of one of the sequences."""

    sequence: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ModelCall:
    """One call of a model.

    Attributes:
        pieces: the tokens of each row; in a packed call those of one row, one piece after the other.
        side: where rows are padded, ``"right"`` or ``"left"``.
        packed: whether the pieces are packed into one row.
        cached: whether the call continues the cache of the call before it, or starts one that others continue.
    """

    pieces: tuple[Piece, ...]
    side: str = "right"
    packed: bool = False
    cached: bool = False

    @property
    def longest(self) -> int:
        return max(piece.count for piece in self.pieces)

    @property
    def is_padded(self) -> bool:
        return any(piece.count < self.longest for piece in self.pieces)

    def offset(self, place: int) -> int:
        """Where the piece begins in its row."""
        if self.packed:
            return sum(piece.count for piece in self.pieces[:place])
        return self.longest - self.pieces[place].count if self.side == "left" else 0

    def part(self, x: Tensor, place: int) -> Tensor | None:
        """The piece's part of a tensor that has rows or packed tokens; None for other tensors."""
        count, total = self.pieces[place].count, sum(piece.count for piece in self.pieces)
        rows = 1 if self.packed else len(self.pieces)
        length = total if self.packed else self.longest
        if x.dim() > 1 and x.shape[:2] == (rows, length):
            start = self.offset(place)
            return x[0 if self.packed else place, start : start + count]
        if x.dim() > 1 and x.shape[:2] == (1, total):
            # A model that removes padding packs the rows itself.
            start = sum(piece.count for piece in self.pieces[:place])
            return x[0, start : start + count]
        return x[place] if x.dim() == 2 and x.shape[0] == rows and not self.packed else None


class Generated(NamedTuple):
    """A prompt with its continuation, and the logits of every new token where they are known."""

    ids: Tensor
    logits: Tensor | None


def rows_of(lengths: Sequence[int], order: Sequence[int], side: str = "right") -> list[ModelCall]:
    """One call with a row for each of some sequences."""
    return [ModelCall(tuple(Piece(place, 0, lengths[place]) for place in order), side)]


def chunked(sequences: Sequence[int], ends: Sequence[int]) -> list[ModelCall]:
    """A cached call for each chunk of sequences of one length."""
    return [
        ModelCall(tuple(Piece(place, start, end) for place in sequences), cached=True)
        for start, end in zip((0, *ends), ends, strict=False)
    ]


class ModelUnderTest(ABC):
    """A model, and how it is called.

    Args:
        model: the model.
        encode: makes token ids from a text; None for random ids.
    """

    #: What the model is, in words.
    kind: str

    def __init__(self, model: nn.Module, encode: Callable[[str], Sequence[int]] | None = None) -> None:
        self.model, self.encode = model, encode

    @property
    def parameter(self) -> Tensor:
        """The first parameter, whose dtype and device the model has."""
        parameter = next(self.model.parameters(), None)
        return torch.empty(0) if parameter is None else parameter

    @property
    def longest(self) -> int:
        """The longest sequence that the model reads."""
        return 2**20

    @abstractmethod
    def draw(self, lengths: Sequence[int]) -> list[Tensor]:
        """A sequence of each length, deterministic."""

    @abstractmethod
    def forward(self, batch: Tensor, call: ModelCall, cache: Any) -> tuple[Tensor, Any]:
        """The output of a padded batch, ``[rows, len, ...]`` or ``[rows, ...]``, and the cache for the next call."""

    def inputs(self) -> nn.Module | None:
        """The module whose output is the model's first states; None if the sequences are states."""
        return None

    def generate(self, prompts: Sequence[Tensor], count: int, seed: int | None) -> list[Generated]:
        """Continuations of prompts, greedy or from a seed."""
        raise NotApplicable("it does not generate")

    def batch(self, sequences: Sequence[Tensor], call: ModelCall) -> Tensor:
        """The call's rows, padded or packed."""
        parts = [sequences[piece.sequence][piece.start : piece.stop] for piece in call.pieces]
        if call.packed:
            return torch.cat(parts)[None]
        like = parts[0]
        # Ids are checked against the vocabulary.
        filling = 1 if not like.is_floating_point() else _PADDING
        batch = like.new_full((len(parts), call.longest, *like.shape[1:]), filling)
        for place, part in enumerate(parts):
            start = call.offset(place)
            batch[place, start : start + len(part)] = part
        return batch


class _OfTokens(ModelUnderTest):
    """A model whose sequences are token ids."""

    vocab_size: int = 0

    def draw(self, lengths: Sequence[int]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(7)
        device = self.parameter.device
        if self.encode is None:
            return [
                torch.randint(2, max(3, self.vocab_size), (length,), generator=generator).to(device)
                for length in lengths
            ]
        texts = [" ".join(_WORDS[place % len(_WORDS) :] + _WORDS * length) for place, length in enumerate(lengths)]
        return [
            torch.tensor([*self.encode(text)][:length], device=device)
            for text, length in zip(texts, lengths, strict=True)
        ]


_WORDS: Final = [
    "the",
    "order",
    "in",
    "which",
    "a",
    "processor",
    "adds",
    "numbers",
    "decides",
    "the",
    "last",
    "digits",
    "of",
    "every",
    "sum",
    "it",
    "gives",
]


class _NnTokens(_OfTokens):
    """``LanguageModel`` and ``SequenceClassifier``."""

    model: LanguageModel | SequenceClassifier

    def __init__(self, model: LanguageModel | SequenceClassifier, encode: Any = None) -> None:
        super().__init__(model, encode)
        self.vocab_size = model.embedding.vocab_size
        self.kind = "language model" if isinstance(model, LanguageModel) else "sequence classifier"

    @property
    def longest(self) -> int:
        return self.model.max_len

    def inputs(self) -> nn.Module | None:
        return self.model.embedding.token

    def forward(self, batch: Tensor, call: ModelCall, cache: Any) -> tuple[Tensor, Any]:
        if call.packed:
            raise NotApplicable("its positions go on over packed sequences; it packs padded ones itself")
        if call.side == "left" and call.is_padded:
            raise NotApplicable("it pads to the right only")
        lengths = [piece.count for piece in call.pieces] if call.is_padded else None
        if not isinstance(self.model, LanguageModel):
            if call.cached:
                raise NotApplicable("it has no cache")
            return self.model(batch, lengths=lengths), None
        if call.cached:
            cache = self.model.new_cache() if cache is None else cache
            return self.model(batch, cache=cache), cache
        return self.model(batch, lengths=lengths), None

    def generate(self, prompts: Sequence[Tensor], count: int, seed: int | None) -> list[Generated]:
        if not isinstance(self.model, LanguageModel):
            return super().generate(prompts, count, seed)
        steps: list[Tensor] = []
        handle = self.model.head.register_forward_hook(lambda module, args, logits: steps.append(logits[0]))
        try:
            temperature = 0.0 if seed is None else 1.0
            ids = self.model.generate([*prompts], count, temperature=temperature, seed=seed)
        finally:
            handle.remove()
        # All prompts start together and none ends before the others.
        logits = torch.stack(steps, dim=1) if all(len(step) == len(prompts) for step in steps) else None
        return [Generated(each, None if logits is None else logits[place]) for place, each in enumerate(ids)]


class _NnStates(ModelUnderTest):
    """Encoders, decoders and their blocks, whose sequences are states."""

    kind = "stack of states"
    model: Encoder | Decoder | EncoderBlock | DecoderBlock

    def draw(self, lengths: Sequence[int]) -> list[Tensor]:
        generator, like = torch.Generator().manual_seed(7), self.parameter
        model = self.model
        width = model.embed_dim if isinstance(model, (Encoder, Decoder)) else model.attention.embed_dim
        return [torch.randn(length, width, generator=generator).to(like) for length in lengths]

    def forward(self, batch: Tensor, call: ModelCall, cache: Any) -> tuple[Tensor, Any]:
        options: dict[str, Any] = {}
        model = self.model
        if call.packed:
            options["mask"] = Documents(lengths=[piece.count for piece in call.pieces])
        elif call.is_padded:
            if call.side == "left" or not isinstance(model, (Encoder, Decoder)):
                raise NotApplicable("it pads to the right only, and blocks take no lengths")
            options["lengths"] = [piece.count for piece in call.pieces]
        if call.cached:
            if not isinstance(model, Decoder):
                raise NotApplicable("it has no cache")
            cache = model.new_cache() if cache is None else cache
            options["cache"] = cache
        return model(batch, **options), cache


class _TorchStates(ModelUnderTest):
    """torch's encoders, batch first."""

    kind = "torch encoder"
    model: nn.TransformerEncoder | nn.TransformerEncoderLayer

    def draw(self, lengths: Sequence[int]) -> list[Tensor]:
        layer = self.model.layers[0] if isinstance(self.model, nn.TransformerEncoder) else self.model
        generator, width = torch.Generator().manual_seed(7), layer.self_attn.embed_dim
        if not layer.self_attn.batch_first:
            raise UnsupportedError.about(
                "verify_model", "model", must="be batch first", got="batch_first=False", then="Build it batch first."
            )
        return [torch.randn(length, width, generator=generator).to(self.parameter) for length in lengths]

    def forward(self, batch: Tensor, call: ModelCall, cache: Any) -> tuple[Tensor, Any]:
        if call.packed or call.cached:
            raise NotApplicable("it takes no packed sequences, and has no cache")
        padding = None
        if call.is_padded:
            padding = torch.ones(batch.shape[:2], dtype=torch.bool, device=batch.device)
            for place, piece in enumerate(call.pieces):
                padding[place, call.offset(place) : call.offset(place) + piece.count] = False
        return self.model(batch, src_key_padding_mask=padding), None


class _Transformers(_OfTokens):
    """Models of Hugging Face transformers that read token ids."""

    kind = "transformers model"
    model: Any

    def __init__(self, model: Any, encode: Any = None) -> None:
        super().__init__(model, encode)
        config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
        self.vocab_size, self.config = config.vocab_size, config
        self.options = frozenset(inspect.signature(model.forward).parameters)
        # transformers is installed, as the model is one of its own.
        from clearhead.integrations.transformers.calls import cache_in, cache_name

        self.cache_name, self.cache_in = cache_name(model), cache_in

    @property
    def longest(self) -> int:
        return int(getattr(self.config, "max_position_embeddings", 2**20))

    @cached_property
    def decodes(self) -> bool:
        """Whether a call returns a cache."""
        if "use_cache" not in self.options:
            return False
        ids = torch.ones(1, 2, dtype=torch.int64, device=self.parameter.device)
        with torch.no_grad():
            return self.cache_in(self.model(input_ids=ids, use_cache=True)) is not None

    def inputs(self) -> nn.Module | None:
        module: nn.Module = self.model.get_input_embeddings()
        return module

    def forward(self, batch: Tensor, call: ModelCall, cache: Any) -> tuple[Tensor, Any]:
        options: dict[str, Any] = {}
        if call.packed and not self.decodes:
            raise NotApplicable("encoders of transformers take no packed rows")
        if call.packed or (call.is_padded and call.side == "left"):
            if "position_ids" not in self.options:
                raise NotApplicable("its forward takes no position_ids")
            positions = torch.zeros(batch.shape, dtype=torch.int64, device=batch.device)
            for place, piece in enumerate(call.pieces):
                start = call.offset(place)
                positions[0 if call.packed else place, start : start + piece.count] = torch.arange(piece.count)
            options["position_ids"] = positions
        if call.is_padded and not call.packed:
            mask = torch.zeros(batch.shape, dtype=torch.int64, device=batch.device)
            for place, piece in enumerate(call.pieces):
                mask[place, call.offset(place) : call.offset(place) + piece.count] = 1
            options["attention_mask"] = mask
        if "use_cache" in self.options:
            options["use_cache"] = call.cached
        if call.cached:
            if not self.decodes:
                raise NotApplicable("it has no cache")
            if self.cache_name is None:
                raise NotApplicable("its forward returns a cache and takes none by a name that is known")
            options[self.cache_name] = cache
        result = self.model(input_ids=batch, **options)
        cache = self.cache_in(result) if call.cached else None
        return result[0] if not hasattr(result, "logits") else result.logits, cache

    def generate(self, prompts: Sequence[Tensor], count: int, seed: int | None) -> list[Generated]:
        if seed is not None:
            raise NotApplicable("transformers draws from torch's generator, in the order of the batch")
        if not getattr(self.model, "can_generate", lambda: False)():
            raise NotApplicable("it does not generate")
        call = ModelCall(tuple(Piece(place, 0, len(prompt)) for place, prompt in enumerate(prompts)), "left")
        batch = self.batch(prompts, call)
        mask = torch.ones_like(batch)
        for place in range(len(prompts)):
            mask[place, : call.offset(place)] = 0
        options = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
        options |= {"output_logits": True, "return_dict_in_generate": True}
        done = self.model.generate(batch, attention_mask=mask, **options)
        logits = torch.stack(done.logits, dim=1)
        return [Generated(row[call.offset(place) :], logits[place]) for place, row in enumerate(done.sequences)]


def under_test(model: nn.Module, encode: Callable[[str], Sequence[int]] | None) -> ModelUnderTest:
    """A model, with how it is called.

    Raises:
        UnsupportedError: ``verify_model`` does not know how to call the model.
    """
    if isinstance(model, (LanguageModel, SequenceClassifier)):
        return _NnTokens(model, encode)
    if isinstance(model, (Encoder, Decoder, EncoderBlock, DecoderBlock)):
        return _NnStates(model)
    if isinstance(model, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
        return _TorchStates(model)
    bases = {f"{base.__module__}.{base.__name__}" for base in type(model).__mro__}
    decodes_alone = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if (
        "transformers.modeling_utils.PreTrainedModel" in bases
        and model.main_input_name == "input_ids"
        and decodes_alone
    ):
        return _Transformers(model, encode)
    raise UnsupportedError.about(
        "verify_model",
        "model",
        must="be a LanguageModel, SequenceClassifier, Encoder, Decoder or block of ch.nn, an nn.TransformerEncoder, or "
        "a model of transformers that reads token ids",
        got=type(model).__name__,
        then="Verify its parts.",
    )
