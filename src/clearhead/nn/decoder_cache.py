"""The KV caches of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field

from clearhead.cache import KVCache
from clearhead.errors import ShapeError

__all__ = ["DecoderCache"]


@dataclass
class DecoderCache:
    """KV caches of a decoder: one for each layer, and one more for each layer's memory."""

    layers: list[KVCache]
    memory: list[KVCache] = field(default_factory=list)

    def check(self, function: str, num_layers: int) -> None:
        """Raise unless it was made for a decoder of so many layers."""
        counts = (_count(self.layers), _count(self.memory))
        if counts not in ((num_layers, 0), (num_layers, num_layers)):
            raise ShapeError.about(
                function,
                "cache",
                must=f"hold a KVCache for each of the {num_layers} layers, and one for each memory",
                got=f"{_count_in_words(counts[0])}, and {_count_in_words(counts[1])} for memories",
                then="Take one from new_cache().",
            )

    @property
    def length(self) -> int:
        """How many tokens have been decoded."""
        return self.layers[0].length

    def truncate(self, length: int) -> None:
        """Forget what was decoded from position ``length`` on, such as drafts; the memory stays."""
        for cache in self.layers:
            cache.truncate(length)

    def reset(self) -> None:
        """Forget everything."""
        for cache in (*self.layers, *self.memory):
            cache.reset()

    def __repr__(self) -> str:
        return f"DecoderCache(layers={len(self.layers)}, length={self.length})"


def _count(caches: object) -> int | None:
    """How many caches a list holds; None where it is none, or holds something else."""
    lists = isinstance(caches, (list, tuple)) and all(isinstance(cache, KVCache) for cache in caches)
    return len(caches) if lists else None  # type: ignore[arg-type]


def _count_in_words(count: int | None) -> str:
    return "no list of them" if count is None else str(count)
