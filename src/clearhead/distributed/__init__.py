"""Attention over several processes: sequences sharded over ranks, on ``torch.distributed``."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clearhead.distributed.balance import balanced
    from clearhead.distributed.exchange import Traffic, traffic
    from clearhead.distributed.layout import ShardLayout, shard, unshard
    from clearhead.distributed.loss import mean_loss
    from clearhead.distributed.machine import AttentionSizes, Link, Machine
    from clearhead.distributed.measure import measure_machine
    from clearhead.distributed.parallel import parallelize
    from clearhead.distributed.plan import Plan, plan_attention
    from clearhead.distributed.sharded_attention import attention, observe_attention
    from clearhead.distributed.simulation import PassTime, Simulation, simulate
else:
    from clearhead.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "clearhead.distributed.balance": "balanced",
            "clearhead.distributed.exchange": "Traffic traffic",
            "clearhead.distributed.layout": "ShardLayout shard unshard",
            "clearhead.distributed.loss": "mean_loss",
            "clearhead.distributed.machine": "AttentionSizes Link Machine",
            "clearhead.distributed.measure": "measure_machine",
            "clearhead.distributed.parallel": "parallelize",
            "clearhead.distributed.plan": "Plan plan_attention",
            "clearhead.distributed.sharded_attention": "attention observe_attention",
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
    "Traffic",
    "attention",
    "balanced",
    "mean_loss",
    "measure_machine",
    "observe_attention",
    "parallelize",
    "plan_attention",
    "shard",
    "simulate",
    "traffic",
    "unshard",
]
