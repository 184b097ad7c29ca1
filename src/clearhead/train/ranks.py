"""The processes of one training: their mesh, what each computes of a batch, and what they agree on.

A training without torchrun has one rank, and nothing here communicates.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clearhead.batch_part import BatchPart
from clearhead.choices import is_invariant
from clearhead.distributed.layout import chunks_of, positions_of
from clearhead.distributed.liveness import launched
from clearhead.errors import ClearheadError, DataError, ShapeError
from clearhead.train.batches import Batch
from clearhead.train.gradient_order import check_order
from clearhead.train.options import ClassifierOptions, LanguageOptions, ParallelOptions
from clearhead.train.progress import ProgressReporter, Silent

if TYPE_CHECKING:
    from clearhead.distributed.mesh import MeshAxes

__all__ = ["BatchShare", "Ranks", "is_first_process", "opened"]

_Result = TypeVar("_Result")
#: A collective that takes longer raises. A rank that died or hangs is found earlier (``Liveness``).
_TIMEOUT: Final = timedelta(minutes=10)
#: Of sequences along "context"; every process has as much of a causal mask.
_LAYOUT: Final = "zigzag"
_AFTER_A_DEATH: Final = "Add --resume to go on from the last checkpoint."


@dataclass(frozen=True)
class BatchShare:
    """What one process computes of a batch at once.

    Attributes:
        batch: the sequences, padded as the whole batch is.
        part: their place in the whole batch; None for all of it.
        counts: False for a sequence that stands in where there are fewer than processes: it is computed, as the others
            wait for this process, and counts nothing.
    """

    batch: Batch
    part: BatchPart | None
    counts: bool = True

    def among(self, rows: Tensor) -> Tensor:
        """The rows of a result among those of the whole batch, the others 0."""
        if self.part is None:
            return rows
        result = rows.new_zeros(self.part.whole, *rows.shape[1:])
        if self.counts:
            result[self.part.first : self.part.first + self.part.count] = rows
        return result


_ALONE: Final = ParallelOptions(data_parallel=1)


class Ranks:
    """The processes of one training, seen from one of them.

    Args:
        options: degrees, whose product is the number of processes.
        device: the type of device, ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, options: ParallelOptions = _ALONE, device: str = "cpu") -> None:
        self.options = options
        self.size = options.processes
        self.rank = dist.get_rank() if self.size > 1 else 0
        self._axes = _axes_of(options, device) if self.size > 1 else None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and shows progress."""
        return self.rank == 0

    @property
    def parts(self) -> int:
        """Number of parts of a batch."""
        return self.options.data_parallel * self.options.shard if self.size > 1 else 1

    @property
    def index(self) -> int:
        """Which part of a batch this process computes."""
        return 0 if self._axes is None else self._axes.batch_part[0]

    @property
    def mean_over(self) -> int:
        """Over how many processes a backward pass averages the gradients."""
        return 1 if self._axes is None or is_invariant() else self._axes.copies

    def check(self, function: str, options: LanguageOptions | ClassifierOptions, length: int) -> None:
        """Raise an error for options that this number of processes cannot train with.

        Args:
            function: name of the caller in error texts.
            options: those of the model and of training.
            length: the longest sequence in tokens.
        """
        check_order(function, self.options)
        degrees, parts = self.options, self.parts * options.accumulate
        hidden = options.feedforward_dim or 4 * options.embed_dim
        rules: list[tuple[bool, str, str, object]] = [
            (
                options.batch_size >= parts,
                "--batch-size",
                f"be at least {parts}, the parts of a batch",
                options.batch_size,
            ),
            *(
                (
                    not size % degrees.tensor_parallel,
                    flag,
                    f"divide by --tensor-parallel {degrees.tensor_parallel}",
                    size,
                )
                for flag, size in (("--num-heads", options.num_heads), ("--feedforward-dim", hidden))
            ),
        ]
        if self.size > 1:
            drops = options.dropout > 0.0 or getattr(options, "embedding_dropout", 0.0) > 0.0
            rules.append(
                (not (options.compile and drops), "--compile", "be without dropout over several processes", "both")
            )
        if degrees.context_parallel > 1:
            least, classifies = 2 * degrees.context_parallel, isinstance(options, ClassifierOptions)
            flag = "--max-len" if classifies else "--context"
            rules.append((length >= least, flag, f"be at least {least} for --context-parallel", length))
            if isinstance(options, ClassifierOptions):
                rules.append(
                    (not options.neighbours, "--neighbours", "be 0 with --context-parallel", options.neighbours)
                )
                drop = options.attention_dropout
                rules.append((drop == 0.0, "--attention-dropout", "be 0 with --context-parallel", drop))
        for holds, flag, must, got in rules:
            if not holds:
                raise ShapeError.about(
                    function, flag, must=must, got=got, then="Choose other degrees or another value."
                )

    def parallelized(self, model: nn.Module) -> nn.Module:
        """The model on the mesh; itself for one process.

        Under ``set_invariant(True)`` every process has a whole model, whose gradients ``GradientSum`` adds.
        """
        if self._axes is None:
            return model
        if is_invariant():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), 0)
            return model
        from clearhead.distributed.parallel import parallelize

        # Where every process has whole parameters, gathering them again for backward would copy them for nothing.
        return parallelize(
            model,
            self._axes.mesh,
            equal_batches=False,
            layout=_LAYOUT,
            reshard_after_forward=self.options.shard > 1,
        )

    def shares(self, batch: Batch, accumulate: int = 1) -> Iterator[BatchShare]:
        """What this process computes of a batch, one after the other.

        Args:
            batch: the whole batch.
            accumulate: number of shares.
        """
        count = self.parts * accumulate
        if count == 1 and self.options.context_parallel == 1:
            yield BatchShare(batch, None)
            return
        index = self.index
        for place in range(index * accumulate, (index + 1) * accumulate):
            share = _share(batch, *chunks_of(len(batch.ids), count, place, "contiguous"))
            yield self._tokens(share) if self.options.context_parallel > 1 else share

    def node_share(self, batch: Batch, node: range) -> BatchShare:
        """The sequences of a node, as a share."""
        return BatchShare(batch, None) if len(node) == len(batch.ids) else _share(batch, node)

    def _tokens(self, share: BatchShare) -> BatchShare:
        """This process's tokens of each sequence, and their targets; ``lengths`` stay those of whole sequences."""
        assert self._axes is not None
        assert share.part is not None
        batch, part, count = share.batch, share.part, self.options.context_parallel
        length = batch.ids.shape[1]
        # Sequences that are divided stay padded; one process would pack them.
        before = part.tokens_before if part.packed else part.first * length
        rows = batch.lengths if part.packed else torch.full_like(batch.lengths, length)
        starts = (rows.cumsum(0) - rows + before).tolist()
        # Every process has a token at least.
        ids = nn.functional.pad(batch.ids, (0, max(0, 2 * count - length)))
        places = positions_of(ids.shape[1], count, self._axes.index("context"), _LAYOUT)
        positions = tuple(places.tolist())
        part = replace(part, packed=False, starts=tuple(starts), length=length, positions=positions)
        targets = batch.targets[:, places] if batch.targets.ndim == 2 else batch.targets
        return replace(share, batch=Batch(ids[:, places], batch.lengths, targets), part=part)

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the parts of a batch, in float64."""
        if self.size == 1:
            return list(values)
        summed = torch.tensor(values, dtype=torch.float64, device=self._device())
        dist.all_reduce(summed)
        # Processes along "tensor" compute the same part.
        return (summed / self.options.tensor_parallel).tolist()

    def rows_of_all(self, rows: Tensor) -> Tensor:
        """The rows of every process: the sum of tensors in which each process filled its rows of a batch."""
        if self.size == 1:
            return rows
        summed = rows.to(self._device())
        dist.all_reduce(summed)
        # Processes along "tensor" and "context" filled the same rows.
        return (summed / (self.options.tensor_parallel * self.options.context_parallel)).to(rows.device)

    def agreed(self, work: Callable[[], _Result]) -> _Result:
        """The result of ``work``, done by the first process alone; its error is raised by every process."""
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = work()
            except ClearheadError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        result: _Result = outcome[0]
        return result

    def check_same(self, function: str, what: str, value: object) -> None:
        """Raise ``DataError`` on every process unless all have an equal value."""
        if self.size == 1:
            return
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        other = next((rank for rank, each in enumerate(values) if each != values[0]), None)
        if other is not None:
            must, got = "be the same on every rank", f"another on rank {other}"
            raise DataError.about(function, what, must=must, got=got, then="Give every process the same files.")

    def watcher(self, watcher: ProgressReporter | None) -> ProgressReporter:
        """The progress reporter of the first process; the others show nothing."""
        return watcher if watcher is not None and self.first else Silent()

    @property
    def job(self) -> str:
        """What the processes that one torchrun starts, and starts again, have in common; empty without torchrun."""
        if self.size == 1:
            return ""
        return f"{os.environ.get('TORCHELASTIC_RUN_ID')} of process {os.getppid()} on {socket.gethostname()}"

    def barrier(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1, device=self._device()))

    def _device(self) -> str:
        assert self._axes is not None
        return self._axes.mesh.device_type


def _axes_of(options: ParallelOptions, device: str) -> MeshAxes:
    # These take a second to import, which one process does not need.
    from torch.distributed.device_mesh import init_device_mesh

    from clearhead.distributed.mesh import MeshAxes

    sizes = {
        "data": options.data_parallel,
        "context": options.context_parallel,
        "shard": options.shard,
        "tensor": options.tensor_parallel,
    }
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return MeshAxes.of("train", mesh)


def _share(batch: Batch, rows: range) -> BatchShare:
    """Some rows of a batch."""
    counts = len(rows) > 0
    if not counts:
        rows = range(1)
    lengths = batch.lengths
    part = BatchPart(
        rows.start,
        len(rows),
        len(batch.ids),
        packed=bool((lengths < batch.ids.shape[1]).any()) and not is_invariant(),
        tokens_before=int(lengths[: rows.start].sum()),
        tokens=int(lengths.sum()),
    )
    chosen = slice(rows.start, rows.stop)
    return BatchShare(Batch(batch.ids[chosen], lengths[chosen], batch.targets[chosen]), part, counts)


def is_first_process() -> bool:
    """Whether this is the first of the processes that torchrun started, or the only one."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def opened(options: ParallelOptions | None, device: torch.device, function: str) -> Iterator[Ranks]:
    """The processes that torchrun started, in one process group for the time of a ``with`` block.

    A group that exists already is used, and stays.

    Args:
        options: the degrees; by default data parallel.
        device: where the model is trained.
        function: name of the caller in error texts.

    Raises:
        ShapeError: the degrees do not multiply to the number of processes.
    """
    options = options or ParallelOptions()
    starts = not dist.is_initialized() and "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ["WORLD_SIZE"]) > 1
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    with launched(function, _AFTER_A_DEATH, backend=backend, timeout=_TIMEOUT) if starts else nullcontext():
        size = dist.get_world_size() if dist.is_initialized() else 1
        yield Ranks(options.checked(function, size), device.type)
