"""Draw what each output of a gallery module depends on: ``python docs/gallery/pictures.py`` writes ``images/*.svg``.

A cell is the norm of the derivative of an output token with respect to an input token, along a few random directions
and in a few random modules, relative to the largest of its row.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LENGTH, SIDE, EMBED, HEADS, DRAWS, DIRECTIONS = 16, 11, 16, 2, 2, 4
#: Lower bounds of the shades, and their opacities.
SHADES = ((0.5, 0.95), (0.25, 0.7), (0.1, 0.45), (0.02, 0.25), (1e-4, 0.12))
IMAGES = ("swin_windows", "neighborhood_attention", "axial_attention")
#: These take no mask: they are always causal, or read everything.
UNMASKED = (
    "native_sparse_attention", "mixture_of_block_attention", "reformer_attention", "gated_delta_net", "mamba2",
    "infini_attention", "multi_scale_retention", "linformer", "cross_covariance_attention", "perceiver_resampler",
    "induced_set_attention", "longformer_attention", "big_bird_attention", *IMAGES,
)  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "native_sparse_attention": {"size": 2, "keep": 4, "window": 3},
    "mixture_of_block_attention": {"size": 2, "keep": 3},
    "interleaved_rope": {"chunk": 4},
    "learned_sinks": {"window": 5},
    "longformer_attention": {"window": 4, "num_global": 1},
    "big_bird_attention": {"max_len": LENGTH, "size": 2, "num_global": 1, "num_random": 1},
    "infini_attention": {"segment": 4},
    "linformer": {"max_len": LENGTH, "num_keys": 4},
    "perceiver_resampler": {"num_latents": 6},
    "neighborhood_attention": {"side": 5},
    "swin_windows": {"side": 4, "shifted": True},
}
#: The choices of one draw would be averaged away.
ONE_DRAW = ("native_sparse_attention", "mixture_of_block_attention", "reformer_attention", "big_bird_attention")


def build(name: str, seed: int) -> nn.Module:
    """A module with random weights."""
    torch.manual_seed(seed)
    kind = getattr(importlib.import_module(f"gallery.{name}"), "".join(part.capitalize() for part in name.split("_")))
    module: nn.Module = kind(EMBED, 1 if name in ONE_DRAW else HEADS, **OPTIONS.get(name, {}))
    return module.double()


def slopes(module: nn.Module, x: Tensor, options: dict[str, Any], place: tuple[int, ...]) -> Tensor:
    """How strongly one output token depends on each input token: squared derivatives along a few random directions."""
    x = x.clone().requires_grad_()
    output = module(x, **options)[(0, *place)]
    total = torch.zeros(x.shape[1:-1], dtype=x.dtype)
    for direction in torch.randn(DIRECTIONS, EMBED, dtype=x.dtype):
        (gradient,) = torch.autograd.grad(output @ direction, x, retain_graph=True)
        total += gradient[0].square().sum(dim=-1)
    return total


def dependence(name: str) -> Tensor:
    """``[outputs, tokens]``, each row relative to its largest; for images one output over rows and columns."""
    shape = (1, SIDE, SIDE, EMBED) if name in IMAGES else (1, LENGTH, EMBED)
    options = {} if name in UNMASKED else {"mask": ch.Causal()}
    rows = OPTIONS[name]["num_latents"] if name == "perceiver_resampler" else LENGTH
    places = [(SIDE // 2 - 2, SIDE // 2 - 1)] if name in IMAGES else [(row,) for row in range(rows)]
    total = torch.zeros(len(places), *shape[1:-1], dtype=torch.float64)
    for seed in range(1 if name in ONE_DRAW else DRAWS):
        module, x = build(name, seed), torch.randn(shape, dtype=torch.float64)
        total += torch.stack([slopes(module, x, options, place) for place in places])
    norms = total.sqrt()
    return norms[0] / norms.amax() if name in IMAGES else norms / norms.amax(dim=-1, keepdim=True)


def svg(cells: Tensor) -> str:
    """Squares in shades of one color, which is readable on light and dark pages."""
    rows, columns = cells.shape
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {10 * columns} {10 * rows}">']
    lines.append(f'<rect width="{10 * columns}" height="{10 * rows}" fill="#7f8ea3" fill-opacity="0.1"/>')
    upper = float("inf")
    for lower, opacity in SHADES:
        places = ((cells >= lower) & (cells < upper)).nonzero().tolist()
        path = "".join(f"M{10 * column} {10 * row}h9v9h-9z" for row, column in places)
        if path:
            lines.append(f'<path fill="#2f7ed8" fill-opacity="{opacity}" d="{path}"/>')
        upper = lower
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    """Write a picture of each module of the gallery, or of those that are named."""
    sys.path.insert(0, str(ROOT))
    names = sys.argv[1:] or [path.stem for path in sorted((ROOT / "gallery").glob("*.py"))]
    for name in names:
        target = HERE / "images" / f"{name}.svg"
        target.write_text(svg(dependence(name)), encoding="utf-8")


if __name__ == "__main__":
    main()
