"""Figures of the processors and links of ranks, and sizes of a call, for simulations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clearhead.arguments import number, whole
from clearhead.shapes import Float

__all__ = ["AttentionSizes", "Link", "Machine"]


@dataclass(frozen=True)
class Link:
    """A connection of one rank.

    Args:
        bandwidth: bytes per second in each direction.
        latency: seconds from the begin of a message to its first byte.

    Raises:
        ShapeError: ``bandwidth`` is not positive, or ``latency`` negative.

    >>> Link(50e9, 10e-6).latency
    1e-05
    """

    bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        _positive("Link", "bandwidth", self.bandwidth)
        _at_least_zero("Link", "latency", self.latency)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Figures of the processors and links of all ranks.

    Args:
        flops: floating-point operations per second of attention forward on one rank, which take ``4 * head_dim`` for
            each pair and head.
        backward_flops: those of backward, ``10 * head_dim`` for each pair and head; ``flops`` by default.
        link: the link of each rank, within a node.
        outer: the link of each rank to ranks of other nodes; ``link`` by default.
        ranks_per_node: how many consecutive ranks are a node; by default all are one.
        split_flops: those of a backward pass that computes gradients of queries and of keys apart, as ``"gather"``
            does: ``14 * head_dim`` for each pair and head; ``backward_flops`` by default.
        overlap: the share of a message's time during which its ranks can compute: 1 for a network card that moves data
            alone, 0 if the processor copies it.
        memory: bytes per second that are read or written where tensors are copied, filled or added up; by default that
            takes no time.
        fresh: bytes per second at which a process gets memory from the system and first writes it, beyond the time of
            the write; by default that takes no time.
        row: seconds of a query of one head forward, besides its pairs.
        key: seconds of a key and its value of one key head forward, which each kernel call packs, besides its pairs.
        call: seconds of a kernel's start forward, for each block that a rank computes.
        backward_call: those of backward; ``call`` by default.
        start: seconds in which ranks validate and compare a call's arguments.
        cores: processors that all ranks share, each rank using one at a time; by default each rank has its own.

    Raises:
        ShapeError: a figure is out of range.

    >>> Machine(flops=4e14, link=Link(4e11, 3e-6), outer=Link(5e10, 1e-5), ranks_per_node=8).overlap
    1.0
    """

    flops: float
    backward_flops: float | None = None
    link: Link
    outer: Link | None = None
    ranks_per_node: int | None = None
    overlap: float = 1.0
    split_flops: float | None = None
    memory: float | None = None
    fresh: float | None = None
    row: float = 0.0
    key: float = 0.0
    call: float = 0.0
    backward_call: float | None = None
    start: float = 0.0
    cores: int | None = None

    def __post_init__(self) -> None:
        _positive("Machine", "flops", self.flops)
        for name in ("backward_flops", "split_flops", "memory", "fresh"):
            if (value := getattr(self, name)) is not None:
                _positive("Machine", name, value)
        for name in ("ranks_per_node", "cores"):
            if (value := getattr(self, name)) is not None:
                whole("Machine", name, value, low=1)
        must, then = "be from 0 to 1", "1 hides messages behind computing."
        number("Machine", "overlap", self.overlap, must=must, fits=lambda share: 0 <= share <= 1, then=then)
        for name in ("row", "key", "call", "backward_call", "start"):
            if (value := getattr(self, name)) is not None:
                _at_least_zero("Machine", name, value)

    def message(self, sent: Tensor, senders: Tensor, receivers: Tensor, tensors: int = 1) -> Tensor:
        """Seconds of ``sent`` bytes in some messages, each from a sender to a receiver; 0 for no bytes."""
        near = self._same_node(senders, receivers)
        far = self.outer or self.link
        inner, outer = (tensors * link.latency + sent / link.bandwidth for link in (self.link, far))
        return torch.where(near, inner, outer) * (sent > 0)

    def collective(self, sent: Float[Tensor, "ranks ranks"], tensors: int = 1) -> Float[Tensor, " ranks"]:
        """Seconds of each rank for ``sent[sender, receiver]`` bytes; both kinds of links work at once."""
        rank = torch.arange(sent.shape[0])
        near = self._same_node(rank[:, None], rank)
        seconds = []
        for link, part in ((self.link, near), (self.outer or self.link, ~near)):
            through = sent * part * (rank[:, None] != rank)
            most = torch.maximum(through.sum(dim=0), through.sum(dim=1))
            messages = torch.maximum((through > 0).sum(dim=0), (through > 0).sum(dim=1))
            seconds.append(tensors * link.latency * messages + most / link.bandwidth)
        return torch.maximum(*seconds) if self.ranks_per_node else seconds[0]

    def _same_node(self, one: Tensor, other: Tensor) -> Tensor:
        if self.ranks_per_node is None:
            return torch.ones(torch.broadcast_shapes(one.shape, other.shape), dtype=torch.bool)
        return one // self.ranks_per_node == other // self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of an attention call besides its length.

    Args:
        batch: batch size.
        heads: query heads.
        kv_heads: key and value heads; ``heads`` by default.
        head_dim: channels of queries, keys and values.
        dtype: dtype of the tensors.

    Raises:
        ShapeError: a size is no whole number of at least 1.

    >>> AttentionSizes(heads=32, kv_heads=8, head_dim=128).key_value_bytes
    4096
    """

    batch: int = 1
    heads: int
    kv_heads: int | None = None
    head_dim: int
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "head_dim"):
            whole("AttentionSizes", name, getattr(self, name), low=1)
        if self.kv_heads is not None:
            whole("AttentionSizes", "kv_heads", self.kv_heads, low=1)

    @property
    def query_bytes(self) -> int:
        """Bytes of a query of all heads, which are those of an output too."""
        return self.batch * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def key_value_bytes(self) -> int:
        """Bytes of a key and its value of all heads."""
        return 2 * self.batch * (self.kv_heads or self.heads) * self.head_dim * self.dtype.itemsize


def _positive(function: str, argument: str, value: object) -> None:
    must = "be a number above 0"
    number(function, argument, value, must=must, fits=lambda given: given > 0, then="Give it per second.")


def _at_least_zero(function: str, argument: str, value: object) -> None:
    number(function, argument, value, must="be at least 0", fits=lambda given: given >= 0, then="Give it in seconds.")
