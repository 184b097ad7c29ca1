"""The masks of Hugging Face transformers as ours: read from the functions that transformers composes them of.

transformers gives a mask interface a function of positions, composed of a few functions by "and" and "or", and the
user's padding mask. Both become one clearhead mask, which stands in for the tensor throughout the model. No table of
``q_len * k_len`` is made unless a model reads its elements, or the function is not one of transformers' own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any, Final, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.fx import Proxy
from transformers.masking_utils import causal_mask_function, sdpa_mask

from clearhead.choices import is_invariant
from clearhead.integrations.torch.attention_weights import MaskTable
from clearhead.integrations.torch.polarity import from_additive
from clearhead.integrations.torch.unpadded import Packed
from clearhead.integrations.transformers.deferred_tensor import DeferredTensor
from clearhead.masks import Causal, Dense, Documents, Mask, Padding, Window
from clearhead.masks.base import conjuncts
from clearhead.masks.parts import is_padding
from clearhead.shapes import Bool
from clearhead.tensors import traces
from clearhead.torch_private import version_of, wrapper_tensor

__all__ = ["MaskTensor", "make_mask", "mask_of_tensor", "symbolic_mask"]

_MODULE: Final = "transformers.masking_utils"
#: Keys of a batch up to which finding intervals for one query takes longer than skipping keys saves.
_FEW_KEYS: Final = 2**13


class MaskTensor(DeferredTensor):
    """A mask that models carry as the bool tensor ``[batch, 1, q_len, k_len]`` it stands for.

    The first operation that reads the elements computes them. Attention does not.

    Attributes:
        mask: None allows everything.
        query_offset: position of the first query, where the first key's is 0.
    """

    mask: Mask | None
    query_offset: int
    _table: Tensor | None
    _elements: Tensor | None
    _packed: list[tuple[Packed, Mask] | None]
    _opened: MaskTable | None

    @staticmethod
    def __new__(
        cls, mask: Mask | None, shape: tuple[int, int, int, int], query_offset: int, device: torch.device | str
    ) -> MaskTensor:
        made = wrapper_tensor(cls, shape, torch.bool, torch.device(device))
        made.mask, made.query_offset, made._table, made._elements = mask, query_offset, None, None
        made._packed, made._opened = [], None
        return made

    def table(self) -> Bool[Tensor, "batch 1 q_len k_len"]:
        """The values, the same tensor each time."""
        if self._table is None:
            self._table = self.read().clone()
        return self._table

    #: Operators may write into what they read.
    elements = table

    def read(self) -> Bool[Tensor, "batch 1 q_len k_len"]:
        """The values, read only."""
        if self._table is not None:
            return self._table
        if self._elements is None:
            batch, _, q_len, k_len = self.shape
            allowed = torch.ones(1, dtype=torch.bool)
            if self.mask is not None:
                allowed = self.mask.dense(q_len, k_len, query_offset=self.query_offset, batch=batch)
            self._elements = allowed.to(self.device).expand(self.shape)
        return self._elements

    def opened(self) -> MaskTable:
        """The values as the formula of attention reads them: the same tensors each time."""
        if self._table is not None:
            return MaskTable.of(self._table)
        if self._opened is None:
            self._opened = MaskTable.of(self.read())
        return self._opened

    def meaning(self) -> Mask | None:
        """The mask; the table once it exists, as it may have been written."""
        return self.mask if self._table is None else Dense(self._table)

    def packed(self) -> tuple[Packed, Mask] | None:
        """How to remove padding, and the mask of the packed tokens: the same objects each time. None without padding,
        or if the rest of the mask depends on more than distances."""
        if self._table is not None:
            return None
        if not self._packed:
            self._packed.append(self._find_packing())
        return self._packed[0]

    def _find_packing(self) -> tuple[Packed, Mask] | None:
        batch, _, q_len, k_len = self.shape
        parts = [] if self.mask is None else conjuncts(self.mask)
        padding = [part for part in parts if is_padding(part)]
        others = [part for part in parts if not is_padding(part)]
        if q_len != k_len or self.query_offset != 0 or not padding or not all(part.relative for part in others):
            return None
        real = reduce(and_, (part.dense(1, k_len, query_offset=0, batch=batch) for part in padding))
        packed = Packed.of(real.expand(batch, 1, 1, k_len)[:, 0, 0])
        return packed, reduce(and_, others, packed.documents)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MaskTensor({self.mask!r}, shape={tuple(self.shape)}, query_offset={self.query_offset})"


def make_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Bool[Tensor, "batch len"] | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    cache_position: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """transformers' mask interface: what ``sdpa_mask`` would make, without a table where none is needed.

    Args:
        batch_size: sequences in the batch.
        q_length: queries of this call.
        kv_length: keys that attention will see, unused slots of a static cache included.
        q_offset: position of the first query.
        kv_offset: position of the first key that is still in the cache.
        mask_function: transformers' function of ``(batch, head, q_pos, k_pos)``.
        attention_mask: which tokens are real.
        local_size: passed to ``sdpa_mask`` where a table is made.
        allow_is_causal_skip: passed to ``sdpa_mask`` where a table is made.
        allow_is_bidirectional_skip: whether None may say that everything is allowed.
        use_vmap: whether ``mask_function`` holds a function of the user's, which is not read but called.
        device: where the model computes.
        cache_position: positions of the queries, in place of ``q_length`` and ``q_offset`` before transformers 5.
        **others: what other interfaces use.

    Returns:
        A ``MaskTensor``; None where everything is allowed; a plain bool tensor where a graph is being recorded, where
        the function is not one that transformers makes itself, and for single queries on other devices, whose step may
        be compiled.

    Cost: ``batch * k_len``, where there is padding.
    """
    if cache_position is not None:
        q_length, device = cache_position.shape[0], cache_position.device
        q_offset = cache_position[0]
    recorded = torch.compiler.is_compiling() or _is_traced(attention_mask, q_offset)
    compiled_step = q_length == 1 and torch.device(device).type != "cpu"
    if not recorded and not compiled_step and not use_vmap:
        place = _Place(batch_size, q_length, kv_length, int(q_offset), kv_offset)
        try:
            mask = _simplified([*_parts(_read(mask_function, place)), *_padding(attention_mask, place)], place)
        except _Unreadable:
            pass
        else:
            if mask is None and allow_is_bidirectional_skip:
                return None
            shape = (batch_size, 1, q_length, kv_length)
            return MaskTensor(mask, shape, place.query_offset, device)
    queries = {"q_length": q_length, "q_offset": q_offset, "use_vmap": use_vmap, "device": device}
    if cache_position is not None:
        queries = {"cache_position": cache_position}
    table: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        kv_length=kv_length,
        kv_offset=kv_offset,
        **queries,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip and recorded,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
    )
    return table


def _is_traced(*tensors: object) -> bool:
    """Whether values may not be read, as while ``torch.jit`` or ``torch.fx`` trace, or of fake tensors."""
    return traces() or any(
        isinstance(each, Proxy) or (isinstance(each, Tensor) and type(each) is not Tensor) for each in tensors
    )


class _Unreadable(Exception):
    """A mask function that is unknown, or cannot be read in this call."""


class _Place(NamedTuple):
    """The sizes of a call, and where in the sequence its queries and keys begin."""

    batch: int
    q_len: int
    k_len: int
    q_offset: int
    k_offset: int

    @property
    def query_offset(self) -> int:
        """Position of the first query where the first key's is 0."""
        return self.q_offset - self.k_offset

    def keys(self, tokens: Tensor, missing: int) -> Tensor:
        """The entries ``[batch, k_len]`` of this call's keys, ``missing`` where there are none yet."""
        tokens = tokens[:, self.k_offset : self.k_offset + self.k_len]
        return torch.nn.functional.pad(tokens, (0, self.k_len - tokens.shape[1]), value=missing)


