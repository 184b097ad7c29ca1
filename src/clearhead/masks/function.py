"""``MaskFunction``, a mask defined by a user's function, and the checked call of users' functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from clearhead.arguments import repr_of
from clearhead.closure import Bound
from clearhead.errors import ClearheadError, MaskError, UnsupportedError
from clearhead.masks.base import Mask
from clearhead.masks.intervals import Intervals
from clearhead.masks.traced import traced_intervals
from clearhead.torch_private import TorchDispatchMode, has_dispatch_mode, transforms, version_of

__all__ = ["MaskFunction", "UserFunction", "call_user_function", "function_name", "tile_text"]


@dataclass(frozen=True, kw_only=True)
class UserFunction:
    """A user's function in error texts.

    Attributes:
        function: the public name that errors start with.
        argument: the function's name among its arguments.
        takes: what the function is called on.
        then: how to write a function that can be called on that.
    """

    function: str
    argument: str = "fn"
    takes: str = "index tensors that broadcast"
    then: str = (
        "Use tensor operations, and look tensors up by the indices, as in table[q_pos, k_pos]: "
        "a tile is a part of the call."
    )


class MaskFunction(Bound, Mask):
    """A mask defined by a function ``fn(batch, head, q_pos, k_pos) -> bool`` over index tensors that broadcast.

    Args:
        fn: called with int64 tensors that broadcast against each other; must return bool of a shape that broadcasts to
            theirs, and must not write into its arguments.

    Raises:
        MaskError: during the attention call, if ``fn`` raises or returns something else; names ``fn`` and the tile.
        UnsupportedError: during the attention call, if ``fn`` writes into its arguments or draws random numbers on a
            CPU.

    Cost: on a CPU, ``fn`` is traced first. A function that compares positions, their distance, or values looked up by
    position, combined with ``& | ~`` in torch's elementwise operations, becomes intervals of keys at a cost of
    ``q_len + k_len``, as ``Causal`` and ``Documents`` do. Any other function is evaluated at every place to find the
    empty tiles, and a second time on tiles that are neither empty nor full; the CPU kernels evaluate it once and store
    one byte per place, up to 2**26 of them.

    >>> MaskFunction(lambda batch, head, q_pos, k_pos: (q_pos + k_pos) % 2 == 0).dense(2, 2).int().tolist()
    [[1, 0], [0, 1]]
    """

    fields: ClassVar[tuple[str, ...]] = ("fn",)
    position_dependent = True
    subject: ClassVar[UserFunction] = UserFunction(function="MaskFunction")

    def __init__(self, fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        if not callable(fn):
            raise MaskError.about("MaskFunction", "fn", must="be callable", got=repr_of(fn), then="Pass a function.")
        self.set_function(fn)

    def placed(self, query_offset: int) -> MaskFunction:
        return self.bound()

    def allows(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        with self.as_called():
            allowed = self._evaluated(batch, head, q_pos, k_pos)
        shape = torch.broadcast_shapes(batch.shape, head.shape, q_pos.shape, k_pos.shape)
        if allowed.dtype != torch.bool or not _broadcasts(allowed.shape, shape):
            raise MaskError.about(
                self.subject.function,
                self.subject.argument,
                must=f"return bool that broadcasts to {tuple(shape)}",
                got=f"{repr_of(allowed)} from {function_name(self.fn)} on {tile_text(batch, head, q_pos, k_pos)}",
                then="Combine comparisons of the arguments with & | ~.",
            )
        return allowed.reshape((1,) * (len(shape) - allowed.ndim) + allowed.shape)

    def _evaluated(self, *indices: Tensor) -> Tensor:
        """The function's result on index tensors that broadcast."""
        return call_user_function(self.subject, self.fn, MaskError, *indices)

    def intervals(self, batch: Tensor, head: Tensor, q_pos: Tensor, k_len: int) -> Intervals | None:
        plain = type(q_pos) is Tensor and q_pos.is_cpu and not has_dispatch_mode()
        if not plain or torch.compiler.is_compiling():
            return None
        return traced_intervals(self.fn, batch, head, q_pos, k_len)


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    return len(padded) == len(target) and all(length in (1, size) for length, size in zip(padded, target, strict=True))


