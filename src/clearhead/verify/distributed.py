"""A function that computes attention on several ranks, called as one function of whole tensors."""

from __future__ import annotations

import inspect
import io
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.distributed.launch import LocalRanks, RankError
from clearhead.distributed.layout import LayoutName, check_layout, positions_of
from clearhead.errors import ShapeError, UnsupportedError
from clearhead.verify.law import REFUSALS, Broken, NotApplicable

__all__ = ["Distributed"]

#: Parameters of a distributed function that do not come from the calling convention.
_OF_RANKS: Final = ("group", "layout", "method")
#: Options about the queries of a call: a rank gets the rows of its queries, along the axis -2.
_OF_QUERIES: Final = ("attn_mask",)
#: Names of the probability of dropout in the calling conventions.
_DROPOUT: Final = ("dropout", "dropout_p")
#: Forward calls whose graphs a rank keeps for backward.
_GRAPHS_KEPT: Final = 8
#: After this many calls in which ranks died or did not answer, further laws are not tried.
_LOSSES: Final = 3
#: The statistics of each query, by attribute of an observation.
_STATISTICS: Final = ("lse", "entropy")


@dataclass(frozen=True, eq=False)
class _RankCall:
    """One forward call, as each rank receives it.

    Attributes:
        function: the function under test.
        layout: the layout in which the sequences are cut.
        number: names the call for backward.
        message: the arguments, pickled without their tensors.
        tensors: query, key, value and the tensors in the options, whole.
        cut: for each tensor whether ranks get the rows of their tokens, along the axis -2, or all of it.
        local: for each tensor whether a rank's gradient is its share of the whole; else it must be the whole gradient.
        seed: the random seed, which is the same on all ranks; None without dropout.
        delays: seconds that ranks wait before the call.
    """

    function: Callable[..., Any]
    layout: LayoutName
    number: int
    message: bytes
    tensors: tuple[Tensor, ...]
    cut: tuple[bool, ...]
    local: tuple[bool, ...]
    seed: int | None
    delays: dict[int, float]


@dataclass(frozen=True, eq=False)
class _RankResult:
    """What one rank computed.

    Attributes:
        tensors: the output, then statistics, each with the rank's queries along axis 2.
        kind: ``"tensor"``, ``"tuple"`` or ``"observation"``.
        names: attributes of an observation in the order of ``tensors``.
        learns: whether the output requires a gradient.
        refusal: why the function refused the call, or None.
    """

    tensors: tuple[Tensor, ...] = ()
    kind: str = "tensor"
    names: tuple[str, ...] = ()
    learns: bool = False
    refusal: str | None = None


