"""Loading a model with its tokenizer from a folder: a run of ``clearhead train`` or a model of transformers."""

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

#: Limit for a model that declares none.
_NO_LIMIT = 4096


@dataclass(frozen=True)
class Reader:
    """A model with its tokenizer.

    ``encode`` returns the ids of a text, ``framed`` adds the special tokens to some ids, and ``words`` returns their
    texts. ``limit`` is the largest number of tokens of the text that the model reads at once.
    """

    name: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    framed: Callable[[list[int]], list[int]]
    words: Callable[[list[int]], list[str]]
    limit: int
    run: Callable[[Tensor], object]


def read_ids(function: str, reader: Reader, text: str) -> list[int]:
    """The ids of a text; raises ``DataError`` where there are none."""
    ids = reader.encode(text)
    if not ids:
        raise DataError.about(function, "text", must="have at least one token", got="none", then="Pass some words.")
    return ids


def reader_of(function: str, folder: Path) -> Reader:
    """Load the model in a folder; its ``config.json`` decides the kind."""
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
    """Load a model of transformers from a folder: only safetensors, no custom code, no downloads."""
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
        raise DataError.about(function, str(folder), must=must, got=got, then="Choose another folder.") from failure
    config = model.config
    if config.is_encoder_decoder:
        model = model.get_encoder()
    swap(model)
    prefix, suffix = _frame(tokenizer)
    limit = max(1, _limit(config, tokenizer) - len(prefix) - len(suffix))
    return Reader(
        name=str(folder),
        model=model,
        limit=limit,
        run=model,
        encode=lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]),
        framed=lambda ids: [*prefix, *ids, *suffix],
        words=lambda ids: list(tokenizer.convert_ids_to_tokens(ids)),
    )


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after a text."""
    probe = "a"
    bare = list(tokenizer(probe, add_special_tokens=False)["input_ids"])
    framed = list(tokenizer(probe)["input_ids"])
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


def _limit(config: Any, tokenizer: Any) -> int:
    """The largest number of tokens at once, including special tokens."""
    declared = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")]
    limits = [value for value in declared if isinstance(value, int) and value > 0]
    if limits and "roberta" in config.model_type:
        # Its position ids start after the padding id.
        limits = [limits[0] - (config.pad_token_id or 0) - 1]
    # Tokenizers without a limit report an enormous one.
    if tokenizer.model_max_length < 10**9:
        limits.append(int(tokenizer.model_max_length))
    return min(limits, default=_NO_LIMIT)
