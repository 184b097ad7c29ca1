"""Tokenizers: what is frequent is known, what cannot be written is said, files read back the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from clearhead.errors import DataError
from clearhead.train.text import TextTokenizer, train_bpe, train_bytes, train_characters, train_words

PLAY = "First Citizen:\nSpeak, speak.\n\nSecond Citizen:\nÉgal à tous!\r\n" * 30


def test_words_below_the_count_are_unknown() -> None:
    tokenizer = train_words(["good film .", "bad film .", "odd"], min_count=2)
    assert tokenizer.tokens("a good film.") == ["<unk>", "<unk>", "film", "."]
    assert tokenizer.unknown_id == 1
    assert len(tokenizer) == 4


@pytest.mark.parametrize("lowercase", [False, True])
def test_lowercase_option_folds_case(lowercase: bool) -> None:
    tokenizer = train_words(["What", "what"], min_count=1, lowercase=lowercase)
    assert (tokenizer.encode("What") == tokenizer.encode("what")) is lowercase


def test_vocabulary_size_is_respected() -> None:
    texts = [f"word{number} common" for number in range(100)]
    assert len(train_words(texts, vocab_size=10, min_count=1)) == 10
    assert len(train_bpe(texts, vocab_size=30)) == 30


@pytest.mark.parametrize("train", [train_characters, lambda text: train_bytes(text, vocab_size=300)])
def test_decode_restores_the_text(train: object) -> None:
    tokenizer = train(PLAY)  # type: ignore[operator]
    for text in (PLAY, "tous: Égal", " \n\n à"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode_long(text)) == text


def test_encode_long_equals_encode() -> None:
    tokenizer = train_characters(PLAY)
    assert tokenizer.encode_long(PLAY * 5) == tokenizer.encode(PLAY * 5)
    assert len(tokenizer) == len(set(PLAY))


def test_cannot_write_lists_unknown_characters() -> None:
    assert train_characters("abc").cannot_write("abzxz") == ["x", "z"]
    assert train_bytes(PLAY, vocab_size=300).cannot_write("漢") == []


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.0"}', "[]"])
def test_damaged_tokenizer_raises_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"^load: .*tokenizer.json must be a complete tokenizer file; got "):
        TextTokenizer.load(path, function="load")


def test_saved_tokenizer_encodes_the_same(tmp_path: Path) -> None:
    tokenizer = train_words(["a good film", "a bad film"], min_count=1)
    tokenizer.save(tmp_path / "tokenizer.json")
    loaded = TextTokenizer.load(tmp_path / "tokenizer.json", function="load")
    assert loaded.encode("a good bad thing") == tokenizer.encode("a good bad thing")
