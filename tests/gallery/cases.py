"""The variants as the tests call them: how each is built, what it takes, and how two functions are compared."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead as ch
from tests.gallery.formulas import SEQUENCES, Formula
from tests.gallery.formulas_linear import LINEAR
from tests.gallery.formulas_sparse import SPARSE

FOLDER = Path(__file__).parents[2] / "gallery"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem != "__init__")
FORMULAS: dict[str, Formula] = {**SEQUENCES, **SPARSE, **LINEAR}
#: Always causal, and without an argument for a mask.
UNMASKED = (
    "native_sparse_attention",
    "mixture_of_block_attention",
    "reformer_attention",
    "gated_delta_net",
    "mamba2",
    "infini_attention",
    "multi_scale_retention",
)
#: Always causal, and may take a mask besides.
CAUSAL = ("learned_sinks", "interleaved_rope", "forgetting_attention", *UNMASKED)
#: These read whole sequences at once: no mask, and no order.
WHOLE = ("linformer", "cross_covariance_attention")
#: A state of fixed size: a NaN may reach earlier queries of its chunk (``clearhead.linear``, rule 7).
STATES = ("performer", "gated_delta_net", "mamba2", "multi_scale_retention")
IMAGES = ("swin_windows", "neighborhood_attention", "axial_attention")
SETS = ("perceiver_resampler", "induced_set_attention")
ALL = (*FORMULAS, *SETS, *IMAGES)
MASKED = tuple(name for name in FORMULAS if name not in (*UNMASKED, *WHOLE))
#: Sizes that cut short sequences into several parts.
OPTIONS: dict[str, dict[str, Any]] = {
    "native_sparse_attention": {"size": 2, "keep": 4, "window": 3},
    "mixture_of_block_attention": {"size": 2, "keep": 3},
    "interleaved_rope": {"chunk": 4},
    "longformer_attention": {"window": 4},
    "big_bird_attention": {"max_len": 24, "size": 2, "num_global": 1, "num_random": 1},
    "infini_attention": {"segment": 4},
    "linformer": {"max_len": 24, "num_keys": 5},
}
#: One variant of each kind for the tests of every change: laws and compilation take a second each.
QUICK = (
    "latent_attention",
    "learned_sinks",
    "swin_windows",
    "perceiver_resampler",
    "native_sparse_attention",
    "forgetting_attention",
    "transformer_xl",
    "gated_delta_net",
    "neighborhood_attention",
    "linformer",
)
EMBED, HEADS, LENGTH = 16, 2, 11
#: float64 rounding of sums of a few hundred terms of size one.
EXACT = 1e-12


def tiered(names: Sequence[str]) -> list[Any]:
    """Parameters of a test, of which those that are not ``QUICK`` are slow."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def build(name: str, embed_dim: int = EMBED, num_heads: int = HEADS, **options: Any) -> Any:
    module = importlib.import_module(f"gallery.{name}")
    kind = getattr(module, "".join(word.capitalize() for word in name.split("_")))
    torch.manual_seed(0)
    return kind(embed_dim, num_heads, **{**OPTIONS.get(name, {}), **options})


def tokens(dtype: torch.dtype = torch.float64, *shape: int) -> Tensor:
    return torch.randn(shape or (2, LENGTH, EMBED), generator=torch.Generator().manual_seed(1)).to(dtype)


def some_input(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Any]]:
    """What a module takes, and a usual mask."""
    if name in IMAGES:
        return tokens(dtype, 2, 6, 5, EMBED), {}
    return tokens(dtype), {"mask": ch.Causal()} if name in MASKED else {}


def compare(module: nn.Module, ours: Callable[..., Tensor], theirs: Callable[..., Tensor], at: Tensor) -> None:
    """Hold one function of the module's input and parameters to another: values and gradients."""
    x, reference = at.clone().requires_grad_(), at.clone().requires_grad_()
    output, expected = ours(x), theirs(reference)
    torch.testing.assert_close(output, expected, atol=EXACT, rtol=EXACT)
    weight = torch.randn_like(output)
    got, wanted = (
        torch.autograd.grad((each * weight).sum(), [start, *module.parameters()])
        for each, start in ((output, x), (expected, reference))
    )
    for (name, _), gradient, other in zip([("x", x), *module.named_parameters()], got, wanted, strict=True):
        torch.testing.assert_close(gradient, other, atol=100 * EXACT, rtol=100 * EXACT, msg=name)


def steps(module: nn.Module, x: Tensor, target: Tensor, **options: Any) -> tuple[float, float]:
    """The loss before and after a few steps of training."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = (module(x, **options) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in module.parameters()), "a parameter that does nothing"
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]
