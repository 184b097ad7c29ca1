"""The time of attention over ranks, simulated from a plan and the figures of links and processors.

Pairs times FLOPs per pair are the time of computing, bytes and latency that of messages. A rank begins a step when its
computing and its messages of the step before have ended; messages pass while it computes, as far as links overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from clearhead.arguments import one_of, repr_of
from clearhead.distributed.machine import AttentionSizes, Machine
from clearhead.distributed.plan import FEW_KEYS, RING_PIECES, Plan
from clearhead.errors import UnsupportedError
from clearhead.shapes import Float

__all__ = ["PassTime", "Simulation", "simulate"]

SimulatedMethod: TypeAlias = Literal["gather", "ring", "heads"]
METHODS: Final = get_args(SimulatedMethod)

#: Floating-point operations per pair and channel: two products forward, five backward, each of a multiply and an add.
_FORWARD: Final = 4
_BACKWARD: Final = 10
#: How often a ring reads or writes a row of queries, forward and backward, when it adds a block's partial results.
_ROW_PASSES: Final = (7, 12)
#: How often it reads or writes a key or a value, to cut, send and add up.
_KEY_PASSES: Final = (4, 22)


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """A simulated forward or backward pass.

    Attributes:
        seconds: from the begin to the end of the last rank.
        idle: the share of that time in which processors wait, 0 to 1.
        compute: seconds that each rank computes, float64 ``[ranks]``.
        sent: bytes that each rank sends, float64 ``[ranks]``.
        last_rank: the rank that ends last.
        critical_compute: seconds of computing on the critical path, the chain of steps and messages that ends last; the
            rest of ``seconds`` are messages.
    """

    seconds: float
    idle: float
    compute: Float[Tensor, " ranks"] = field(compare=False, repr=False)
    sent: Float[Tensor, " ranks"] = field(compare=False, repr=False)
    last_rank: int
    critical_compute: float

    def __str__(self) -> str:
        path = self.critical_compute / self.seconds if self.seconds else 1.0
        return (
            f"{_seconds(self.seconds):>10}, idle {100 * self.idle:5.1f} %, "
            f"sends {_bytes(float(self.sent.amax()))} per rank, "
            f"critical path to rank {self.last_rank}: {100 * path:.0f} % computing"
        )


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """Simulated time of attention over ranks; made by ``simulate``. ``str`` is a line for each pass.

    Attributes:
        method: ``"gather"``, ``"ring"`` or ``"heads"``.
        forward: the forward pass.
        backward: the backward pass.
    """

    method: str
    forward: PassTime
    backward: PassTime

    @property
    def seconds(self) -> float:
        """Seconds of both passes."""
        return self.forward.seconds + self.backward.seconds

    @property
    def idle(self) -> float:
        """The share of both passes in which processors wait."""
        waited = sum(part.idle * part.seconds for part in (self.forward, self.backward))
        return waited / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return "\n".join(f"{self.method:<7}{name:<9}{getattr(self, name)}" for name in ("forward", "backward"))


def simulate(plan: Plan, sizes: AttentionSizes, machine: Machine, *, method: SimulatedMethod = "ring") -> Simulation:
    """The time of ``ch.distributed.attention``, forward and backward, on ranks that need not exist.

    A rank computes ``pairs * heads * 4 * head_dim / flops`` seconds forward and ``10 / 4`` of that backward. A message
    takes ``latency + bytes / bandwidth``. With ``n`` tokens per rank, ``"gather"`` sends ``n`` keys and values to every
    rank and computes then; its backward also gathers queries, outputs and their gradients and computes twice as much.
    ``"ring"`` sends the keys and values that the plan says to one rank after the other, in three pieces each, while it
    computes with those that came before, and adds up partial outputs; its backward returns the keys' gradients.
    ``"heads"`` exchanges queries, keys, values and outputs by all-to-all, and each rank computes its heads for all
    tokens.

    Args:
        plan: of ``plan_attention``: mask, length, layout and number of ranks.
        sizes: batch, heads, channels and dtype.
        machine: figures of processors and links.
        method: ``"gather"``, ``"ring"`` or ``"heads"``.

    Returns:
        Seconds, idle share, bytes sent and the critical path of each pass.

    Raises:
        UnsupportedError: ``method`` is none of them, or there are fewer key heads than ranks for ``"heads"``.

    Cost: O(ranks^2) time and memory; some seconds for 1,024 ranks.

    Papers: Liu et al. 2023, "Ring attention with blockwise transformers", section 3; Jacobs et al. 2023, "DeepSpeed
    Ulysses", section 3.

    >>> from clearhead import Causal
    >>> from clearhead.distributed import Link, plan_attention
    >>> sizes, machine = AttentionSizes(heads=32, kv_heads=8, head_dim=128), Machine(flops=4e14, link=Link(5e10, 1e-5))
    >>> idle = {}
    >>> for layout in ("contiguous", "zigzag"):
    ...     plan = plan_attention(Causal(), 131072, ranks=8, layout=layout)
    ...     idle[layout] = round(simulate(plan, sizes, machine).forward.idle, 2)
    >>> idle
    {'contiguous': 0.47, 'zigzag': 0.0}
    """
    for name, value, kind in (("plan", plan, Plan), ("sizes", sizes, AttentionSizes), ("machine", machine, Machine)):
        if not isinstance(value, kind):
            then = {"plan": "Make one by plan_attention."}.get(name, "Make one of its figures.")
            raise UnsupportedError.about("simulate", name, must=f"be a {kind.__name__}", got=repr_of(value), then=then)
    one_of("simulate", "method", method, METHODS, "'ring' is the usual one.")
    kv_heads = sizes.kv_heads or sizes.heads
    if method == "heads" and kv_heads < plan.ranks:
        raise UnsupportedError.about(
            "simulate",
            "method",
            must=f"be one for {kv_heads} key heads on {plan.ranks} ranks",
            got="'heads'",
            then="Use method='ring'.",
        )
    run = _METHODS[method]
    forward, backward = (run(_Ranks(plan, sizes, machine), is_backward) for is_backward in (False, True))
    return Simulation(method=method, forward=forward.passed(), backward=backward.passed())


class _Ranks:
    """The clocks of all ranks, and what they computed and sent."""

    def __init__(self, plan: Plan, sizes: AttentionSizes, machine: Machine) -> None:
        self.plan, self.sizes, self.machine = plan, sizes, machine
        self.rank = torch.arange(plan.ranks)
        self.tokens = torch.tensor([sum(map(len, chunks)) for chunks in plan.layout.chunks], dtype=torch.float64)
        self.chunks = torch.tensor([len(chunks) for chunks in plan.layout.chunks], dtype=torch.float64)
        #: The time of each rank, and how much of its critical path is computing.
        self.time = torch.zeros(plan.ranks, dtype=torch.float64)
        self.path = torch.zeros_like(self.time)
        self.computed, self.sent = torch.zeros_like(self.time), torch.zeros_like(self.time)

    def seconds(self, pairs: Tensor, backward: bool) -> Tensor:
        """Seconds of computing pairs that the mask allows, of all batch entries and heads."""
        sizes, machine = self.sizes, self.machine
        flops = machine.backward_flops or machine.flops if backward else machine.flops
        operations = (_BACKWARD if backward else _FORWARD) * sizes.head_dim
        variants = max(1, self.plan.variants)
        return pairs.double() * (sizes.batch * sizes.heads / variants * operations / flops) + machine.call * (pairs > 0)

    def merging(self, blocks: Tensor, keys: Tensor, backward: bool) -> Tensor:
        """Seconds of adding partial results, in float32, to the rows of all queries and to some keys."""
        if self.machine.memory is None:
            return torch.zeros_like(self.time)
        sizes = self.sizes
        rows = self.tokens * blocks * (sizes.heads * _ROW_PASSES[backward])
        keys = keys * ((sizes.kv_heads or sizes.heads) * _KEY_PASSES[backward])
        return (rows + keys) * (sizes.batch * sizes.head_dim * 4 / self.machine.memory)

    def compute(self, seconds: Tensor) -> None:
        """Every rank computes for some seconds."""
        done = _finished(self.time, seconds, self.machine.cores)
        self.path = self.path + done - self.time
        self.time = done
        self.computed = self.computed + seconds

    def collective(self, sent: Float[Tensor, "ranks ranks"]) -> None:
        """All ranks wait for each other and exchange ``sent[sender, receiver]`` bytes."""
        last = int(self.time.argmax())
        self.time = self.time[last] + self.machine.collective(sent)
        self.path = self.path[last].expand_as(self.path).clone()
        self.sent = self.sent + sent.sum(dim=1) - sent.diagonal()

    def passed(self) -> PassTime:
        last = int(self.time.argmax())
        seconds = float(self.time[last])
        processors = min(self.plan.ranks, self.machine.cores or self.plan.ranks)
        busy = float(self.computed.sum()) / processors
        return PassTime(
            seconds=seconds,
            idle=max(0.0, 1.0 - busy / seconds) if seconds else 0.0,
            compute=self.computed,
            sent=self.sent,
            last_rank=last,
            critical_compute=float(self.path[last]),
        )


def _finished(start: Tensor, seconds: Tensor, cores: int | None) -> Tensor:
    """When ranks end that begin to compute at ``start``, if ``cores`` processors are shared equally."""
    if cores is None or len(start) <= cores:
        return start + seconds
    left, end = seconds.clone(), start.clone()
    now = float(start.min())
    while bool((left > 0).any()):
        active = (left > 0) & (start <= now)
        later = start[(left > 0) & (start > now)]
        if not bool(active.any()):
            now = float(later.min())
            continue
        speed = min(1.0, cores / int(active.sum()))
        step = float(left[active].min()) / speed
        if len(later):
            step = min(step, float(later.min()) - now)
        now += step
        left[active] -= step * speed
        ended = active & (left <= 1e-12 * seconds)
        left[ended] = 0.0
        end[ended] = now
    return end


def _gather(ranks: _Ranks, backward: bool) -> _Ranks:
    sizes, work = ranks.sizes, ranks.plan.work
    per_token = sizes.key_value_bytes + (sizes.row_bytes if backward else 0)
    ranks.collective((ranks.tokens * per_token)[:, None].expand(-1, ranks.plan.ranks))
    ranks.compute(ranks.seconds(work.sum(dim=1), backward))
    if backward:
        ranks.compute(ranks.seconds(work.sum(dim=0), backward))
    return ranks


def _heads(ranks: _Ranks, backward: bool) -> _Ranks:
    sizes, count = ranks.sizes, ranks.plan.ranks
    kv_heads = sizes.kv_heads or sizes.heads
    share = (kv_heads // count + (ranks.rank < kv_heads % count)) / kv_heads
    inputs, outputs = (
        torch.outer(ranks.tokens, share.double()) * size
        for size in (sizes.query_bytes + sizes.key_value_bytes, sizes.query_bytes)
    )
    # To heads each rank sends other ranks' heads of its tokens; back it sends other ranks' tokens of its heads.
    before, after = (outputs, inputs.T) if backward else (inputs, outputs.T)
    ranks.collective(before)
    whole = ranks.seconds(ranks.plan.work.sum(), backward)
    ranks.compute(whole * share)
    ranks.collective(after)
    return ranks


def _ring(ranks: _Ranks, backward: bool) -> _Ranks:
    steps = range(1, ranks.plan.ranks)
    visits = [(0, 0), *((step, piece) for step in steps for piece in range(RING_PIECES))]
    upcoming = _Step(ranks, 0, backward)
    for place, (step, piece) in enumerate(visits):
        here, coming = upcoming, None
        if place + 1 < len(visits):
            next_step, next_piece = visits[place + 1]
            upcoming = here if next_step == step else _Step(ranks, next_step, backward)
            coming = _Messages(ranks, next_step, upcoming.sent[min(next_piece, 1)])
        ranks.compute(here.seconds[min(piece, 1)])
        if coming is not None:
            ranks.time = ranks.time + coming.busy
            coming.wait()
        if backward and step:
            # Gradients of keys return to their rank, and every rank waits for those of its own keys.
            _Messages(ranks, -step, here.received[min(piece, 1)]).wait()
    return ranks


class _Step:
    """What the ranks do in a step of the ring: for the first piece and for each other piece of it.

    Attributes:
        received: keys that each rank receives.
        sent: keys that each rank sends.
        seconds: seconds that each rank computes.
    """

    def __init__(self, ranks: _Ranks, step: int, backward: bool) -> None:
        rank, tokens, pieces = ranks.rank, ranks.plan.tokens, RING_PIECES if step else 1
        owner, receiver = (rank - step) % ranks.plan.ranks, (rank + step) % ranks.plan.ranks
        needed, work = tokens[rank, owner], ranks.plan.work[rank, owner]
        self.received = _in_pieces(needed, needed, pieces)
        self.sent = _in_pieces(tokens[receiver, rank], tokens[receiver, rank], pieces)
        # A piece of several chunks of keys is computed chunk by chunk.
        blocks = 1.0 + (ranks.chunks[owner] - 1.0).clamp(min=0.0) / pieces
        self.seconds = [
            ranks.seconds(pairs, backward) + ranks.merging(blocks, keys, backward) * (pairs > 0)
            for pairs, keys in zip(_in_pieces(work, needed, pieces), self.received, strict=True)
        ]


def _in_pieces(values: Tensor, tokens: Tensor, pieces: int) -> tuple[Tensor, Tensor]:
    """How much of some values is in the first piece of a step, and in each other piece; few keys are not cut."""
    whole, part = values.double(), values.double() / pieces
    cut = tokens >= FEW_KEYS
    return torch.where(cut, part, whole), part * cut


class _Messages:
    """A message of each rank, of some keys and values, to the rank ``shift`` places after it.

    It begins when both ranks have come so far, and holds both until it has arrived.
    """

    def __init__(self, ranks: _Ranks, shift: int, tokens: Tensor) -> None:
        rank, count = ranks.rank, ranks.plan.ranks
        self.ranks, self.sender, receiver = ranks, (rank - shift) % count, (rank + shift) % count
        sent = tokens * ranks.sizes.key_value_bytes
        seconds = ranks.machine.message(sent, rank, receiver)
        first = torch.where(ranks.time[receiver] > ranks.time, receiver, rank)
        #: By sending rank: when the message arrives, and how much of the critical path to that is computing.
        self.arrival = torch.where(seconds > 0, ranks.time[first] + seconds, 0.0)
        self.path = ranks.path[first]
        #: For how long the messages of each rank keep it from computing.
        self.busy = (1.0 - ranks.machine.overlap) * torch.maximum(seconds, seconds[self.sender])
        ranks.sent = ranks.sent + sent

    def wait(self) -> None:
        """Each rank waits for the message that it sends and the one that it receives."""
        ranks = self.ranks
        for until, path in ((self.arrival, self.path), (self.arrival[self.sender], self.path[self.sender])):
            later = until > ranks.time
            ranks.time, ranks.path = torch.where(later, until, ranks.time), torch.where(later, path, ranks.path)


_METHODS: Final[dict[str, Callable[[_Ranks, bool], _Ranks]]] = {"gather": _gather, "ring": _ring, "heads": _heads}


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    size, unit = next((one for one in units if value >= one[0]), units[-1])
    scaled = value / size
    return f"{scaled:.3g} {unit}" if scaled < 999.5 else f"{scaled:.0f} {unit}"


def _seconds(value: float) -> str:
    return _scaled(value, ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")))


def _bytes(value: float) -> str:
    return _scaled(value, ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")))
