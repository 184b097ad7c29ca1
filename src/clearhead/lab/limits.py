"""How much the lab does for whoever asks, in one place."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """What a page may ask for; more is answered with one line that names the limit.

    Attributes:
        works: how many works run at once.
        waiting: how many more may wait for their turn.
        patience: seconds that one waits at most.
        seconds: seconds that one runs at most, less where the work itself says so.
        body: bytes of a request.
        characters: of a text.
        tokens: of a text, at once.
        parameters: of a model.
        numbers: of queries and keys on one page of attention.
        views: pages of attention that are kept.
        view_bytes: bytes that they may have together.
        models: models kept in memory.
    """

    works: int = 2
    waiting: int = 8
    patience: float = 30.0
    seconds: float = 120.0
    body: int = 2**20
    characters: int = 20_000
    tokens: int = 1024
    parameters: int = 800_000_000
    numbers: int = 2**24
    views: int = 8
    view_bytes: int = 2**27
    models: int = 2
