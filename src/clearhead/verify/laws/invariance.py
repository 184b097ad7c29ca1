"""Laws of bits: the same bits for a sequence however it is computed. They are tried with ``invariance=True`` only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from clearhead.masks import Causal, Dense, Documents, Padding
from clearhead.verify.case import Case
from clearhead.verify.law import Broken, Law, NotApplicable
from clearhead.verify.laws.masking import as_square
from clearhead.verify.masks import Spoken
from clearhead.verify.subject import NAMES, Subject, Tensors

__all__ = ["INVARIANCE_LAWS", "difference", "threads"]


def difference(one: Tensor, other: Tensor) -> float | None:
    """The largest difference of two tensors of one shape; None if all bits are equal, NaN to NaN included."""
    if torch.equal(one, other):
        return None
    differs = (one != other) & ~(one.isnan() & other.isnan())
    return (one.double() - other.double())[differs].abs().max().item() if bool(differs.any()) else None


def _require(what: str, one: Tensor, other: Tensor) -> None:
    error = difference(one, other)
    if error is not None:
        raise Broken(f"{what} differs by {error:.2g}")


def _rows(tensors: Tensors, rows: Tensor | slice) -> Tensors:
    query, key, value = (tensor[rows] for tensor in tensors)
    return query, key, value


def _check_alone(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    whole = subject.call(case, tensors).output.clone()
    for row in range(case.batch):
        alone = subject.call(case, _rows(tensors, slice(row, row + 1))).output
        _require(f"batch member {row} alone", alone, whole[row : row + 1])


def _check_place(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    whole = subject.call(case, tensors).output.clone()
    for shift in range(1, case.batch):
        order = (torch.arange(case.batch) + shift) % case.batch
        moved = subject.call(case, _rows(tensors, order.to(subject.device))).output
        _require(f"a batch in the order {order.tolist()}", moved, whole[order.to(subject.device)])
    if case.batch > 1:
        fewer = subject.call(case, _rows(tensors, slice(1, None))).output
        _require("a batch without its first member", fewer, whole[1:])


def _lengths(case: Case) -> list[int]:
    """Different lengths of the batch's members, the first one whole."""
    return [max(1, case.k_len - row * max(1, case.k_len // 3)) for row in range(case.batch)]


def _check_padded(subject: Subject, case: Case, *, left: bool = False) -> None:
    """Each sequence alone, and in a batch with large values at the padding."""
    tensors, lengths = subject.draw(case), _lengths(case)
    places = torch.arange(case.k_len, device=subject.device)
    counts = torch.tensor(lengths, device=subject.device)[:, None]
    real = places >= case.k_len - counts if left else places < counts
    allowed = real[:, None, None, :]
    mask = Spoken(allowed.expand(-1, 1, case.q_len, -1), Dense(allowed) if left else Padding(lengths))
    padded = [tensor.clone() for tensor in tensors]
    for tensor in padded:
        tensor.masked_fill_(~real[:, None, :, None], 50.0)
    form = "bool" if left and case.form == "padding" else case.form
    whole = subject.call(case, (padded[0], padded[1], padded[2]), mask=mask, form=form).output.clone()
    for row, length in enumerate(lengths):
        part = slice(case.k_len - length, None) if left else slice(length)
        alone = tuple(tensor[row : row + 1, :, part] for tensor in tensors)
        output = subject.call(case, (alone[0], alone[1], alone[2]), mask=None, form="none").output
        _require(f"batch member {row} of length {length} padded to {case.k_len}", whole[row : row + 1, :, part], output)


def _check_padded_left(subject: Subject, case: Case) -> None:
    _check_padded(subject, case, left=True)


def _check_packed(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    first = max(1, case.k_len // 2)
    lengths = [length for length in (first, (case.k_len - first) // 3) if length]
    lengths += [rest] if (rest := case.k_len - sum(lengths)) else []
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(subject.device)
    same = (numbers[:, None] == numbers[None])[None, None]
    form = "bool" if case.form == "padding" else case.form
    packed = subject.call(case, tensors, mask=Spoken(same, Documents(lengths=lengths)), form=form).output.clone()
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = tuple(tensor[:, :, part] for tensor in tensors)
        output = subject.call(case, (alone[0], alone[1], alone[2]), mask=None, form="none").output
        _require(f"a packed sequence of length {length} at {start}", packed[:, :, part], output)
        start += length


def _causal(subject: Subject, case: Case, query_places: slice, keys: int) -> tuple[Spoken, str]:
    """The causal mask of some queries over the first keys, and its form where the queries are not the first ones."""
    allowed = torch.ones(case.q_len, case.k_len, dtype=torch.bool, device=subject.device).tril()
    form = subject.signature.forms("dense", frozenset({"mask"}))[0]
    part = allowed[None, None, query_places, :keys]
    return Spoken(part, Causal() if form == "object" else Dense(part)), form


def _chunkings(length: int) -> Iterator[list[int]]:
    """Ways to cut a sequence, each a list of ends."""
    for sizes in ([1], [3, 1, 5, 2], [16], [64], [max(1, length - 1)], [max(1, length // 2)]):
        ends, place = list[int](), 0
        while not ends or ends[-1] < length:
            ends.append(min(length, (ends[-1] if ends else 0) + sizes[place % len(sizes)]))
            place += 1
        # One token at a time is a law of its own.
        if len(ends) > 1 and not (len(ends) == length and length > 2):
            yield ends


def _check_chunks(subject: Subject, case: Case) -> None:
    query, key, value = subject.draw(case)
    whole = subject.call(case, (query, key, value)).output.clone()
    for ends in _chunkings(case.k_len):
        start = 0
        for end in ends:
            mask, form = _causal(subject, case, slice(start, end), end)
            inputs = (query[:, :, start:end], key[:, :, :end], value[:, :, :end])
            part = subject.call(case, inputs, mask=mask, form=form, offset=start).output
            sizes = ", ".join(str(right - left) for left, right in zip((0, *ends), ends[:4], strict=False))
            _require(f"queries {start} to {end} of chunks of {sizes}, ...", part, whole[:, :, start:end])
            start = end


def _check_decode(subject: Subject, case: Case) -> None:
    query, key, value = subject.draw(case)
    whole = subject.call(case, (query, key, value)).output.clone()
    for step in range(case.k_len):
        inputs = (query[:, :, step : step + 1], key[:, :, : step + 1], value[:, :, : step + 1])
        token = subject.call(case, inputs, mask=None, form="none").output
        _require(f"token {step} decoded", token, whole[:, :, step : step + 1])


def _check_fixed_cache(subject: Subject, case: Case) -> None:
    query, key, value = subject.draw(case)
    whole = subject.call(case, (query, key, value)).output.clone()
    for step in range(case.k_len):
        mask, form = _causal(subject, case, slice(step, step + 1), case.k_len)
        token = subject.call(case, (query[:, :, step : step + 1], key, value), mask=mask, form=form, offset=step).output
        _require(f"token {step} decoded over {case.k_len} slots", token, whole[:, :, step : step + 1])


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside the context, torch computes on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_threads(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    with threads(1):
        one = subject.call(case, tensors).output.clone()
    for count in (2, 3, 7):
        with threads(count):
            _require(f"the output on {count} threads", subject.call(case, tensors).output, one)


def _check_gradients(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    grad = torch.randn(
        (case.batch, case.heads, case.q_len, case.value_dim), generator=torch.Generator().manual_seed(case.seed + 1)
    ).to(dtype=subject.dtype, device=subject.device)
    whole = subject.gradients(case, tensors, grad=grad)
    if whole is None:
        raise NotApplicable("its output carries no gradient")
    whole = [one.clone() for one in whole]
    for row in range(case.batch):
        part = slice(row, row + 1)
        alone = subject.gradients(case, _rows(tensors, part), grad=grad[part])
        assert alone is not None
        for name, one, other in zip(("output", *NAMES[:3]), alone, whole, strict=False):
            _require(f"{name} of batch member {row} alone", one, other[part])


def _all_tokens(case: Case) -> Case:
    return replace(case, q_len=case.k_len, mask="causal")


def _one_sequence(case: Case) -> Case:
    return replace(case, batch=1, q_len=case.k_len)


#: Within a tile, over the boundaries of tiles, and one query, in which other kernels run; with grouped heads.
_SMALL = Case(batch=3, kv_heads=2, q_len=9, k_len=9)
_MIDDLE = replace(_SMALL, q_len=65, k_len=65, head_dim=40, value_dim=40)
_LARGE = Case(batch=2, kv_heads=1, group=2, q_len=203, k_len=203, head_dim=64, value_dim=64)
_SQUARE = (_SMALL, _MIDDLE, _LARGE)
_CAUSAL = tuple(replace(case, mask="causal") for case in _SQUARE)
_FEW = (replace(_SMALL, q_len=1, k_len=33), replace(_LARGE, q_len=1, k_len=517), replace(_LARGE, q_len=7, k_len=300))
_PADDED = tuple(replace(case, mask="padding") for case in _SQUARE)
_MASK = frozenset({"mask"})

INVARIANCE_LAWS: tuple[Law, ...] = (
    Law(
        name="bits alone",
        says="a sequence has the same bits alone and in a batch",
        check=_check_alone,
        cases=(*_SQUARE, *_CAUSAL, *_FEW),
    ),
    Law(
        name="bits at any place",
        says="a sequence has the same bits at any place of a batch, and in batches of other sizes",
        check=_check_place,
        cases=(*_SQUARE, *_FEW),
    ),
    Law(
        name="bits padded",
        says="a sequence has the same bits alone and with padding to its right",
        check=_check_padded,
        needs=_MASK,
        fit=as_square,
        cases=_PADDED,
    ),
    Law(
        name="bits padded left",
        says="a sequence has the same bits alone and with padding to its left",
        check=_check_padded_left,
        needs=_MASK,
        fit=as_square,
        cases=_PADDED,
    ),
    Law(
        name="bits packed",
        says="a sequence has the same bits alone and packed with others",
        check=_check_packed,
        needs=_MASK,
        fit=_one_sequence,
        cases=tuple(_one_sequence(case) for case in _PADDED),
    ),
    Law(
        name="bits in chunks",
        says="a sequence that is read in chunks of any sizes has the bits of one call",
        check=_check_chunks,
        needs=_MASK,
        fit=_all_tokens,
        cases=_CAUSAL,
    ),
    Law(
        name="bits decoded",
        says="a sequence that is decoded token by token has the bits of one call",
        check=_check_decode,
        fit=_all_tokens,
        cases=_CAUSAL,
    ),
    Law(
        name="bits in a fixed cache",
        says="a sequence that is decoded from a cache of fixed capacity has the bits of one call",
        check=_check_fixed_cache,
        needs=_MASK,
        fit=_all_tokens,
        cases=_CAUSAL,
    ),
    Law(
        name="bits on threads",
        says="a sequence has the same bits on any number of threads",
        check=_check_threads,
        cases=(*_CAUSAL, *_FEW, replace(_LARGE, q_len=1, k_len=5003)),
    ),
    Law(
        name="bits of gradients",
        says="the gradients of a sequence's inputs have the same bits alone and in a batch",
        check=_check_gradients,
        cases=(*_SQUARE, *_CAUSAL),
    ),
)
"""Laws of bits."""