class Distributed:
    """A function that computes attention over a sharded sequence, in processes on this machine, for ``verify``.

    ``verify`` calls it on whole tensors: each rank cuts its part of query, key and value, runs the function, and the
    parts of the output are joined. Backward likewise: gradients of query, key and value are those of each rank's part,
    and the gradient of a learned tensor of a score rule must be the sum over all ranks on every rank.

    Args:
        function: a function of a module that other processes can import, or a ``functools.partial`` of one; a script
            needs ``if __name__ == "__main__":``, as for ``multiprocessing``. The function is called on each rank with
            parts ``[batch, heads, len / ranks, head_dim]``, the options of the calling convention, and ``layout=`` if
            it has this parameter; ``torch.distributed`` is initialised with gloo. Masks and score rules speak of
            positions in the whole sequence. An ``attn_mask`` has the rows of the rank's queries, and the columns of all
            keys in the order of the sequence.
        ranks: number of processes, by default 2.
        layout: ``"contiguous"``, or ``"zigzag"``, in which rank ``r`` has chunks ``r`` and ``2 * ranks - 1 - r``.
        timeout: seconds that one call may take on all ranks. A law fails if a rank takes longer or dies.

    Raises:
        ShapeError: there is no such layout, or fewer than one rank.
        UnsupportedError: other processes cannot import the function.

    Cost: the processes start at the first call and stay; a small call then takes a few milliseconds.

    >>> import clearhead as ch
    >>> import torch.nn.functional as F
    >>> local = ch.verify.Distributed(F.scaled_dot_product_attention, ranks=2)
    >>> ch.verify(local, laws=["output and gradients"]).ok     # each rank attends to its own keys only
    False
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        ranks: int = 2,
        layout: LayoutName = "contiguous",
        timeout: float = 30.0,
    ) -> None:
        check_layout("Distributed", layout)
        if not isinstance(ranks, int) or ranks < 1:
            raise ShapeError.about(
                "Distributed", "ranks", must="be a number of processes", got=repr(ranks), then="Two are enough to try."
            )
        _check_importable(function)
        self.function, self.ranks, self.layout, self.timeout = function, ranks, layout, timeout
        self.__name__ = self.__qualname__ = f"{_name(function)} on {ranks} ranks, {layout}"
        with_layout, signature = _signatures(function)
        self._function = partial(function, layout=layout) if with_layout else function
        if signature is not None:
            self.__signature__ = signature
        self._delays: dict[int, float] = {}
        self._local: LocalRanks | None = None
        self._calls, self._losses = 0, 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Run the function on every rank and join the parts of its result."""
        message, tensors = _packed((query, key, value, options))
        rows = [options.get(name) for name in _OF_QUERIES]
        local = tuple(place < 3 or any(tensor is one for one in rows) for place, tensor in enumerate(tensors))
        # A mask of one row for all queries is each rank's mask as it is.
        cut = tuple(
            mine and (place < 3 or (tensor.ndim > 1 and tensor.shape[-2] > 1))
            for place, (mine, tensor) in enumerate(zip(local, tensors, strict=True))
        )
        drops = any(options.get(name) for name in _DROPOUT)
        self._calls += 1
        call = _RankCall(
            function=self._function,
            layout=self.layout,
            number=self._calls,
            message=message,
            tensors=tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors),
            cut=cut,
            local=local,
            seed=int(torch.randint(2**62, (1,))) if drops else None,
            delays=self._delays,
        )
        results: list[_RankResult] = self._run(_forward, call, torch.is_grad_enabled())
        first = _agreed(results)
        joined = [self._joined(parts, query.shape[2]) for parts in zip(*(one.tensors for one in results), strict=True)]
        if first.learns:
            joined[0] = _Whole.apply(self, call, joined[0], *tensors)  # type: ignore[no-untyped-call]
        if first.kind == "observation":
            return SimpleNamespace(**dict(zip(first.names, joined, strict=True)))
        return tuple(joined) if first.kind == "tuple" else joined[0]

    @contextmanager
    def late(self, rank: int, seconds: float) -> Iterator[None]:
        """Let one rank begin each call later than the others."""
        self._delays = {rank: seconds}
        try:
            yield
        finally:
            self._delays = {}

    def on(self, ranks: int) -> Distributed:
        """The same function on another number of ranks."""
        return Distributed(self.function, ranks=ranks, layout=self.layout, timeout=self.timeout)

    def close(self) -> None:
        """End the processes; a further call starts others."""
        if self._local is not None:
            self._local.close()
        self._local = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _gradients(self, call: _RankCall, grad: Tensor) -> list[Tensor | None]:
        """The gradients of a call's tensors, each for the whole sequence."""
        of_ranks: list[list[Tensor | None]] = self._run(_backward, call.number, grad)
        sums: list[Tensor | None] = []
        for place, (tensor, local) in enumerate(zip(call.tensors, call.local, strict=True)):
            if not tensor.requires_grad:
                sums.append(None)
                continue
            grads = [torch.zeros_like(tensor) if one[place] is None else one[place] for one in of_ranks]
            parts = [one for one in grads if one is not None]
            if not local:
                _check_same(parts)
            sums.append(torch.stack(parts).sum(dim=0) if local else parts[0])
        return sums

    def _run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        if self._losses >= _LOSSES:
            raise NotApplicable(f"not tried: in {_LOSSES} calls before, ranks died or did not answer")
        if self._local is None:
            self._local = LocalRanks(self.ranks, timeout=self.timeout)
        try:
            return self._local.run(function, *arguments)
        except RankError as error:
            self._local = None
            self._losses += not error.raised
            raise RankError(error.reason, raised=error.raised) from None

    def _joined(self, parts: tuple[Tensor, ...], length: int) -> Tensor:
        """The parts of all ranks in the order of the sequence."""
        places = [positions_of(length, self.ranks, rank, self.layout) for rank in range(self.ranks)]
        for rank, (part, positions) in enumerate(zip(parts, places, strict=True)):
            if part.ndim < 3 or part.shape[2] != len(positions):
                raise Broken(f"rank {rank} returns shape {tuple(part.shape)} for {len(positions)} queries")
        return torch.cat(parts, dim=2)[:, :, torch.cat(places).argsort()]


class _Whole(torch.autograd.Function):
    """The joined output, whose backward runs on the ranks."""

    @staticmethod
    def forward(ctx: Any, subject: Distributed, call: _RankCall, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.subject, ctx.call = subject, call
        return output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *ctx.subject._gradients(ctx.call, grad))


# On the ranks -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Graph:
    """A forward call on a rank, for its backward: the part of the output, its rows, and the whole leaves."""

    output: Tensor
    rows: Tensor
    leaves: tuple[Tensor, ...]


@dataclass(frozen=True)
class _Graphs:
    """The latest forward calls on this rank, by number."""

    calls: OrderedDict[int, _Graph] = field(default_factory=OrderedDict)

    def add(self, number: int, graph: _Graph) -> None:
        self.calls[number] = graph
        while len(self.calls) > _GRAPHS_KEPT:
            self.calls.popitem(last=False)


_GRAPHS: Final = _Graphs()


