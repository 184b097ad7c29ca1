"""Attention over several processes: sequences sharded over ranks, on ``torch.distributed``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.distributed.layout import ShardLayout, shard, unshard
    from clearhead.distributed.parallelize import parallelize
    from clearhead.distributed.plan import Plan, plan_attention
else:
    from clearhead.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "clearhead.distributed.layout": "ShardLayout shard unshard",
            "clearhead.distributed.parallelize": "parallelize",
            "clearhead.distributed.plan": "Plan plan_attention",
        },
    )

__all__ = ["Plan", "ShardLayout", "parallelize", "plan_attention", "shard", "unshard"]
