"""Attention over several processes: sequences sharded over ranks, on ``torch.distributed``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.distributed.balance import balanced
    from clearhead.distributed.layout import ShardLayout, shard, unshard
    from clearhead.distributed.machine import AttentionSizes, Link, Machine
    from clearhead.distributed.plan import Plan, plan_attention
    from clearhead.distributed.simulation import PassTime, Simulation, simulate
else:
    from clearhead.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "clearhead.distributed.balance": "balanced",
            "clearhead.distributed.layout": "ShardLayout shard unshard",
            "clearhead.distributed.machine": "AttentionSizes Link Machine",
            "clearhead.distributed.plan": "Plan plan_attention",
            "clearhead.distributed.simulation": "PassTime Simulation simulate",
        },
    )

__all__ = [
    "AttentionSizes",
    "Link",
    "Machine",
    "PassTime",
    "Plan",
    "ShardLayout",
    "Simulation",
    "balanced",
    "plan_attention",
    "shard",
    "simulate",
    "unshard",
]
