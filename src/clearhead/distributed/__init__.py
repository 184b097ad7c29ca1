"""Attention over several processes: sequences sharded over ranks, on ``torch.distributed``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.distributed.layout import shard, unshard
    from clearhead.distributed.parallelize import parallelize
else:
    from clearhead.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {"clearhead.distributed.layout": "shard unshard", "clearhead.distributed.parallelize": "parallelize"},
    )

__all__ = ["parallelize", "shard", "unshard"]
