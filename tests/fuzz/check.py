"""One random problem on every backend of this machine, compared with the formula in plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import clearhead as ch
from clearhead.backends.dropout import keep_scale
from clearhead.dispatch import BACKENDS, loaded
from clearhead.verify.budget import excess, rounding
from clearhead.verify.oracle import slope
from tests.fuzz.problems import Meant

__all__ = ["HERE", "Wrong", "check"]

#: Backends that can run on this machine.
HERE = tuple(name for name in BACKENDS if loaded(name).capability.requires() is None)


class Wrong(AssertionError):
    """A backend's error exceeds its budget."""


@dataclass(frozen=True, eq=False)
class _Formula:
    output: Tensor
    lse: Tensor
    gradients: tuple[Tensor, ...]
    largest_score: float


def _index(meant: Meant) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    size = meant.drawn
    return (
        torch.arange(size.batch).view(-1, 1, 1, 1),
        torch.arange(size.heads).view(1, -1, 1, 1),
        torch.arange(size.offset, size.offset + size.q_len).view(1, 1, -1, 1),
        torch.arange(size.k_len).view(1, 1, 1, -1),
    )


def _formula(meant: Meant, tensors: tuple[Tensor, ...], allowed: Tensor, dtype: torch.dtype) -> _Formula:
    """The formula with every step in ``dtype``."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (*tensors, *meant.learned)]
    query, key, value, *learned = leaves
    size, index = meant.drawn, _index(meant)
    of_head = torch.arange(size.heads) // size.group
    scores = query @ key[:, of_head].mT * (size.head_dim**-0.5 if meant.scale is None else meant.scale)
    for rule in meant.plain:
        # In torch a float times an integer tensor is float32, which promotes a 16-bit score.
        scores = rule(scores, *index, learned).to(dtype)
    scores = torch.where(allowed, scores, -torch.inf)
    if meant.sink is not None:
        logits = learned[meant.sink].view(1, -1, 1, 1).expand(size.batch, -1, size.q_len, 1)
        scores = torch.cat([scores, logits], dim=-1)
    top = scores.detach().amax(dim=-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0.0, top)
    terms = torch.exp(scores - top)
    total = terms.sum(dim=-1, keepdim=True)
    weights = (terms / torch.where(total == 0.0, 1.0, total))[..., : size.k_len]
    if meant.dropout:
        # The seed alone decides which weights are dropped; other tests check that the generator is Philox.
        weights = weights * keep_scale(size.seed, meant.dropout, index, dtype)
    output = weights @ value[:, of_head]
    partial = torch.autograd.grad(output, leaves, slope(output), allow_unused=True)
    gradients = tuple(torch.zeros_like(leaf) if one is None else one for leaf, one in zip(leaves, partial, strict=True))
    finite = scores.detach()[torch.isfinite(scores.detach())]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return _Formula(output.detach(), (top + torch.log(total))[..., 0].detach(), gradients, largest)


def _poisoned(meant: Meant, allowed: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The tensors with poison at the keys that no query attends to, and with 0 there; equal without poison."""
    if meant.poison is None:
        return meant.tensors, meant.tensors
    size = meant.drawn
    query, key, value = meant.tensors
    unseen = ~allowed.any(dim=2).unflatten(1, (size.kv_heads, size.group)).any(dim=2)[..., None]
    bad, clean = (
        (query, *(tensor.masked_fill(unseen, fill) for tensor in (key, value))) for fill in (meant.poison, 0.0)
    )
    return bad, clean


def check(meant: Meant, backends: tuple[str, ...] = HERE) -> int:
    """Return the number of backends that support the problem; raise ``Wrong`` for the first error above its budget."""
    size = meant.drawn
    allowed = meant.allowed(*_index(meant)).expand(size.batch, size.heads, size.q_len, size.k_len)
    given, clean = _poisoned(meant, allowed)
    dtype = given[0].dtype
    exact = _formula(meant, clean, allowed, torch.float64)
    textbook = _formula(meant, clean, allowed, dtype) if dtype != torch.float64 else exact
    learned = [
        tensor.detach().to(torch.float64 if dtype == torch.float64 else torch.float32) for tensor in meant.learned
    ]
    reasons = ch.explain_dispatch(
        *(tensor.detach().requires_grad_() for tensor in given), **meant.options(learned)
    ).reasons
    ran = 0
    for backend in backends:
        if not reasons[backend]:
            _check_backend(backend, meant, given, learned, exact, textbook)
            ran += 1
    return ran


def _check_backend(
    backend: str, meant: Meant, given: tuple[Tensor, ...], parameters: list[Tensor], exact: _Formula, textbook: _Formula
) -> None:
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    learned = [tensor.detach().requires_grad_() for tensor in parameters]
    output = ch.attention(*leaves, backend=backend, **meant.options(learned))
    _check_lse(backend, meant, given, parameters, exact)
    partial = torch.autograd.grad(output, [*leaves, *learned], slope(output), allow_unused=True)
    zeros = zip([*leaves, *learned], partial, strict=True)
    gradients = [torch.zeros_like(leaf) if one is None else one for leaf, one in zeros]
    names = ["output", "dQ", "dK", "dV", *(f"gradient of learned tensor {place}" for place in range(len(learned)))]
    size = meant.drawn
    # A learned table's entry sums over many scores; a key's gradient over the queries of its group.
    terms = [size.k_len, size.k_len, size.q_len * size.group, size.q_len * size.group]
    terms += [size.batch * size.heads * size.q_len * size.k_len] * len(learned)
    for place, (name, one) in enumerate(zip(names, [output.detach(), *gradients], strict=True)):
        wanted = (exact.output, *exact.gradients)[place]
        book = (textbook.output, *textbook.gradients)[place]
        floor = rounding(wanted, terms[place], 4.0, dtype=given[0].dtype, largest_score=exact.largest_score)
        wrong = excess(one, book, wanted, floor)
        if wrong is not None:
            raise Wrong(f"{backend}: {name} is {wrong} for {meant!r}")


def _check_lse(
    backend: str, meant: Meant, given: tuple[Tensor, ...], parameters: list[Tensor], exact: _Formula
) -> None:
    """Check the log-sum-exp where the backend computes it; it uses another code path of the kernels."""
    want, options = ch.Want(lse=True), meant.options(parameters)
    query, key, value = given
    if ch.explain_dispatch(query, key, value, want=want, **options).reasons[backend]:
        return
    observed = ch.observe_attention(query, key, value, want=want, backend=backend, **options)
    assert observed.lse is not None
    floor = rounding(
        torch.zeros(1),
        meant.drawn.head_dim,
        1.0,
        largest_score=2.0 * exact.largest_score,
        dtype=torch.float64 if query.dtype == torch.float64 else torch.float32,
    )
    if query.dtype in (torch.float16, torch.bfloat16):
        # Exponentials need some more digits than 16-bit weights have, but not all digits of float32.
        floor += torch.finfo(query.dtype).eps / 64.0
    wrong = excess(observed.lse, exact.lse, exact.lse, floor)
    if wrong is not None:
        raise Wrong(f"{backend}: lse is {wrong} for {meant!r}")
