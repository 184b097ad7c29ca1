"""Device meshes of a parallelized model: which named axes there are, and checks on which all ranks agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from clearhead.arguments import repr_of
from clearhead.errors import ClearheadError, UnsupportedError

__all__ = ["AXES", "MeshAxes", "agreed"]

#: Names of axes, from the outermost on: batches are divided over "data" and "shard", sequences over "context".
AXES: Final = ("data", "context", "shard", "tensor")

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class MeshAxes:
    """The named axes of a mesh.

    Attributes:
        mesh: the user's mesh, of all ranks.
        sizes: the size of each axis of ``AXES``; 1 for those that the mesh lacks.
    """

    mesh: DeviceMesh
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, function: str, mesh: object) -> MeshAxes:
        """The axes of a mesh.

        Raises:
            UnsupportedError: it is no ``DeviceMesh``, an axis has no name or an unknown one, or it lacks some ranks.
        """
        then = 'Use init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")).'
        if not isinstance(mesh, DeviceMesh):
            raise UnsupportedError.about(function, "mesh", must="be a DeviceMesh", got=repr_of(mesh), then=then)
        names = mesh.mesh_dim_names
        if names is None or not set(names) <= set(AXES):
            must = "name its axes among 'data', 'shard', 'tensor' and 'context'"
            raise UnsupportedError.about(function, "mesh", must=must, got=repr(names), then=then)
        if mesh.size() != dist.get_world_size():
            must = f"contain all {dist.get_world_size()} ranks"
            got = f"{mesh.size()} ranks on {names}"
            raise UnsupportedError.about(function, "mesh", must=must, got=got, then="Pass the whole mesh.")
        sizes = dict(zip(names, mesh.shape, strict=True))
        return cls(mesh, {name: sizes.get(name, 1) for name in AXES})

    @cached_property
    def working(self) -> DeviceMesh:
        """The same ranks on three axes: ``replicate``, ``shard`` and ``tensor``.

        Ranks along "data" and "context" have equal parameters whose gradients are averaged, so they are one axis.
        """
        names = self.mesh.mesh_dim_names or ()
        present = [name for name in AXES if name in names]
        ranks = self.mesh.mesh.permute([names.index(name) for name in present])
        shape = (self.sizes["data"] * self.sizes["context"], self.sizes["shard"], self.sizes["tensor"])
        return DeviceMesh(self.mesh.device_type, ranks.reshape(shape), mesh_dim_names=("replicate", "shard", "tensor"))

    @property
    def copies(self) -> int:
        """Over how many ranks gradients are averaged."""
        return prod(self.sizes[name] for name in ("data", "context", "shard"))

    @property
    def batch_part(self) -> tuple[int, int]:
        """Which part of the batch this rank has, and how many parts there are: "data" is the slower axis."""
        return self.index("data") * self.sizes["shard"] + self.index("shard"), self.sizes["data"] * self.sizes["shard"]

    def index(self, name: str) -> int:
        """This rank's place along an axis; 0 where the mesh lacks it."""
        return self.mesh.get_local_rank(name) if self.sizes[name] > 1 else 0

    def group(self, name: str) -> ProcessGroup | None:
        """The ranks that differ from this one along an axis alone; None where there are no others."""
        return self.mesh.get_group(name) if self.sizes[name] > 1 else None


def agreed(function: str, check: Callable[[], tuple[_Result, Any]]) -> _Result:
    """The result of a check that passed on every rank with equal facts; raises on every rank otherwise.

    Args:
        function: the public name in errors.
        check: returns its result, and facts that must be equal on all ranks; raises ``ClearheadError``.

    Cost: one small all-gather over all ranks.
    """
    if not dist.is_initialized():
        raise UnsupportedError.about(
            function,
            "mesh",
            must="be of an initialised process group",
            got="none",
            then="Call torch.distributed.init_process_group first, under torchrun.",
        )
    result: _Result | None = None
    failure: ClearheadError | None = None
    facts: Any = None
    try:
        result, facts = check()
    except ClearheadError as error:
        failure = error
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (None if failure is None else str(failure), facts))
    if failure is not None:
        raise failure
    for rank, (text, other) in enumerate(outcomes):
        if text is not None:
            raise UnsupportedError(f"{text} (on rank {rank})")
        if other != outcomes[0][1]:
            raise UnsupportedError.about(
                function,
                "model",
                must="be the same on every rank, with equal arguments",
                got=f"rank {rank} differs from rank 0",
                then="Build it from the same configuration everywhere.",
            )
    return result  # type: ignore[return-value]
