"""What the verbs that look into a model are given: a text and a choice of layers."""

from __future__ import annotations

from pathlib import Path

from clearhead.errors import DataError, ShapeError

__all__ = ["layers_of", "read_text"]


def read_text(function: str, text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        must, then = "be given, one of the two", "Give --text or --file."
        got = "neither" if text is None else "both"
        raise ShapeError.about(function, "--text or --file", must=must, got=got, then=then)
    if text is not None:
        return text
    assert file is not None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as failure:
        got = str(failure.strerror) if isinstance(failure, OSError) else f"a byte that is none at {failure.start}"
        raise DataError.about(
            function, str(file), must="be a readable UTF-8 text file", got=got, then="Name another file."
        ) from failure


def layers_of(chosen: list[str] | None) -> list[int | str] | None:
    return None if not chosen else [int(each) if each.isdecimal() else each for each in chosen]
