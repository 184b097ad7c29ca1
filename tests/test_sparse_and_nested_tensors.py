"""Nested and sparse tensors raise one sentence; operators on the older nested kind would crash the process.

Calls that take jagged tensors are in ``test_nested.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.arguments import dense, repr_of
from clearhead.ops import library as native_library

WIDTH = 16


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(5, WIDTH), torch.randn(3, WIDTH)], layout=layout)


KINDS: dict[str, Callable[[], Tensor]] = {
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "sparse": lambda: torch.randn(2, 5, WIDTH).to_sparse(),
    "sparse rows": lambda: torch.randn(5, WIDTH).to_sparse_csr(),
    "mkldnn": lambda: torch.randn(2, 5, WIDTH).to_mkldnn(),
}
PLAIN = torch.randn(2, 5, WIDTH)
BOUNDS = torch.tensor([0, 5, 8])

#: Calls that take jagged tensors.
TAKING: dict[str, Callable[[Tensor], Any]] = {
    "attention": lambda x: ch.attention(x, x, x),
    "MultiHeadAttention": lambda x: ch.nn.MultiHeadAttention(WIDTH, 2)(x),
    "LinearAttention": lambda x: ch.nn.LinearAttention(WIDTH, 2)(x),
    "FeedForward": lambda x: ch.nn.FeedForward(WIDTH)(x),
    "EncoderBlock": lambda x: ch.nn.EncoderBlock(WIDTH, 2)(x),
    "Encoder": lambda x: ch.nn.Encoder(WIDTH, 2, 1)(x),
}
#: Calls that take dense tensors alone.
DENSE: dict[str, Callable[[Tensor], Any]] = {
    "linear_attention": lambda x: ch.linear_attention(x, x, x),
    "observe_attention": lambda x: ch.observe_attention(x, x, x, want=ch.Want(entropy=True)),
    "view": lambda x: ch.view(x, x),
    "pack": lambda x: ch.pack(x, [5, 3]),
    "unpack": lambda x: ch.unpack(x, [5, 3]),
    "MultiHeadAttention, key": lambda x: ch.nn.MultiHeadAttention(WIDTH, 2)(PLAIN, x),
    "varlen_attn": lambda x: ch.functional.varlen_attn(x, x, x, BOUNDS, BOUNDS, 5, 5),
    "flash_attn_func": lambda x: ch.functional.flash_attn_func(x, x, x),
    "DenseBias": ch.DenseBias,
    "Dense": ch.Dense,
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (call, kind)
        for calls in (TAKING, DENSE)
        for call in calls
        for kind in KINDS
        if calls is DENSE or kind != "jagged"
    ],
)
def test_sparse_and_nested_tensors_raise_one_sentence(call: str, kind: str) -> None:
    with pytest.raises(ch.ClearheadError) as refused:
        (TAKING | DENSE)[call](KINDS[kind]())
    said = str(refused.value)
    assert "\n" not in said
    assert "got a " in said, said


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_refused_after_valid_calls() -> None:
    """Wrong tensors are refused after several valid calls too."""
    module = ch.nn.MultiHeadAttention(WIDTH, 2)
    for _ in range(4):
        module(PLAIN)
        ch.attention(PLAIN, PLAIN, PLAIN)
    for kind in [kind for kind in KINDS if kind != "jagged"]:
        with pytest.raises(ch.ClearheadError):
            module(KINDS[kind]())
        with pytest.raises(ch.ClearheadError):
            ch.attention(*[KINDS[kind]()] * 3)


def test_advice_for_jagged_tensors_works() -> None:
    jagged = KINDS["jagged"]()
    with pytest.raises(
        ch.UnsupportedError, match=re.escape(".values()[None] under ch.Documents(its .offsets().diff())")
    ):
        ch.observe_attention(jagged, jagged, jagged, want=ch.Want(lse=True))
    packed, documents = jagged.values()[None], ch.Documents(jagged.offsets().diff())
    observed = ch.observe_attention(packed, packed, packed, mask=documents, want=ch.Want(lse=True))
    alone = [ch.observe_attention(one, one, one, want=ch.Want(lse=True)).lse for one in jagged.unbind()]
    torch.testing.assert_close(observed.lse[0], torch.cat(alone))


def test_dense_tensor_passes() -> None:
    dense("f", "x", PLAIN)
    assert repr_of(PLAIN) == f"float32 of shape (2, 5, {WIDTH})"


def freed(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def unaligned(tensor: Tensor) -> Tensor:
    """The same elements at an address that is off by one byte."""
    memory = bytearray(1) + tensor.numpy().tobytes()
    return torch.frombuffer(memory, dtype=tensor.dtype, offset=1).view(tensor.shape)


@pytest.mark.skipif(native_library.reason() is not None, reason="the CPU kernels are not usable here")
@pytest.mark.parametrize("spoiled", [freed, unaligned])
def test_freed_and_unaligned_memory_is_refused(spoiled: Callable[[Tensor], Tensor]) -> None:
    module = ch.nn.MultiHeadAttention(WIDTH, 2)
    right = module(PLAIN)
    for _ in range(4):
        with pytest.raises(ch.UnsupportedError, match=r"freed or begins within an element\. Copy it with \.clone\(\)"):
            ch.attention(PLAIN[None], spoiled(PLAIN[None]), PLAIN[None], backend="native")
        # torch's own linear layer takes over: it reads what begins within an element, and refuses what was freed.
        if spoiled is freed:
            with pytest.raises(RuntimeError, match="not allocated"):
                module(freed(PLAIN))
        else:
            torch.testing.assert_close(module(unaligned(PLAIN)), right)
        torch.testing.assert_close(module(PLAIN), right)
        ch.attention(PLAIN, PLAIN, PLAIN)
