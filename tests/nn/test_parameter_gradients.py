"""Gradients of parameters under ``set_invariant(True)``: sums over sequences, in an order that micro-batches keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.nn.embedding import TokenEmbedding
from clearhead.nn.linear import Linear
from clearhead.sequence_sums import TreeSum

LENGTH, WIDTH = 70, 64


def _encoder(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return ch.nn.EncoderBlock(WIDTH, 4, dropout=0.0, **options)  # type: ignore[arg-type]


def _module(name: str) -> nn.Module:
    torch.manual_seed(0)
    modules: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: Linear(WIDTH, 48),
        "feedforward": lambda: ch.nn.FeedForward(WIDTH),
        "attention": lambda: ch.nn.MultiHeadAttention(WIDTH, 4),
        "pre-norm block": _encoder,
        "post-norm block": lambda: _encoder(norm_first=False),
        "relative bias": lambda: ch.nn.MultiHeadAttention(
            WIDTH, 4, scores=[ch.RelativeBias(nn.Parameter(torch.randn(4, 17)))]
        ),
        "dense bias": lambda: ch.nn.MultiHeadAttention(
            WIDTH, 4, scores=[ch.DenseBias(nn.Parameter(torch.randn(4, LENGTH, LENGTH)))]
        ),
        "sink": lambda: ch.nn.MultiHeadAttention(WIDTH, 4, scores=[ch.Sink(nn.Parameter(torch.randn(4)))]),
    }
    return modules[name]()


def _gradients(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(module(x), list(module.parameters()), grad))


def _in_parts(module: nn.Module, x: Tensor, grad: Tensor, size: int) -> list[Tensor | None]:
    total = TreeSum()
    for part, of_part in zip(x.split(size), grad.split(size), strict=True):
        total.add(_gradients(module, part, of_part))
    return total.result()


LAYERS = ["linear", "feedforward", "attention", "pre-norm block", "post-norm block"]
NAMES = [*LAYERS, "relative bias", "dense bias", "sink"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in NAMES), *((name, torch.bfloat16) for name in LAYERS)],
)
def test_parts_of_a_batch_give_the_bits_of_the_whole(name: str, dtype: torch.dtype) -> None:
    module = _module(name).to(dtype)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, LENGTH, WIDTH, generator=generator).to(dtype)
    with ch.invariant():
        grad = torch.randn(module(x).shape, generator=generator).to(dtype)
        whole = _gradients(module, x, grad)
        for size in (1, 2, 4):
            for one, other in zip(whole, _in_parts(module, x, grad, size), strict=True):
                assert other is not None
                assert torch.equal(one, other)
    # Each node of the tree is rounded: one for 8 sequences and one for each of 3 levels.
    fast = _gradients(module, x, grad)
    largest = max(one.abs().max().item() for one in fast)
    for one, other in zip(whole, fast, strict=True):
        assert (one - other).abs().max() <= 16 * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_embeddings_add_by_sequence(positions: str) -> None:
    torch.manual_seed(0)
    module = TokenEmbedding(20, 8, max_len=LENGTH, positions=positions)
    ids, places = torch.randint(0, 20, (8, LENGTH)), torch.arange(LENGTH)[None]
    grad = torch.randn(8, LENGTH, 8)
    parameters = list(module.parameters())
    with ch.invariant():
        whole = torch.autograd.grad(module(ids, places), parameters, grad)
        total = TreeSum()
        for part, of_part in zip(ids.split(2), grad.split(2), strict=True):
            total.add(torch.autograd.grad(module(part, places), parameters, of_part))
    assert all(other is not None and torch.equal(one, other) for one, other in zip(whole, total.result(), strict=True))


@pytest.mark.usefixtures("_threads_as_before")
@pytest.mark.parametrize("threads", [1, 3])
def test_number_of_threads_changes_no_bit(threads: int) -> None:
    module, x = _module("pre-norm block"), torch.randn(5, LENGTH, WIDTH)
    with ch.invariant():
        right = _gradients(module, x, torch.ones_like(x))
        torch.set_num_threads(threads)
        computed = _gradients(module, x, torch.ones_like(x))
    assert all(map(torch.equal, right, computed))