def function_name(fn: Callable[..., Tensor]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def call_user_function(
    subject: UserFunction,
    fn: Callable[..., Tensor],
    error: type[ClearheadError],
    *arguments: Tensor,
    run: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Call a user's function and check that it returns a tensor, writes into no argument and draws no random numbers.

    Args:
        subject: the function in error texts.
        fn: the user's function.
        error: the class of errors about what ``fn`` raises or returns.
        *arguments: its arguments, of which the last four are index tensors.
        run: evaluates the function on these arguments; by default the function itself.

    Raises:
        ClearheadError: a check failed; the text names ``fn`` and the tile.
    """
    before, random = _stamps(arguments), _generator_state(arguments[-1])
    try:
        result = (run or fn)(*arguments)
    except Exception as failure:
        raise error.about(
            subject.function,
            subject.argument,
            must=f"run on {subject.takes}",
            got=f"{type(failure).__name__}: {failure} from {function_name(fn)} on {tile_text(*arguments[-4:])}",
            then=subject.then,
        ) from failure
    if not _untouched(before, arguments):
        raise UnsupportedError.about(
            subject.function,
            subject.argument,
            must="leave its arguments as they are",
            got=f"one that {function_name(fn)} wrote into on {tile_text(*arguments[-4:])}",
            then="Return a new tensor: x + y for x += y, x.masked_fill for x.masked_fill_.",
        )
    # Another thread may have drawn them, so call the function a second time and record its operations.
    if random != _generator_state(arguments[-1]) and _draws(run or fn, arguments):
        raise UnsupportedError.about(
            subject.function,
            subject.argument,
            must="draw no random numbers: it is called several times for a tile, in backward too",
            got=f"a random number that {function_name(fn)} drew on {tile_text(*arguments[-4:])}",
            then="Draw before the call and look up by position, as in noise[q_pos, k_pos]; a module's dropout needs "
            "eval().",
        )
    if not isinstance(result, Tensor):
        raise error.about(
            subject.function,
            subject.argument,
            must="return a tensor",
            got=f"{type(result).__name__} from {function_name(fn)} on {tile_text(*arguments[-4:])}",
            then="Return a tensor built from the arguments.",
        )
    device = arguments[-1].device
    if result.device != device or result.layout != torch.strided:
        raise error.about(
            subject.function,
            subject.argument,
            must=f"return a plain tensor on {device}",
            got=f"{str(result.layout)[6:]} on {result.device} from {function_name(fn)} on {tile_text(*arguments[-4:])}",
            then="Move what it reads to the device of its arguments.",
        )
    return result


def tile_text(*indices: Tensor) -> str:
    """The batch entries, heads, queries and keys of a tile, in words."""
    names = ("batch", "heads", "queries", "keys")
    try:
        return "the tile " + ", ".join(f"{name} {_span(index)}" for name, index in zip(names, indices, strict=True))
    except RuntimeError:  # Under a transform or a trace their elements cannot be read.
        return f"a tile of queries {tuple(indices[2].shape)} and keys {tuple(indices[3].shape)}"


def _span(index: Tensor) -> str:
    if index.numel() == 0:
        return "none"
    low, high = int(index.min()), int(index.max())
    return str(low) if low == high else f"{low} to {high}"


def _generator_state(index: Tensor) -> bytes:
    """The state of torch's CPU generator, to detect a draw; empty if it cannot be read here."""
    if torch.compiler.is_compiling() or not index.is_cpu:
        return b""
    if has_dispatch_mode() or transforms():
        return b""
    state: bytes = torch.get_rng_state().numpy().tobytes()
    return state


def _draws(fn: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> bool:
    drawn = _Drawn()
    with drawn:
        fn(*arguments)
    return drawn.any


class _Drawn(TorchDispatchMode):
    """Records whether an operation draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _stamps(tensors: tuple[Tensor, ...]) -> tuple[int | Tensor, ...]:
    """The version of each tensor, or a copy if torch counts no versions of it, to detect a write."""
    if torch.compiler.is_compiling():
        return ()
    return tuple(tensor.clone() if tensor.is_inference() else version_of(tensor) for tensor in tensors)


def _untouched(stamps: tuple[int | Tensor, ...], tensors: tuple[Tensor, ...]) -> bool:
    return all(
        version_of(tensor) == stamp
        if isinstance(stamp, int)
        else torch.allclose(tensor, stamp, 0.0, 0.0, equal_nan=True)
        for stamp, tensor in zip(stamps, tensors, strict=False)
    )
