"""Tensor parallelism of transformers' models: their plans, by torch's parallel styles."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from clearhead.errors import UnsupportedError

__all__ = ["apply_plan", "check_plan", "has_plan"]

#: torch's style for each of transformers' names.
_STYLES: Final[Mapping[str, Callable[[], ParallelStyle]]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
}
#: Attributes of a configuration that count heads.
_HEADS: Final = ("num_attention_heads", "num_key_value_heads")


def has_plan(model: nn.Module) -> bool:
    """Whether the model has a plan of its own."""
    return bool(getattr(model, "tp_plan", None))


def check_plan(function: str, model: Any, ranks: int) -> None:
    """Raise unless torch has every style of the model's plan, and its heads divide by the number of ranks.

    Raises:
        UnsupportedError: a style is another one, heads do not divide, or a layer of the plan is no linear layer.
    """
    for name in _HEADS:
        count = getattr(model.config, name, ranks)
        if isinstance(count, int) and count % ranks:
            raise UnsupportedError.about(
                function,
                "mesh",
                must=f"have an axis 'tensor' that divides {name}",
                got=f"{ranks} for {count}",
                then="Choose a smaller axis.",
            )
    unknown = [
        f"{style!r} for {type(model.get_submodule(name)).__name__} {name}"
        for name, style in _planned(model).items()
        if style not in _STYLES or not isinstance(model.get_submodule(name), nn.Linear)
    ]
    if unknown:
        raise UnsupportedError.about(
            function,
            "model",
            must=f"have a tp_plan of linear layers by {', '.join(_STYLES)} on a mesh with 'tensor'",
            got=unknown[0],
            then="Use the axes 'data' and 'shard'.",
        )


def apply_plan(model: nn.Module, mesh: DeviceMesh) -> set[nn.Module]:
    """Divide a checked model's linear layers over the ranks of a mesh with one axis; the layers that were divided."""
    plan = _planned(model)
    parallelize_module(model, mesh, {name: _STYLES[style]() for name, style in plan.items()})
    return {model.get_submodule(name) for name in plan}


def _planned(model: Any) -> dict[str, str]:
    """The style of each module of the plan, whose patterns may lack the prefix of the base model.

    Embeddings stay whole, and layers that share a weight, as a head does with an embedding.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    patterns = [(re.escape(pattern).replace(r"\*", r"[^.]+"), style) for pattern, style in model.tp_plan.items()]
    styles: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for pattern, style in patterns:
            if re.fullmatch(rf"(?:.*\.)?{pattern}", name) and all(
                uses[id(parameter)] == 1 for parameter in module.parameters(recurse=False)
            ):
                styles[name] = style
    return styles
