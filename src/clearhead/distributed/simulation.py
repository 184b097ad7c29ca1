"""The time of attention over ranks, simulated from a plan and the figures of links and processors.

``costs.py`` counts what each rank computes, moves in memory and sends; the machine's figures turn the counts into
seconds. A rank begins a step when its computing and its messages of the step before have ended; messages pass while it
computes, as far as links overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from clearhead.arguments import one_of, repr_of
from clearhead.distributed.costs import OPERATIONS, GatherCosts, HeadsCosts, RankWork, RingCosts, RingStep, Transfer
from clearhead.distributed.machine import AttentionSizes, Machine
from clearhead.distributed.plan import RING_PIECES, Plan
from clearhead.errors import UnsupportedError
from clearhead.shapes import Float

__all__ = ["PassTime", "Phase", "Simulation", "finished", "simulate"]

SimulatedMethod: TypeAlias = Literal["gather", "ring", "heads"]
METHODS: Final = get_args(SimulatedMethod)


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
    takes ``latency + bytes / bandwidth``, and copies, fills and sums ``bytes / memory``. ``"gather"`` sends the keys
    and values that the plan says to every rank and computes then; its backward also gathers queries and gradients, and
    computes ``14 / 4``. ``"ring"`` sends keys and values to one rank after the other, in three pieces each, while it
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
    ranks = [_Ranks(plan, sizes, machine) for _ in range(2)]
    ranks[0].time += machine.start
    forward, backward = (run(one, is_backward) for one, is_backward in zip(ranks, (False, True), strict=True))
    return Simulation(method=method, forward=forward.passed(), backward=backward.passed())


class _Ranks:
    """The clocks of all ranks, and what they computed and sent."""

    def __init__(self, plan: Plan, sizes: AttentionSizes, machine: Machine) -> None:
        self.plan, self.sizes, self.machine = plan, sizes, machine
        self.rank = torch.arange(plan.ranks)
        #: The time of each rank, and how much of its critical path is computing.
        self.time = torch.zeros(plan.ranks, dtype=torch.float64)
        self.path = torch.zeros_like(self.time)
        self.computed, self.sent = torch.zeros_like(self.time), torch.zeros_like(self.time)

    def seconds(self, work: RankWork) -> Tensor:
        """Seconds of computing and moving, of all batch entries and heads."""
        sizes, machine = self.sizes, self.machine
        backward = machine.backward_flops or machine.flops
        rates = {"forward": machine.flops, "backward": backward}
        variants = max(1, self.plan.variants)
        operations = sizes.batch * sizes.heads / variants * OPERATIONS[work.kernel] * sizes.head_dim
        call = machine.call if work.kernel == "forward" or machine.backward_call is None else machine.backward_call
        computed = work.pairs * (operations / rates.get(work.kernel, machine.split_flops or backward))
        if work.kernel == "forward":
            rows, keys = (
                work.rows * sizes.heads * machine.row,
                work.keys * (sizes.kv_heads or sizes.heads) * machine.key,
            )
            computed = computed + sizes.batch * (rows + keys)
        moved = work.moved / machine.memory if machine.memory else 0.0
        return computed + work.calls * call + moved + (work.fresh / machine.fresh if machine.fresh else 0.0)

    def work(self, work: RankWork) -> None:
        """Every rank computes."""
        self.compute(Phase(self.seconds(work)))

    def compute(self, *phases: Phase) -> None:
        """Every rank computes one phase after the other, while other ranks may be in another phase."""
        sent = self.path
        for phase, end in zip(phases, finished(self.time, phases, self.machine.cores), strict=True):
            begun = phase.begin(self.time)
            self.path = torch.where(begun > self.time + phase.delay, sent, self.path) + end - begun
            self.time, self.computed = end, self.computed + phase.seconds

    def begin(self, transfer: Transfer) -> Tensor:
        """All ranks wait for each other and begin to send; seconds until each rank's messages have arrived."""
        last = int(self.time.argmax())
        self.time = self.time[last].expand_as(self.time)
        self.path = self.path[last].expand_as(self.path)
        self.sent = self.sent + transfer.sent.sum(dim=1) - transfer.sent.diagonal()
        return self.machine.collective(transfer.sent, transfer.tensors)

    def exchange(self, transfer: Transfer) -> None:
        """All ranks wait for each other and for what they send and receive."""
        self.time = self.time + self.begin(transfer)

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


@dataclass(frozen=True)
class Phase:
    """Computing of every rank.

    Attributes:
        seconds: how long, on a processor of its own.
        delay: seconds in which a rank cannot compute after the phase before.
        arrival: when what the phase needs has arrived.
    """

    seconds: Float[Tensor, " ranks"]
    delay: Float[Tensor, " ranks"] | float = 0.0
    arrival: Float[Tensor, " ranks"] | float = 0.0

    def begin(self, end: Tensor) -> Tensor:
        """When the phase begins after one that ends then."""
        return torch.maximum(end + self.delay, torch.as_tensor(self.arrival, dtype=end.dtype).expand_as(end))


