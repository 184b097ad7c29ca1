"""Shared options of the commands that inspect a model: the text and the layers."""

from __future__ import annotations

from pathlib import Path

from clearhead.errors import DataError, ShapeError

__all__ = ["checked_text", "layers_of", "read_text"]


def read_text(function: str, text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        must, then = "be given, one of the two", "Give --text or --file."
        got = "neither" if text is None else "both"
        raise ShapeError.about(function, "--text or --file", must=must, got=got, then=then)
    if text is not None:
        return checked_text(function, "--text", text)
    assert file is not None
    # The same reader as in training.
    from clearhead.train.data import read_text as read

    return read(file, function=function)


def checked_text(function: str, option: str, text: str) -> str:
    """Return a text of the command line; raises ``DataError`` where its bytes were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        got = f"an invalid byte at character {failure.start}"
        raise DataError.about(
            function, option, must="be UTF-8", got=got, then="Check the terminal's encoding."
        ) from None
    return text


def layers_of(chosen: list[str] | None) -> list[int | str] | None:
    return None if not chosen else [int(each) if each.isdecimal() and len(each) < 10 else each for each in chosen]