def _read(function: Callable[..., Any], place: _Place) -> Mask | None:
    """A function of transformers as a mask, None where it allows everything."""
    reader = _READERS.get(getattr(function, "__qualname__", ""))
    if reader is None or function.__module__ != _MODULE:
        raise _Unreadable
    names = function.__code__.co_freevars
    inner = dict(zip(names, (cell.cell_contents for cell in function.__closure__ or ()), strict=True))
    try:
        return reader(inner, place)
    except KeyError:
        raise _Unreadable from None


def _all_of(inner: Mapping[str, Any], place: _Place) -> Mask | None:
    return _simplified([part for each in inner["mask_functions"] for part in _parts(_read(each, place))], place)


def _any_of(inner: Mapping[str, Any], place: _Place) -> Mask | None:
    masks = [_read(each, place) for each in inner["mask_functions"]]
    limiting = [mask for mask in masks if mask is not None]
    return reduce(or_, limiting) if len(limiting) == len(masks) else None


def _within_packed(inner: Mapping[str, Any], place: _Place) -> Mask | None:
    """Distances within a packed sequence equal distances in the row, so a mask of distances is the same."""
    mask = _read(inner["mask_function"], place)
    if not all(part.relative for part in _parts(mask)):
        raise _Unreadable
    return mask


