"""The limits of the lab."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """Limits of requests; a request beyond a limit gets an error of one line that names it.

    Attributes:
        works: number of jobs that run at once.
        waiting: number of further jobs in the queue.
        patience: longest wait in the queue in seconds.
        seconds: longest run time of a job in seconds; a kind of job may have a lower limit.
        body: bytes of a request.
        characters: characters of a text.
        tokens: tokens of a text.
        parameters: parameters of a model.
        numbers: elements of queries and keys on one attention page.
        views: number of stored attention pages.
        view_bytes: total bytes of the stored pages.
        models: number of models in memory.
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