def finished(start: Tensor, phases: Sequence[Phase], cores: int | None) -> list[Tensor]:
    """When ranks end each phase that begin the first one at ``start``, if ``cores`` processors are shared equally."""
    if cores is None or len(start) <= cores:
        ends = [start]
        for phase in phases:
            ends.append(phase.begin(ends[-1]) + phase.seconds)
        return ends[1:]
    done = [torch.zeros_like(start) for _ in phases]
    place = torch.zeros(len(start), dtype=torch.int64)
    begin, seconds = phases[0].begin(start), torch.stack([phase.seconds.expand_as(start) for phase in phases])
    left, now = seconds[0].clone(), float(begin.min())
    while bool((running := place < len(phases)).any()):
        active = running & (begin <= now)
        later = begin[running & (begin > now)]
        if not bool(active.any()):
            now = float(later.min())
            continue
        speed = min(1.0, cores / int(active.sum()))
        step = float(left[active].min()) / speed
        if len(later):
            step = min(step, float(later.min()) - now)
        now += step
        left[active] -= step * speed
        for rank in active.nonzero().flatten().tolist():
            at = int(place[rank])
            if left[rank] <= 1e-12 * seconds[at, rank]:
                done[at][rank], place[rank] = now, at + 1
                if at + 1 < len(phases):
                    begin[rank] = phases[at + 1].begin(torch.full_like(start, now))[rank]
                    left[rank] = seconds[at + 1, rank]
    return done


def _gather(ranks: _Ranks, backward: bool) -> _Ranks:
    costs = GatherCosts(ranks.plan, ranks.sizes)
    if not backward:
        before, after = costs.forward()
        ranks.work(before)
        ranks.exchange(costs.key_transfer)
        ranks.work(after)
        return ranks
    before, queries, keys = costs.backward()
    ranks.work(before)
    key_seconds, row_seconds = ranks.begin(costs.key_transfer), ranks.begin(costs.row_transfer)
    arrival = ranks.time + key_seconds + row_seconds
    ranks.time = ranks.time + key_seconds
    # Rows arrive meanwhile, and keep the rank from computing as far as links do not overlap.
    delay = (1.0 - ranks.machine.overlap) * row_seconds
    ranks.compute(Phase(ranks.seconds(queries)), Phase(ranks.seconds(keys), delay, arrival))
    return ranks


def _heads(ranks: _Ranks, backward: bool) -> _Ranks:
    costs = HeadsCosts(ranks.plan, ranks.sizes)
    there, back = costs.transfers(backward)
    before, middle, after = costs.work(backward)
    ranks.work(before)
    ranks.exchange(there)
    ranks.work(middle)
    ranks.exchange(back)
    ranks.work(after)
    return ranks


def _ring(ranks: _Ranks, backward: bool) -> _Ranks:
    costs = RingCosts(ranks.plan, ranks.sizes)
    before, after = costs.ends(backward)
    ranks.work(before)
    steps = range(1, ranks.plan.ranks)
    visits = [(0, 0), *((step, piece) for step in steps for piece in range(RING_PIECES))]
    upcoming = costs.step(0, backward)
    for place, (step, piece) in enumerate(visits):
        here, coming = upcoming, None
        if place + 1 < len(visits):
            next_step, next_piece = visits[place + 1]
            upcoming = here if next_step == step else costs.step(next_step, backward)
            ranks.work(upcoming.cut[min(next_piece, 1)])
            coming = _Messages(ranks, next_step, upcoming.sent[min(next_piece, 1)])
        ranks.work(here.work[min(piece, 1)])
        if coming is not None:
            ranks.time = ranks.time + coming.busy
            coming.wait()
        if backward and step:
            _return_gradients(ranks, step, here, min(piece, 1))
    ranks.work(after)
    return ranks


def _return_gradients(ranks: _Ranks, step: int, here: RingStep, piece: int) -> None:
    """Gradients of keys return to their rank, and every rank waits for those of its own keys and adds them."""
    _Messages(ranks, -step, here.received[piece]).wait()
    ranks.work(here.returned[piece])


class _Messages:
    """Messages of each rank, of some keys and values, to the rank ``shift`` places after it.

    They begin when both ranks have come so far, and hold both until they have arrived.
    """

    def __init__(self, ranks: _Ranks, shift: int, tokens: Tensor) -> None:
        rank, count = ranks.rank, ranks.plan.ranks
        self.ranks, self.sender, receiver = ranks, (rank - shift) % count, (rank + shift) % count
        sent = tokens * ranks.sizes.key_value_bytes
        seconds = ranks.machine.message(sent, rank, receiver, 2)
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