def _documents(ids: Tensor, place: _Place) -> Mask:
    if place.query_offset < 0 or place.query_offset + place.q_len > place.k_len:
        raise _Unreadable
    return Documents(ids=ids)


def _chunks(inner: Mapping[str, Any], place: _Place) -> Mask:
    left = inner["left_padding"].reshape(-1, 1)
    start = left if bool((left != left[0]).any()) else left[:1]
    k_pos = torch.arange(place.k_len, device=left.device) + place.k_offset
    ids = (k_pos - start) // inner["chunk_size"]
    return _documents(ids - ids.min(), place)


def _window(inner: Mapping[str, Any], place: _Place) -> Mask:
    # Models whose layers have no window make a windowed mask too, which nothing reads.
    if inner["sliding_window"] < 1:
        raise _Unreadable
    return Window(inner["sliding_window"] - 1, place.k_len)


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any], _Place], Mask | None]]] = {
    "and_masks.<locals>.and_mask": _all_of,
    "or_masks.<locals>.or_mask": _any_of,
    "causal_mask_function": lambda inner, place: Causal(),
    "bidirectional_mask_function": lambda inner, place: None,
    "sliding_window_overlay.<locals>.inner_mask": _window,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": lambda inner, place: Window(
        inner["sliding_window"], inner["sliding_window"]
    ),
    "chunked_overlay.<locals>.inner_mask": _chunks,
    "blockwise_overlay.<locals>.inner_mask": lambda inner, place: _documents(
        place.keys(inner["block_sequence_ids"], -1), place
    ),
    "packed_sequence_mask_function.<locals>.inner_mask": lambda inner, place: _documents(
        inner["packed_sequence_mask"], place
    ),
    "remap_positions_for_packed_sequence.<locals>.inner_mask": _within_packed,
    "padding_mask_function.<locals>.inner_mask": lambda inner, place: _both(_padding(inner["padding_mask"], place)),
}


def _padding(attention_mask: Tensor | None, place: _Place) -> list[Mask]:
    """Which keys are real: an interval of each sequence, or one row of booleans where they form none, and for a
    single query over few keys. In invariant mode an interval tells where a sequence's sums start."""
    if attention_mask is None:
        return []
    real = place.keys(attention_mask.to(torch.bool), False)
    if bool(real.all()):
        return []
    if place.q_len == 1 and real.numel() <= _FEW_KEYS and not is_invariant():
        return [Dense(real[:, None, None, :])]
    start = real.to(torch.int8).argmax(dim=1)
    stop = start + real.sum(dim=1)
    k_pos = torch.arange(place.k_len, device=real.device)
    if not torch.equal(real, (k_pos >= start[:, None]) & (k_pos < stop[:, None])):
        return [Dense(real[:, None, None, :])]
    padding: list[Mask] = []
    if bool((start > 0).any()):
        padding.append(~Padding(start))
    if bool((stop < place.k_len).any()):
        padding.append(Padding(stop))
    return padding


def _parts(mask: Mask | None) -> list[Mask]:
    return [] if mask is None else conjuncts(mask)


def _both(masks: Iterable[Mask]) -> Mask | None:
    """The ``&`` of masks; None of none."""
    whole: Mask | None = None
    for mask in masks:
        whole = mask if whole is None else whole & mask
    return whole


