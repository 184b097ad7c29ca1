"""Tokenizers trained on the data, stored as ``tokenizer.json``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clearhead.errors import DataError
from clearhead.train.extra import need
from clearhead.train.files import write_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PADDING", "UNKNOWN", "TextTokenizer", "train_bpe", "train_bytes", "train_characters", "train_words"]

PADDING, UNKNOWN = "<pad>", "<unk>"
SPECIAL = [PADDING, UNKNOWN]
_LONGEST_PIECE = 4096


class TextTokenizer:
    """Text to ids and back, with a Hugging Face tokenizer.

    A tokenizer with an unknown token encodes any text; one without (characters, bytes) only what it can decode.

    >>> tokenizer = train_words(["a good film", "a bad film"], min_count=2)
    >>> tokenizer.encode("a new film"), tokenizer.tokens("a new film")
    ([2, 1, 3], ['a', '<unk>', 'film'])
    """

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    def __len__(self) -> int:
        return self._inner.get_vocab_size()

    @property
    def unknown_id(self) -> int | None:
        """The id of the unknown token, or None."""
        return self._inner.token_to_id(UNKNOWN)

    def encode(self, text: str) -> list[int]:
        """The ids of one text."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts."""
        return [encoding.ids for encoding in self._inner.encode_batch(list(texts), add_special_tokens=False)]

    def encode_long(self, text: str) -> list[int]:
        """The ids of a text of any length, encoded in pieces that end at line ends, to limit memory."""
        pieces: list[str] = []
        size = _LONGEST_PIECE + 1
        for line in text.splitlines(keepends=True):
            if size + len(line) > _LONGEST_PIECE:
                pieces.append(line)
                size = len(line)
            else:
                pieces[-1] += line
                size += len(line)
        return [identity for ids in self.encode_many(pieces) for identity in ids]

    def tokens(self, text: str) -> list[str]:
        """The text of each token of one text."""
        return self._inner.encode(text, add_special_tokens=False).tokens

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``."""
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def cannot_write(self, text: str) -> list[str]:
        """The characters of ``text`` that are not in the vocabulary; empty if there is an unknown token."""
        if self.unknown_id is not None:
            return []
        return sorted({character for character in set(text) if not self.encode(character)})

    def sha256(self) -> str:
        """A digest of the vocabulary and the rules."""
        return hashlib.sha256(self._inner.to_str(pretty=False).encode()).hexdigest()

    def save(self, path: Path) -> None:
        """Write ``tokenizer.json``, atomically."""
        write_bytes(path, self._inner.to_str(pretty=False).encode())

    @classmethod
    def load(cls, path: Path, *, function: str) -> TextTokenizer:
        """Read ``tokenizer.json``; raises ``DataError`` if it is absent or damaged."""
        tokenizers = need("tokenizers")
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            got = "no such file"
        except Exception as error:  # the library raises bare Exception for a bad file
            got = str(error)
        then = "The run is damaged; train it again."
        raise DataError.about(function, str(path), must="be a complete tokenizer file", got=got, then=then)


def _trained(texts: Iterable[str], model: Any, splitter: Any, trainer: Any, lowercase: bool) -> Tokenizer:
    tokenizers = need("tokenizers")
    inner: Tokenizer = tokenizers.Tokenizer(model)
    steps = [tokenizers.normalizers.NFC()]
    if lowercase:
        steps.append(tokenizers.normalizers.Lowercase())
    inner.normalizer = tokenizers.normalizers.Sequence(steps)
    inner.pre_tokenizer = splitter
    inner.train_from_iterator(list(texts), trainer)
    return inner


def train_words(
    texts: Iterable[str], *, vocab_size: int = 30_000, min_count: int = 2, lowercase: bool = False
) -> TextTokenizer:
    """One id for each word or punctuation mark that occurs at least ``min_count`` times, the most frequent first."""
    tokenizers = need("tokenizers")
    model = tokenizers.models.WordLevel(unk_token=UNKNOWN)
    trainer = tokenizers.trainers.WordLevelTrainer(
        vocab_size=vocab_size, min_frequency=min_count, special_tokens=SPECIAL, show_progress=False
    )
    return TextTokenizer(_trained(texts, model, tokenizers.pre_tokenizers.Whitespace(), trainer, lowercase))


def train_bpe(
    texts: Iterable[str], *, vocab_size: int = 30_000, min_count: int = 2, lowercase: bool = False
) -> TextTokenizer:
    """Byte-pair encoding within words (Sennrich et al. 2016): frequent words are one token, rare ones several."""
    tokenizers = need("tokenizers")
    model = tokenizers.models.BPE(unk_token=UNKNOWN)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=min_count, special_tokens=SPECIAL, show_progress=False
    )
    return TextTokenizer(_trained(texts, model, tokenizers.pre_tokenizers.Whitespace(), trainer, lowercase))


def train_characters(text: str) -> TextTokenizer:
    """One id for each character of ``text``, in code point order; other characters cannot be encoded."""
    tokenizers = need("tokenizers")
    vocabulary = {character: place for place, character in enumerate(sorted(set(text)))}
    inner: Tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = tokenizers.decoders.Fuse()
    return TextTokenizer(inner)


def train_bytes(text: str, *, vocab_size: int) -> TextTokenizer:
    """Byte-level BPE (Radford et al. 2019), which encodes any text without an unknown token."""
    tokenizers = need("tokenizers")
    inner: Tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(text.splitlines(keepends=True), trainer)
    return TextTokenizer(inner)


TRAINERS: dict[str, Callable[..., TextTokenizer]] = {"word": train_words, "bpe": train_bpe}
