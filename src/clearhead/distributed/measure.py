"""The figures of a machine, measured by small probes on every rank, for simulations."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import inf
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from clearhead.arguments import repr_of, whole
from clearhead.cut import Region, part_of
from clearhead.dispatch import choose, run
from clearhead.distributed.call import FinishedRows, Request, ShardedCall
from clearhead.distributed.exchange import Exchange
from clearhead.distributed.layout import ShardLayout, finish
from clearhead.distributed.machine import AttentionSizes, Link, Machine
from clearhead.distributed.plan import check_mask, plan_attention
from clearhead.errors import UnsupportedError
from clearhead.garbage_collector import collector_off
from clearhead.masks.base import Mask
from clearhead.ops.kinds import QUERY_BLOCK
from clearhead.problem import Problem
from clearhead.statistics import Want

__all__ = ["measure_machine"]

_FUNCTION: Final = "measure_machine"
#: Elements of a message of which the latency counts, and such messages to each rank.
_SMALL, _MESSAGES = 64, 4
#: Tokens of a rank in a call of which the fixed cost counts, and how often it runs.
_FEW, _RUNS = 8, 9
#: Bytes of new memory that is written.
_PAGES = 1 << 24


def measure_machine(
    sizes: AttentionSizes,
    length: int,
    *,
    mask: Mask | None = None,
    cores: int | None = None,
    repeats: int = 3,
    group: ProcessGroup | None = None,
) -> Machine:
    """The figures of the processors and links of the ranks of a group, for ``simulate``.

    Every rank of the group makes the call. Probes measure FLOP/s of whole calls of attention with the mask, forward,
    backward and with gradients of queries and keys apart; what a query and a key take in a forward call besides their
    pairs, from calls of few of them; the fixed cost of a sharded call and of a kernel; the speed of copies and the
    cost of new memory; bandwidth and latency of messages between all ranks at once; and how far messages hide
    behind computing.

    Args:
        sizes: batch, heads, channels and dtype of the calls.
        length: tokens of the whole sequence.
        mask: the mask of the calls, whose tiles decide how fast a kernel computes the pairs of a query and a key.
        cores: processors that all ranks share, each rank using one at a time; by default each rank has its own. Only
            as many ranks compute at once.
        repeats: how often each probe runs; the median counts, and of the ranks the slowest.
        group: the process group; by default all ranks.

    Returns:
        The figures, equal on all ranks.

    Raises:
        ShapeError: ``length``, ``cores`` or ``repeats`` is no whole number of at least 1.
        MaskError: ``mask`` is no mask, or does not fit ``length``.
        UnsupportedError: there is no process group, or ``sizes`` are none. Every rank raises.

    Cost: ``2 * (repeats + 1)`` calls of attention of the whole sequence and their gradients on one rank's processor,
    some short calls, and their tensors' memory.

    >>> from clearhead.distributed import simulate
    >>> def measured(plan):  # on each rank of torchrun
    ...     sizes = AttentionSizes(heads=12, head_dim=64, dtype=torch.float32)
    ...     return simulate(plan, sizes, measure_machine(sizes, plan.layout.length))
    """
    exchange = Exchange.of(_FUNCTION, group)
    error: Exception | None = None
    try:
        _check(sizes, length, mask, cores, repeats)
    except Exception as raised:  # Whatever it is, the other ranks must hear of it.
        error = raised
    facts = [0, 0] if error is not None else [length, repeats]
    exchange.agree(_FUNCTION, ("length", "repeats"), facts, error)
    return _Probes(exchange, sizes, length, mask, cores, repeats).machine()


def _check(sizes: AttentionSizes, length: int, mask: Mask | None, cores: int | None, repeats: int) -> None:
    if not isinstance(sizes, AttentionSizes):
        raise UnsupportedError.about(
            _FUNCTION, "sizes", must="be AttentionSizes", got=repr_of(sizes), then="Make one of its figures."
        )
    for name, value in (("length", length), ("repeats", repeats), ("cores", 1 if cores is None else cores)):
        whole(_FUNCTION, name, value, low=1)
    check_mask(_FUNCTION, mask, length)


@dataclass(frozen=True)
class _Probes:
    """The probes of a machine; every method is run by all ranks."""

    exchange: Exchange
    sizes: AttentionSizes
    length: int
    mask: Mask | None
    cores: int | None
    repeats: int

    def machine(self) -> Machine:
        """All figures."""
        start, call, backward_call = self._fixed_costs()
        pairs, seconds = self._pairs(range(self.length), range(self.length)), self._kernels()
        pair, row, key = self._parts(pairs, seconds[0], call)
        sizes, link = self.sizes, self._link()
        channels = sizes.batch * sizes.heads * sizes.head_dim
        return Machine(
            flops=4 * channels / pair,
            backward_flops=10 * channels * pairs / seconds[1],
            split_flops=None if seconds[2] is None else 14 * channels * pairs / seconds[2],
            link=link,
            overlap=self._overlap(link),
            memory=self._memory(),
            fresh=self._fresh(),
            row=row / (sizes.batch * sizes.heads),
            key=key / (sizes.batch * (sizes.kv_heads or sizes.heads)),
            call=call,
            backward_call=backward_call,
            start=start,
            cores=self.cores,
        )

    @property
    def _computes(self) -> bool:
        """Whether this rank computes where no more ranks may than there are processors."""
        return self.cores is None or self.exchange.rank < self.cores

    def _seconds(self, call: Callable[[], Any], *, everywhere: bool = False, times: int | None = None) -> float:
        """The median of the slowest rank's seconds for a call that all ranks begin together; the first one warms up."""
        seconds = []
        with collector_off():
            for _ in range((times or self.repeats) + 1):
                dist.barrier(group=self.exchange.group)
                begin = time.perf_counter()
                if everywhere or self._computes:
                    call()
                seconds.append(time.perf_counter() - begin)
        every = self.exchange.numbers([int(1e9 * one) for one in seconds[1:]])
        slowest: list[int] = [max(one) for one in zip(*every, strict=True)]
        return 1e-9 * max(1.0, statistics.median(slowest))

    def _tensors(self, length: int, *, grads: bool = False) -> list[Tensor]:
        """Query, key, value and a gradient of the output."""
        sizes = self.sizes
        heads = (sizes.heads, sizes.kv_heads or sizes.heads)
        generator = torch.Generator().manual_seed(0)
        shapes = [(sizes.batch, heads[place in (1, 2)], length, sizes.head_dim) for place in range(4)]
        tensors = [torch.randn(shape, generator=generator).to(sizes.dtype) for shape in shapes]
        return [tensor.requires_grad_(grads and place < 3) for place, tensor in enumerate(tensors)]

    def _pairs(self, queries: range, keys: range) -> float:
        """Pairs of some queries and keys that the mask allows, in the mean over what it distinguishes."""
        length = self.length
        cuts = sorted({0, queries.start, queries.stop, keys.start, keys.stop, length})
        chunks = [range(first, last) for first, last in pairwise(cuts)]
        plan = plan_attention(self.mask, length, ranks=len(chunks), layout=ShardLayout(tuple((c,) for c in chunks)))
        asking, given = ([chunk.start in part for chunk in chunks] for part in (queries, keys))
        return int(plan.work[asking][:, given].sum()) / max(1, plan.variants)

    def _parts(self, pairs: float, seconds: float, call: float) -> tuple[float, float, float]:
        """Seconds forward of a pair, a query and a key of all heads, from the whole call and two smaller ones.

        A few queries with all keys show what a key takes, and all queries with one key what a query takes.
        """
        length, few = self.length, 2 * QUERY_BLOCK
        pair = seconds / max(1.0, pairs)
        if length < 4 * few:
            return pair, 0.0, 0.0
        query, key, value, _ = self._tensors(length)
        whole = Problem.of(_FUNCTION, query, key, value, mask=self.mask)
        counts, times = [[pairs, length, length]], [seconds - call]
        for rows, keys in ((range(length - few, length), range(length)), (range(length), range(1))):
            here = slice(keys.start, keys.stop)
            tensors = query[:, :, rows.start : rows.stop], key[:, :, here], value[:, :, here]
            part = part_of(whole, Region(range(self.sizes.heads), rows, keys), *tensors)
            counts.append([self._pairs(rows, keys), len(rows), len(keys)])
            times.append(self._seconds(partial(run, _FUNCTION, part, Want()), times=_RUNS) - call)
        solved = torch.linalg.solve_ex(torch.tensor(counts).double(), torch.tensor(times).double()).result.tolist()
        # Few pairs for each query and key cannot be distinguished from them.
        return tuple(solved) if all(0.0 < one < inf for one in solved) else (pair, 0.0, 0.0)

    def _kernels(self) -> tuple[float, float, float | None]:
        """Seconds of forward, of backward, and of backward with gradients of queries and of keys apart."""
        *leaves, grad = self._tensors(self.length, grads=True)
        problem = Problem.of(_FUNCTION, *leaves, mask=self.mask)
        results: list[Tensor] = []

        def forward() -> None:
            # The next result takes the memory of the one before; new memory is a figure of its own.
            results.clear()
            results.append(run(_FUNCTION, problem, Want()).output)

        def backward() -> None:
            torch.autograd.grad(results[0], leaves, grad, retain_graph=True)

        seconds = self._seconds(forward), self._seconds(backward)
        results.clear()
        plain = problem.with_tensors(*(leaf.detach() for leaf in leaves))
        by_rows = choose(_FUNCTION, problem, Want()).by_rows
        if by_rows is None:
            return *seconds, None
        _, _, rows = by_rows.forward(plain)

        def split() -> None:
            _, _, sums = by_rows.query_gradients(plain, rows, (grad, None), [])
            by_rows.key_gradients(plain, rows[2], sums, grad)

        return *seconds, self._seconds(split)

    def _fixed_costs(self) -> tuple[float, float, float]:
        """Seconds of validating a call on all ranks, and of a kernel's call forward and backward."""
        query, key, value, grad = self._tensors(_FEW)
        options: dict[str, Any] = {"mask": None, "scores": (), "scale": None, "dropout": 0.0, "seed": None}
        request = Request(_FUNCTION, (query, key, value), self.exchange.group, "contiguous", "ring", Want(), options)
        start = self._seconds(lambda: ShardedCall.of(request), everywhere=True, times=_RUNS)
        call = ShardedCall.of(request)
        region = Region(call.heads, range(_FEW), range(_FEW))
        done = call.run(call.part(region, query, key, value), Want(lse=True))
        assert done.lse is not None
        rows = FinishedRows(done.output.to(done.lse.dtype), done.lse, grad, None)

        def forward() -> None:
            call.run(call.part(region, query, key, value), Want(lse=True))

        def backward() -> None:
            call.partial_gradients(call.part(region, query, key, value), rows, [])

        return start, self._seconds(forward, times=_RUNS), self._seconds(backward, times=_RUNS)

    def _memory(self) -> float:
        """Bytes read and written per second by copies of a rank's queries."""
        query, *_ = self._tensors(self._part)
        return 2 * query.numel() * query.element_size() / self._seconds(query.clone, times=_RUNS)

    def _fresh(self) -> float:
        """Bytes per second of new memory that is written, beyond the time of writing it again."""

        def first() -> None:
            # A private map is new memory, whatever the allocator keeps; pages of a shared one take longer.
            memory = mmap.mmap(-1, _PAGES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            torch.frombuffer(memory, dtype=torch.uint8).fill_(1)
            memory.close()

        buffer = torch.empty(_PAGES, dtype=torch.uint8)
        rewritten = self._seconds(lambda: buffer.fill_(1), times=_RUNS)
        return _PAGES / max(self._seconds(first, times=_RUNS) - rewritten, 1e-9)

    @property
    def _part(self) -> int:
        """Tokens of a rank."""
        return max(1, self.length // self.exchange.ranks)

    def _link(self) -> Link:
        """Latency and bandwidth of messages to all ranks at once."""
        others = self.exchange.ranks - 1
        if not others:
            return Link(1e30)
        small = self._seconds(lambda: self._exchanged(torch.zeros(_SMALL), _MESSAGES), everywhere=True, times=_RUNS)
        _, key, *_ = self._tensors(self._part)
        large = self._seconds(lambda: self._exchanged(key, 2), everywhere=True)
        latency = small / (_MESSAGES * others)
        size = 2 * others * key.numel() * key.element_size()
        return Link(size / max(large - 2 * others * latency, 1e-9), latency)

    def _exchanged(self, tensor: Tensor, times: int) -> None:
        finish(self._begin(tensor, times))

    def _begin(self, tensor: Tensor, times: int) -> list[Any]:
        """Begin to send a tensor to each other rank some times."""
        others = [times * (rank != self.exchange.rank) for rank in range(self.exchange.ranks)]
        received = [[torch.empty_like(tensor) for _ in range(count)] for count in others]
        return self.exchange.start([[tensor] * count for count in others], received)

    def _overlap(self, link: Link) -> float:
        """The share of a message's time that computing hides."""
        others = self.exchange.ranks - 1
        if not others:
            return 1.0
        query, key, value, _ = self._tensors(max(1, self.length // 4))
        message = self._tensors(self._part)[1]
        problem = Problem.of(_FUNCTION, query, key, value)

        def both() -> None:
            works = self._begin(message, 2)
            run(_FUNCTION, problem, Want())
            finish(works)

        alone = self._seconds(lambda: run(_FUNCTION, problem, Want()), everywhere=True)
        together = self._seconds(both, everywhere=True)
        seconds = 2 * others * (link.latency + message.numel() * message.element_size() / link.bandwidth)
        return min(1.0, max(0.0, (alone + seconds - together) / min(alone, seconds)))
