"""Hugging Face transformers: its attention interface, and its layers as fused operations."""

from __future__ import annotations

import transformers

from clearhead.errors import UnsupportedError

__all__: list[str] = []

_OLDEST = (4, 57)


def check_version(version: str) -> None:
    """Raise if attention and masks of this version go another way.

    >>> check_version("5.24.0")
    """
    parts = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    if tuple(parts) < _OLDEST:
        raise UnsupportedError.about(
            "swap",
            "transformers",
            must="be of version 4.57 or later",
            got=version,
            then="Run `pip install --upgrade transformers`.",
        )


check_version(transformers.__version__)
