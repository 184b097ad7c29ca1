"""Laws of sequences: packed equals padded, decode equals prefill, merged parts equal the whole."""

from __future__ import annotations

from dataclasses import replace

import torch

from clearhead.masks import Causal, Dense, Documents, Padding
from clearhead.verify.case import Case
from clearhead.verify.law import Broken, Law, NotApplicable
from clearhead.verify.laws.numbers import require
from clearhead.verify.masks import Spoken
from clearhead.verify.subject import Subject, Tensors, expected_of

__all__ = ["LAWS"]


def _lengths(case: Case) -> list[int]:
    """Lengths of sequences that sum to ``k_len``."""
    first = max(1, case.k_len // 2)
    second = max(0, (case.k_len - first) // 3)
    return [length for length in (first, second, case.k_len - first - second) if length]


def _check_packed(subject: Subject, case: Case) -> None:
    tensors = subject.draw(case)
    lengths = _lengths(case)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(subject.device)
    same_sequence = (numbers[:, None] == numbers[None])[None, None]
    # A padding mask cannot express documents.
    form = "bool" if case.form == "padding" else case.form
    packed = subject.call(case, tensors, mask=Spoken(same_sequence, Documents(lengths=lengths)), form=form).output
    require(_named("packed", subject.off_budget([packed], expected_of(tensors, allowed=same_sequence))))
    padded = _padded(tensors, lengths)
    ends = torch.tensor(lengths, device=subject.device).view(-1, 1, 1, 1)
    real = torch.arange(max(lengths), device=subject.device).view(1, 1, 1, -1) < ends
    real = real.expand(-1, 1, max(lengths), -1)
    output = subject.call(case, padded, mask=Spoken(real, Padding(lengths))).output
    joined = torch.cat([output[row : row + 1, :, :length] for row, length in enumerate(lengths)], dim=2)
    require(_named("padded", subject.off_budget([joined], expected_of(tensors, allowed=same_sequence))))


def _named(what: str, wrong: str | None) -> str | None:
    return None if wrong is None else f"{what}: {wrong}"


def _padded(tensors: Tensors, lengths: list[int]) -> Tensors:
    """The sequences as a padded batch, with large values at the padding."""
    padded = []
    for tensor in tensors:
        rows = tensor.new_full((len(lengths), tensor.shape[1], max(lengths), tensor.shape[3]), 50.0)
        start = 0
        for row, length in enumerate(lengths):
            rows[row, :, :length] = tensor[0, :, start : start + length]
            start += length
        padded.append(rows)
    return padded[0], padded[1], padded[2]


def _check_decode(subject: Subject, case: Case) -> None:
    """Keys and values are written to preallocated buffers, as in a KV cache."""
    query, key, value = subject.draw(case)
    causal = torch.ones(case.k_len, case.k_len, dtype=torch.bool, device=subject.device).tril()
    wanted = expected_of((query, key, value), allowed=causal)
    key_cache, value_cache = torch.full_like(key, 9.0), torch.full_like(value, 9.0)
    rows = []
    for step in range(case.k_len):
        key_cache[:, :, step], value_cache[:, :, step] = key[:, :, step], value[:, :, step]
        inputs = (query[:, :, step : step + 1], key_cache[:, :, : step + 1], value_cache[:, :, : step + 1])
        rows.append(subject.call(case, inputs, mask=None, form="none").output.clone())
    require(_named("one token at a time", subject.off_budget([torch.cat(rows, dim=2)], wanted)))


def _check_static_cache(subject: Subject, case: Case) -> None:
    """A KV cache of fixed capacity: all slots are passed, and a mask says which are filled."""
    query, key, value = subject.draw(case)
    causal = torch.ones(case.k_len, case.k_len, dtype=torch.bool, device=subject.device).tril()
    wanted = expected_of((query, key, value), allowed=causal)
    key_cache, value_cache = torch.full_like(key, 9.0), torch.full_like(value, 9.0)
    form, rows = subject.signature.forms("dense", frozenset({"mask"}))[0], []
    for step in range(case.k_len):
        key_cache[:, :, step], value_cache[:, :, step] = key[:, :, step], value[:, :, step]
        allowed = causal[None, None, step : step + 1]
        mask = Spoken(allowed, Causal() if form == "object" else Dense(allowed))
        token = (query[:, :, step : step + 1], key_cache, value_cache)
        rows.append(subject.call(case, token, mask=mask, form=form, offset=step).output.clone())
    require(_named("from a cache of fixed capacity", subject.off_budget([torch.cat(rows, dim=2)], wanted)))


def _check_split(subject: Subject, case: Case) -> None:
    """Two halves of the keys, merged by their log-sum-exp."""
    query, key, value = subject.draw(case)
    cut = case.k_len // 2
    if cut == 0:
        raise NotApplicable("one key cannot be split")
    outputs, parts = [], []
    for part in (slice(None, cut), slice(cut, None)):
        half = subject.call(case, (query, key[:, :, part], value[:, :, part]), returned=True)
        if half.lse is None:
            raise NotApplicable("it returns no log-sum-exp")
        # Copies, in case the next call writes to the same memory.
        outputs.append(half.output.double().clone())
        parts.append(half.lse.double().clone())
    lses = torch.stack(parts)
    shares = torch.softmax(lses, dim=0)[..., None]
    if shares.shape[1:-1] != outputs[0].shape[:-1]:
        raise Broken(f"lse has shape {tuple(lses.shape[1:])} for an output {tuple(outputs[0].shape)}")
    merged = shares[0] * outputs[0] + shares[1] * outputs[1]
    require(_named("merged", subject.off_budget([merged], subject.expected(case))))


def _one_sequence(case: Case) -> Case:
    return replace(case, batch=1, q_len=case.k_len)


def _all_tokens(case: Case) -> Case:
    return replace(case, q_len=case.k_len)


_TOKENS = Case(kv_heads=2, q_len=9, k_len=9)

LAWS = (
    Law(
        name="packed equals padded",
        says="packed sequences under a mask give the results of padded sequences and of each alone",
        check=_check_packed,
        needs=frozenset({"mask"}),
        every_form=True,
        fit=_one_sequence,
        cases=tuple(replace(_TOKENS, mask="padding", q_len=length, k_len=length) for length in (2, 9, 100)),
    ),
    Law(
        name="decode equals prefill",
        says="decoding one token at a time with growing keys gives the results of one call",
        check=_check_decode,
        fit=_all_tokens,
        cases=(replace(_TOKENS, q_len=2, k_len=2), replace(_TOKENS, batch=2), replace(_TOKENS, q_len=18, k_len=18)),
    ),
    Law(
        name="fixed cache",
        says="decoding one token at a time from a cache of fixed capacity under a mask gives the results of one call",
        check=_check_static_cache,
        needs=frozenset({"mask"}),
        fit=_all_tokens,
        cases=(replace(_TOKENS, q_len=2, k_len=2), replace(_TOKENS, batch=2), replace(_TOKENS, q_len=18, k_len=18)),
    ),
    Law(
        name="split and merged",
        says="two halves of the keys, merged by their log-sum-exp, give the result of all keys",
        check=_check_split,
        cases=(Case(q_len=2, k_len=2), replace(_TOKENS, batch=2), replace(_TOKENS, q_len=3, k_len=130)),
    ),
)
"""Laws of sequences."""