def _simplified(parts: Sequence[Mask], place: _Place) -> Mask | None:
    """The ``&`` of masks with at most one band, without masks that forbid nothing in this call."""
    first, last = place.query_offset, place.query_offset + place.q_len - 1
    windows = [part for part in parts if isinstance(part, Window)]
    before = min((part.before for part in windows if part.before < last), default=None)
    after = min((part.after for part in windows if first + part.after < place.k_len - 1), default=None)
    if any(isinstance(part, Causal) for part in parts) and first < place.k_len - 1:
        after = 0
    band: list[Mask] = []
    if before is not None:
        band = [Window(before, place.k_len if after is None else after)]
    elif after is not None:
        band = [Causal() if after == 0 else Window(max(last, 0), after)]
    # Causality already forbids later slots, such as those that a static cache has not filled yet.
    reach = min(place.k_len, last + 1 + after) if after is not None else place.k_len
    others = [part for part in parts if not isinstance(part, (Causal, Window)) and not _allows_all(part, reach)]
    return _both([*band, *others])


def _allows_all(part: Mask, reach: int) -> bool:
    """Whether padding, or a row of booleans, forbids none of the first ``reach`` keys."""
    if isinstance(part, Padding):
        return bool((part.lengths >= reach).all())
    if not isinstance(part, Dense) or part.allowed.shape[2] != 1:
        return False
    # A row was made because it forbids a key: only a reach short of all keys may leave that one out.
    return reach < part.allowed.shape[3] and bool(part.allowed[..., :reach].all())


# ---- masks that are plain tensors ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Read:
    tensor: ref[Tensor]
    version: int
    query_offset: int
    mask: Mask | None


_LAST: Final = threading.local()


def mask_of_tensor(tensor: Tensor, query_offset: int) -> Mask | None:
    """A bool or additive mask ``[batch | 1, 1, q_len, k_len]`` as a mask: padding, causality, both, or a table.

    All layers of a model are given the same tensor, which is read once.

    Raises:
        ValueError: it adds to scores more than it forbids, or differs between heads.

    Cost: a few passes over the tensor.
    """
    version = version_of(tensor)
    last: _Read | None = getattr(_LAST, "read", None)
    if last is None or last.tensor() is not tensor or (last.version, last.query_offset) != (version, query_offset):
        last = _LAST.read = _Read(ref(tensor), version, query_offset, _of_tensor(tensor, query_offset))
    return last.mask


def symbolic_mask(tensor: Tensor, *, zero_forbids: bool = False) -> MaskTensor:
    """A bool or additive mask ``[batch | 1, 1, q_len, k_len]`` as a ``MaskTensor``.

    All layers of a model are given the same tensor, which is read once.

    Args:
        tensor: the mask; the first query is at position 0.
        zero_forbids: whether 0 forbids and all else allows, in any dtype.

    Raises:
        ValueError: it adds to scores more than it forbids, or differs between heads.

    Cost: a few passes over the tensor.
    """
    key = version_of(tensor), zero_forbids
    last: tuple[ref[Tensor], tuple[int, bool], MaskTensor] | None = getattr(_LAST, "symbolic", None)
    if last is None or last[0]() is not tensor or last[1] != key:
        batch, heads, q_len, k_len = tensor.shape
        mask = _of_tensor(tensor != 0 if zero_forbids else tensor, 0)
        last = _LAST.symbolic = (ref(tensor), key, MaskTensor(mask, (batch, heads, q_len, k_len), 0, tensor.device))
    return last[2]


def _of_tensor(tensor: Tensor, query_offset: int) -> Mask | None:
    allowed = tensor
    if tensor.dtype != torch.bool:
        dense, rules = from_additive(tensor.detach())
        if rules or tensor.requires_grad:
            raise ValueError("the mask adds to scores")
        if dense is None:
            return None
        allowed = dense.allowed
    if allowed.shape[1] != 1:
        raise ValueError("the mask differs between heads")
    if bool(allowed.all()):
        return None
    q_len, k_len = allowed.shape[2:]
    # The last query sees all real keys of a causal mask too.
    real = allowed[:, 0, -1]
    place = _Place(len(real), q_len, k_len, query_offset, 0)
    padding = _padding(real, place)
    whole = real[:, None, None, :]
    if torch.equal(allowed, whole.expand_as(allowed)):
        return _both(padding)
    if torch.equal(allowed, whole & Causal().dense(q_len, k_len, query_offset=query_offset)):
        return _both([Causal(), *padding])
    return Dense(allowed)
