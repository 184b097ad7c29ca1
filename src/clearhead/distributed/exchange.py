"""Messages between the ranks of a group, which are counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead.distributed.layout import finish, gather_parts, start_messages
from clearhead.errors import ShapeError, UnsupportedError

__all__ = ["Exchange", "Traffic", "traffic"]


@dataclass
class Traffic:
    """What this rank sent within ``with traffic():``.

    Attributes:
        bytes: bytes of tensors sent to other ranks.
        messages: tensors sent to other ranks.
    """

    bytes: int = 0
    messages: int = 0

    def add(self, tensor: Tensor, receivers: int = 1) -> None:
        """Count a tensor that goes to so many ranks."""
        self.bytes += tensor.numel() * tensor.element_size() * receivers
        self.messages += receivers


_COUNTED: ContextVar[tuple[Traffic, ...]] = ContextVar("counted", default=())


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count the bytes that this rank sends to others in ``clearhead.distributed``.

    Returns:
        A context manager that gives a ``Traffic``, whose ``bytes`` and ``messages`` grow with each message. Gradients
        computed within it count too. Lengths and other numbers that ranks compare are not counted.

    >>> with traffic() as sent:
    ...     pass
    >>> sent.bytes
    0
    """
    counter = Traffic()
    token = _COUNTED.set((*_COUNTED.get(), counter))
    try:
        yield counter
    finally:
        _COUNTED.reset(token)


@dataclass(frozen=True)
class Exchange:
    """A process group as this rank sees it.

    Attributes:
        group: the group; None for all ranks.
        rank: this rank in the group.
        ranks: number of ranks.
    """

    group: ProcessGroup | None
    rank: int
    ranks: int

    @classmethod
    def of(cls, function: str, group: ProcessGroup | None) -> Exchange:
        """The group as this rank sees it; raises unless it is one that this rank is in."""
        ready = dist.is_available() and dist.is_initialized()
        if not ready or (rank := dist.get_rank(group)) < 0:
            raise UnsupportedError.about(
                function,
                "group",
                must="be a process group that this rank is in",
                got="a group of other ranks" if ready else "no process group at all",
                then="Pass the mesh's group: mesh['context'].get_group()."
                if ready
                else "Call torch.distributed.init_process_group first, and start the program by torchrun.",
            )
        return cls(group, rank, dist.get_world_size(group))

    def numbers(self, given: Sequence[int]) -> list[list[int]]:
        """Whole numbers of every rank."""
        numbers = torch.tensor(given, device=self._device())
        every = [torch.empty_like(numbers) for _ in range(self.ranks)]
        dist.all_gather(every, numbers, group=self.group)
        return [one.tolist() for one in every]

    def first(self, number: int) -> int:
        """Rank 0's number, below 2**63."""
        return self.numbers([number])[0][0]

    def all_hold(self, given: bool) -> bool:
        """Whether every rank gives True."""
        return all(one for (one,) in self.numbers([int(given)]))

    def agree(self, function: str, names: Sequence[str], facts: Sequence[int], error: Exception | None) -> None:
        """Raise on every rank if one of them has an error, or if two have different facts.

        Args:
            function: the public function's name.
            names: what each fact stands for.
            facts: this rank's facts.
            error: this rank's error, which it raises; the others name the rank.
        """
        every = self.numbers([int(error is not None), *facts])
        if error is not None:
            raise error
        refused = [rank for rank, (failed, *_) in enumerate(every) if failed]
        if refused:
            raise UnsupportedError.about(
                function,
                "the call",
                must="be possible on every rank",
                got=f"an error on rank {', '.join(map(str, refused))}",
                then="Read the error of that rank.",
            )
        for place, name in enumerate(names, start=1):
            differing = [rank for rank, one in enumerate(every) if one[place] != every[0][place]]
            if differing:
                raise ShapeError.about(
                    function,
                    "the ranks",
                    must=f"agree on {name}",
                    got=f"others on rank {differing[0]} than on rank 0",
                    then="Pass equal arguments on every rank, but for the tensors' parts.",
                )

    def _device(self) -> torch.device | None:
        """The device of small tensors: NCCL takes those of a GPU alone."""
        return torch.device("cuda") if dist.get_backend(self.group) == "nccl" else None

    def gather(self, part: Tensor, axis: int, lengths: list[int]) -> list[Tensor]:
        """The parts of all ranks, of these lengths along an axis."""
        self._count(part, self.ranks - 1)
        return gather_parts(part, axis, lengths, self.group)

    def swap(self, tensors: Sequence[Sequence[tuple[Tensor, Sequence[int]]]]) -> list[list[Tensor]]:
        """For each tensor, send a part to each rank and receive one of a shape from it, all at once.

        Args:
            tensors: for each tensor and rank, the part and the shape; this rank's own part stays.
        """
        received: list[list[Tensor]] = []
        for pairs in tensors:
            received.append([part.new_empty(*shape) for part, shape in pairs])
            received[-1][self.rank] = pairs[self.rank][0]
        sent = [[pairs[rank][0].contiguous() for pairs in tensors if rank != self.rank] for rank in range(self.ranks)]
        self.finish(self.start(sent, [list(parts) for parts in zip(*received, strict=True)]))
        return received

    def start(self, sent: Sequence[Sequence[Tensor]], received: Sequence[Sequence[Tensor]]) -> list[Any]:
        """Begin to send contiguous tensors ``sent[r]`` to each other rank r, and to receive from it ``received[r]``.

        ``finish`` waits for them.
        """
        for rank, tensors in enumerate(sent):
            for tensor in tensors if rank != self.rank else ():
                if tensor.numel():
                    self._count(tensor)
        return start_messages(sent, received, self.group)

    @staticmethod
    def finish(works: Sequence[Any]) -> None:
        """Wait for messages that ``start`` began."""
        finish(works)

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over ranks, in a fixed order."""
        for tensor in tensors:
            parts = self.gather(tensor[None], 0, [1] * self.ranks)
            tensor.copy_(torch.cat(parts).sum(dim=0))

    def _count(self, tensor: Tensor, receivers: int = 1) -> None:
        for counter in _COUNTED.get():
            counter.add(tensor, receivers)
