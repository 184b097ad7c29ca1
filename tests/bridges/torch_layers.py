"""torch's encoder layer, a swapped copy of it, and comparisons of the two."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clearhead.bridges import swap
from tests.budget import within_budget

BATCH, LENGTH, WIDTH, HEADS = 3, 7, 32, 4
DTYPES = [torch.float32, torch.bfloat16]
PADDING = torch.arange(LENGTH) >= torch.tensor([7, 3, 5])[:, None]
FORBIDDEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
#: Each row may attend to itself, so that torch's output is not NaN.
SOME = (torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(4)) < 0.5) & ~torch.eye(LENGTH).bool()


def make_layer(kind: Any = nn.TransformerEncoderLayer, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(1)
    layer = kind(WIDTH, HEADS, **({"dim_feedforward": 50, "dropout": 0.0, "batch_first": True} | options))
    with torch.no_grad():
        for part in layer.parameters():
            if part.ndim == 1:
                part.add_(0.3 * torch.randn_like(part))
        if options.get("activation", F.relu) in ("relu", F.relu) and dtype is torch.bfloat16:
            # A ReLU's gradient jumps at 0: keep hidden values away from 0, so that rounding does not decide.
            layer.linear1.weight.mul_(0.3)
            if layer.linear1.bias is not None:
                layer.linear1.bias.copy_(torch.randn_like(layer.linear1.bias).sign() * 2.0)
    return layer.to(dtype)


def name_of(options: dict[str, Any]) -> str:
    """A test id without addresses, equal in every process."""
    return ", ".join(f"{name}={getattr(value, '__name__', value)}" for name, value in options.items()) or "plain"


def swapped(theirs: nn.Module) -> Any:
    ours = copy.deepcopy(theirs)
    assert swap(ours).left == ()
    return ours


def tokens(dtype: torch.dtype = torch.float32, seed: int = 2) -> Tensor:
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).requires_grad_()


def is_layer(output: Tensor) -> bool:
    return output.grad_fn is not None and output.grad_fn.name() == "_BlockBackward"


def output_and_gradients(
    layer: nn.Module, x: Tensor, call: dict[str, Any], *, is_fused: bool | None = None, real: Tensor | None = None
) -> list[Tensor]:
    """Output, and gradients of ``x`` and every parameter, for the rows that ``real`` selects."""
    output = layer(x, **call)
    assert is_fused is None or is_layer(output) == is_fused
    output = output if real is None else output[real]
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, [x, *layer.parameters()], upstream)]


def in_dtype(dtype: torch.dtype, call: dict[str, Any]) -> dict[str, Any]:
    """Convert float masks to the dtype of the scores."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in call.items()
    }


def assert_agrees(
    theirs: nn.Module,
    ours: nn.Module,
    x: Tensor,
    call: dict[str, Any] | None = None,
    *,
    is_fused: bool | None = True,
    real: Tensor | None = None,
    times: int = 4,
) -> None:
    """Assert that ours is within the error budget of theirs, and that every call has the bits of the first."""
    call = {} if call is None else call
    results = output_and_gradients(ours, x, in_dtype(x.dtype, call), is_fused=is_fused, real=real)
    textbook = output_and_gradients(theirs, x, in_dtype(x.dtype, call), real=real)
    wide = x.detach().double().requires_grad_()
    exact = output_and_gradients(copy.deepcopy(theirs).double(), wide, in_dtype(torch.float64, call), real=real)
    names = ["output", "dx", *(name for name, _ in theirs.named_parameters())]
    for name, *three in zip(names, results, textbook, exact, strict=True):
        within_budget(name, *three, terms=BATCH * LENGTH + 50, dtype=x.dtype)
    for _ in range(1, times):
        second = output_and_gradients(ours, x, in_dtype(x.dtype, call), is_fused=is_fused, real=real)
        assert all(map(torch.equal, second, results))


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a mask": {"src_mask": SOME},
    "a mask for each head": {"src_mask": SOME.expand(BATCH * HEADS, LENGTH, LENGTH).clone()},
    "causal": {"src_mask": FORBIDDEN, "is_causal": True},
    "causal by look": {"src_mask": FORBIDDEN},
    "causal in floats": {"src_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH), "is_causal": True},
    "padding": {"src_key_padding_mask": PADDING},
    "padding in floats": {"src_key_padding_mask": torch.zeros(PADDING.shape).masked_fill(PADDING, -torch.inf)},
    "padding and causal": {"src_mask": FORBIDDEN, "src_key_padding_mask": PADDING},
}
