"""Which rows are measured, and which peers take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from clearhead.benchmark.model_peers.contenders import PEERS
from clearhead.benchmark.model_peers.rows import ModelRow
from clearhead.benchmark.peers import OURS

__all__ = ["Selection", "peer_names"]


class _Titled(Protocol):
    @property
    def title(self) -> str: ...

    @property
    def dtype(self) -> torch.dtype: ...


Row = TypeVar("Row", bound=_Titled)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Some of the rows, and some of the peers of those in which whole models run.

    Args:
        dtypes: the rows' dtypes.
        only: parts of titles, of which a row's title has one; without any, all rows are measured.
        against: parts of names, of which a peer's name has one; without any, all peers take part.
    """

    dtypes: Sequence[torch.dtype]
    only: Sequence[str] = ()
    against: Sequence[str] = ()

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """The rows that are measured."""
        parts = self.only or ("",)
        chosen = [row for row in rows if any(self._has(row, part) for part in parts)]
        return [replace(row, against=tuple(self.against)) if isinstance(row, ModelRow) else row for row in chosen]

    def without_rows(self, rows: Sequence[_Titled]) -> list[str]:
        """The parts of titles that no row has."""
        return [part for part in self.only if not any(self._has(row, part) for row in rows)]

    def _has(self, row: _Titled, part: str) -> bool:
        return row.dtype in self.dtypes and part in row.title


def peer_names() -> list[str]:
    """The names of the peers of whole models."""
    return [name for name in dict.fromkeys(peer.name for peer in PEERS) if not name.startswith(OURS)]
