"""Run a program that knows nothing of clearhead on its kernels: a vision transformer written with torch alone.

    python examples/any_program.py
    python examples/any_program.py --quick     # a smaller model

Needs torch. Weights are random: speed and agreement do not depend on them. ``clearhead run PROGRAM`` does the same for
a program that you do not want to change.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import clearhead as ch


class Block(nn.Module):
    """A pre-norm block, as timm and others write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, len, width]`` to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        heads = scaled_dot_product_attention(query, key, value)
        x = x + self.proj(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Patches of an image, blocks, and the mean over patches."""

    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """``[batch, 3, height, width]`` to ``[batch, 1000]``."""
        return self.head(self.blocks(self.patches(images).flatten(2).transpose(1, 2)).mean(dim=1))


def median_milliseconds(run: Callable[[], object], rounds: int) -> float:
    """Median time of a call."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Compare outputs, gradients and times with and without ``ch.accelerate``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    width, heads, depth, size = (192, 3, 2, 96) if quick else (768, 12, 4, 224)
    model = VisionTransformer(width, heads, depth)
    images = torch.randn(4, 3, size, size)

    def train() -> Tensor:
        model.zero_grad()
        output: Tensor = model(images)
        output.square().mean().backward()
        return output.detach()

    def gradient() -> Tensor:
        return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    plain, plain_gradient = train(), gradient()
    with ch.accelerate():
        fast, fast_gradient = train(), gradient()
    print(f"output    differs by {(fast - plain).norm() / plain.norm():.1e} of its norm")
    print(f"gradient  differs by {(fast_gradient - plain_gradient).norm() / plain_gradient.norm():.1e} of its norm")

    rounds = 2 if quick else 5
    before = median_milliseconds(train, rounds)
    with ch.accelerate():
        after = median_milliseconds(train, rounds)
    print(f"a training step  {before:.0f} ms, accelerated {after:.0f} ms, {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
