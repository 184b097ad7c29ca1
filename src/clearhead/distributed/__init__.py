"""Attention over several processes: sequences sharded over ranks, on ``torch.distributed``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.distributed.layout import shard, unshard
else:
    from clearhead.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(__name__, {"clearhead.distributed.layout": "shard unshard"})

__all__ = ["shard", "unshard"]
