"""A model in a folder with the way a text goes into it: a run of ``clearhead train`` or a model of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.errors import ClearheadError, DataError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Reader", "read_ids", "reader_of"]

#: Tokens at once for a model that tells no limit.
_NO_LIMIT = 4096


@dataclass(frozen=True)
class Reader:
    """A model with the way a text goes into it.

    ``encode`` gives the text's ids, ``framed`` what the model is given for some of them, ``words`` their texts.
    ``limit`` is the most tokens of the text that it reads at once.
    """

    name: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    framed: Callable[[list[int]], list[int]]
    words: Callable[[list[int]], list[str]]
    limit: int
    run: Callable[[Tensor], object]


def read_ids(function: str, reader: Reader, text: str) -> list[int]:
    """The text's tokens; there must be some."""
    ids = reader.encode(text)
    if not ids:
        raise DataError.about(function, "text", must="have at least one token", got="none", then="Give some words.")
    return ids


def reader_of(function: str, folder: Path) -> Reader:
    """The model in a folder, by what its ``config.json`` says."""
    config = folder / "config.json"
    try:
        read = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except (OSError, ValueError, RecursionError):
        read = {}
    if isinstance(read, dict) and "model_type" in read and "task" not in read:
        return _from_transformers(function, folder)
    return _from_run(function, folder)


def _from_run(function: str, folder: Path) -> Reader:
    from clearhead.train.saved import load_run

    run = load_run(folder, function=function)

    def encode(text: str) -> list[int]:
        run.check(text)
        return run.tokenizer.encode_long(text)

    def words(ids: list[int]) -> list[str]:
        return [run.tokenizer.decode([identity]) for identity in ids]

    return Reader(str(folder), run.model, encode, lambda ids: ids, words, run.max_len, run.model)


def _from_transformers(function: str, folder: Path) -> Reader:
    """A model of Hugging Face transformers from its folder: safetensors only, no code of its own, nothing fetched."""
    import transformers

    from clearhead.bridges import swap

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), **local)
        model = transformers.AutoModel.from_pretrained(str(folder), use_safetensors=True, **local).eval()
    except ClearheadError:
        raise
    except Exception as failure:
        must, got = "hold a model and a tokenizer that transformers reads", str(failure)[:200]
        raise DataError.about(function, str(folder), must=must, got=got, then="Name another folder.") from failure
    config = model.config
    if config.is_encoder_decoder:
        model = model.get_encoder()
    swap(model)
    before, after = _frame(tokenizer)
    limit = max(1, _limit(config, tokenizer) - len(before) - len(after))
    return Reader(
        name=str(folder),
        model=model,
        limit=limit,
        run=model,
        encode=lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
        framed=lambda ids: [*before, *ids, *after],
        words=lambda ids: list(tokenizer.convert_ids_to_tokens(ids)),
    )


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after the ids of a text."""
    probe = "a"
    bare = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
    framed = list(tokenizer(probe)["input_ids"])
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


def _limit(config: Any, tokenizer: Any) -> int:
    """The most tokens at once, those that the tokenizer adds included."""
    told = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    limits = [value for value in told if isinstance(value, int) and value > 0]
    if limits and "roberta" in config.model_type:
        # Its positions are counted from behind the padding's id.
        limits = [limits[0] - (config.pad_token_id or 0) - 1]
    # Tokenizers without a limit tell an enormous one.
    if tokenizer.model_max_length < 10**9:
        limits.append(int(tokenizer.model_max_length))
    return min(limits, default=_NO_LIMIT)
