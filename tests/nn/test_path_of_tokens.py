"""The files whose functions get the tokens of a call of attention: few, so that a reader can follow them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead as ch
from clearhead.testing import fused_calls
from tests.agreement import needs_native

PACKAGE = Path(ch.__file__).parent
#: The module, its checks of tokens, the decision whether the call is one operator, and the operator's arguments.
FILES = {"nn/attention.py", "nn/checks.py", "arguments.py", "nn/fused.py", "ops/block.py"}
#: Decorators of forward, which hand the call on.
DECORATORS = {"invariance.py", "nn/jagged.py"}


def files_that_get(tokens: Tensor, call: Callable[[Tensor], Any]) -> set[str]:
    """Files of clearhead with a function that has the tokens among its arguments, by themselves or in a sequence."""
    files = set[str]()

    def has_tokens(value: Any) -> bool:
        return value is tokens or (isinstance(value, (tuple, list)) and any(each is tokens for each in value))

    def profile(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and any(map(has_tokens, frame.f_locals.values())):
            files.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(profile)
    try:
        call(tokens)
    finally:
        sys.setprofile(None)
    return files


@needs_native
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"mask": ch.Causal()}, id="causal"),
        pytest.param({"key": torch.ones(1, 5, 32)}, id="memory"),
    ],
)
@torch.no_grad()
def test_tokens_of_attention_reach_the_operator_through_five_files(options: dict[str, Any]) -> None:
    attention = ch.nn.MultiHeadAttention(32, 4).eval()
    tokens = torch.randn(1, 8, 32, generator=torch.Generator().manual_seed(0))
    with fused_calls() as calls:
        files = files_that_get(tokens, lambda x: attention(x, **options))
    assert calls == ["attention"]
    assert files == FILES | DECORATORS