def _forward(call: _RankCall, learning: bool) -> _RankResult:
    """Run the function on this rank's part."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    time.sleep(call.delays.get(rank, 0.0))
    if call.seed is not None:
        torch.manual_seed(call.seed)
    leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in call.tensors)
    parts = []
    for tensor, cut in zip(leaves, call.cut, strict=True):
        positions = positions_of(tensor.shape[-2], ranks, rank, call.layout) if cut else None
        parts.append(tensor if positions is None else tensor[..., positions, :])
    with torch.set_grad_enabled(learning):
        query, key, value, options = _unpacked(call.message, parts)
        try:
            result = call.function(query, key, value, **options)
        except REFUSALS as refusal:
            return _RankResult(refusal=f"{refusal}")
    kind, names, tensors = _read(result)
    output = tensors[0]
    if output.requires_grad:
        rows = positions_of(call.tensors[0].shape[2], ranks, rank, call.layout)
        _GRAPHS.add(call.number, _Graph(output, rows, leaves))
    return _RankResult(tuple(one.detach() for one in tensors), kind, names, output.requires_grad)


def _backward(number: int, grad: Tensor) -> list[Tensor | None]:
    """The gradients of the leaves of a forward call on this rank; None for those that require or get none."""
    graph = _GRAPHS.calls[number]
    wanted = [leaf for leaf in graph.leaves if leaf.requires_grad]
    part = grad[:, :, graph.rows]
    grads = iter(torch.autograd.grad(graph.output, wanted, part, retain_graph=True, allow_unused=True))
    return [next(grads) if leaf.requires_grad else None for leaf in graph.leaves]


def _read(result: Any) -> tuple[str, tuple[str, ...], tuple[Tensor, ...]]:
    """The kind of a result, names of its tensors, and its tensors: the output first, then values of each query."""
    if isinstance(result, Tensor):
        return "tensor", (), (result,)
    if hasattr(result, "output"):
        names = ("output", *(name for name in _STATISTICS if getattr(result, name, None) is not None))
        return "observation", names, tuple(getattr(result, name) for name in names)
    if isinstance(result, (tuple, list)) and result and isinstance(result[0], Tensor):
        return "tuple", (), tuple(one for one in result if isinstance(one, Tensor))
    raise TypeError(f"returned {type(result).__name__}, not a tensor, an Observation or a tuple that begins with one")


# Arguments --------------------------------------------------------------------------------------------------------


class _Packer(pickle.Pickler):
    """A pickler that collects tensors in place of writing them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        for place, tensor in enumerate(self.tensors):
            # Query, key and value are separate leaves even if they are one tensor.
            if tensor is obj and place >= 3:
                return place
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpacker(pickle.Unpickler):
    """The reader of what ``_Packer`` wrote, with other tensors in the places of those collected."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def _packed(arguments: tuple[Any, ...]) -> tuple[bytes, list[Tensor]]:
    """The arguments without their tensors, and the tensors; the first three are query, key and value."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(arguments)
    return file.getvalue(), packer.tensors


def _unpacked(message: bytes, tensors: list[Tensor]) -> tuple[Any, ...]:
    return tuple(_Unpacker(io.BytesIO(message), tensors).load())


def _agreed(results: list[_RankResult]) -> _RankResult:
    """The result of rank 0, if all ranks returned the same kind of result; a refusal by all is raised."""
    refusals = [one.refusal for one in results]
    if all(refusal is not None for refusal in refusals):
        raise NotImplementedError(refusals[0])
    for what, values in (
        ("refuses the call", [refusal is not None for refusal in refusals]),
        ("returns an output with a gradient", [one.learns for one in results]),
    ):
        if len(set(values)) > 1:
            raise Broken(f"rank {values.index(True)} {what}, and rank {values.index(False)} does not")
    if len({(one.kind, one.names, len(one.tensors)) for one in results}) > 1:
        raise Broken("ranks return different kinds of results")
    return results[0]


def _check_same(gradients: list[Tensor]) -> None:
    """Every rank must have the same gradient of a tensor that all ranks have whole, or their copies would drift."""
    for rank, gradient in enumerate(gradients):
        same = (gradient == gradients[0]) | (gradient.isnan() & gradients[0].isnan())
        if not bool(same.all()):
            error = (gradient - gradients[0]).abs().max().item()
            raise Broken(
                f"ranks 0 and {rank} have gradients of a learned tensor that differ by {error:.2g}; "
                "each needs the sum over all ranks"
            )


def _check_importable(function: Callable[..., Any]) -> None:
    try:
        pickle.dumps(function)
    except Exception as error:
        raise UnsupportedError.about(
            "Distributed",
            "function",
            must="be a function that other processes can import",
            got=f"{_name(function)}: {' '.join(str(error).split())[:160]}",
            then="Write it in a module, at the top level; functools.partial of one is fine.",
        ) from None


def _signatures(function: Callable[..., Any]) -> tuple[bool, inspect.Signature | None]:
    """Whether a function has the parameter ``layout``, and its signature for the calling convention."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False, None
    others = [one for name, one in signature.parameters.items() if name not in _OF_RANKS]
    return "layout" in signature.parameters, signature.replace(parameters=others)


def _name(function: Callable[..., Any]) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__qualname__", type(inner).__name__))
