"""What a vision transformer attends to: its weights over the patches of a picture.

    python examples/see_image.py                # trains 300 steps, then writes see_image.html
    python examples/see_image.py --quick        # 8 steps

Needs the extra ``hf`` (``pip install "clearhead[hf]"``). The model is transformers' ViT, built from a config. The
pictures are drawn: three grey discs and a coloured one in noise, and the class is the colour. So the right place to
look at is known: the weights of a model that has learned lie on the coloured disc.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import clearhead as ch

SIDE, PATCH, RADIUS = 48, 6, 5
GRID = (SIDE // PATCH, SIDE // PATCH)
COLOURS = torch.tensor([[1.0, 0.2, 0.2], [0.2, 0.9, 0.2], [0.3, 0.4, 1.0], [1.0, 0.9, 0.2]])


def pictures(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures ``[count, 3, 48, 48]``, the class of each, and the coloured disc's centre (row, column) in each."""
    image = 0.25 * torch.rand(count, 3, SIDE, SIDE)
    label = torch.randint(0, len(COLOURS), (count,))
    centres = torch.randint(PATCH, SIDE - PATCH, (count, 4, 2))
    row, column = torch.arange(SIDE)[:, None], torch.arange(SIDE)
    for disc in range(4):
        y, x = centres[:, disc, 0, None, None], centres[:, disc, 1, None, None]
        inside = (row - y) ** 2 + (column - x) ** 2 <= RADIUS**2
        colour = COLOURS[label] if disc == 3 else torch.full((count, 3), 0.6)
        image = torch.where(inside[:, None], colour[:, :, None, None], image)
    return image, label, centres[:, 3]


def vit() -> Any:
    """A small ViT with random weights; a checkpoint of transformers is used the same way."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=SIDE,
        patch_size=PATCH, num_labels=len(COLOURS), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def train(model: Any, steps: int) -> None:
    """Learn the colours; a swapped model trains as before."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps + 1):
        image, label, _ = pictures(32)
        result = model(pixel_values=image, labels=label)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        if step % max(1, steps // 4) == 0:
            print(f"step {step:4d}  loss {result.loss.item():.3f}")


@torch.no_grad()
def weight_on_disc(model: Any) -> None:
    """The class token's weight on the patches that the coloured disc touches, by head."""
    image, _, centre = pictures(16)
    with ch.observe(model, ch.Want(rows=[0])) as observed:  # query 0 is the class token
        model(pixel_values=image)
    patch = torch.arange(GRID[0]) * PATCH
    low, high = centre - RADIUS, centre + RADIUS
    # [picture, axis, patch]
    touched = (patch <= high[..., None]) & (patch + PATCH - 1 >= low[..., None])
    disc = touched[:, 0, :, None] & touched[:, 1, None, :]
    print(f"share of patches that the disc touches: {disc.float().mean():.2f}")
    for layer, record in observed.items():
        assert record.rows is not None
        # Without the class token as a key: [picture, head, row, column].
        over = record.rows[:, :, 0, 1:].unflatten(-1, GRID)
        mean = (over * disc[:, None]).sum(dim=(-1, -2)).mean(dim=0)
        print(f"  {layer}: " + " ".join(f"{weight:.2f}" for weight in mean.tolist()))


@torch.no_grad()
def page(model: Any, path: Path) -> None:
    """A page that lays each head's weights over the picture."""
    image, _, _ = pictures(1)
    with ch.trace(model) as traced:
        model(pixel_values=image)
    places = [f"{row},{column}" for row in range(GRID[0]) for column in range(GRID[1])]
    shown = image[0].permute(1, 2, 0)  # [height, width, 3]
    made = ch.view(
        traced,
        tokens=["[CLS]", *places],
        image=shown,
        grid=GRID,
        grid_first=1,
        title="Which colour has the disc?",
    )
    print(f"{made.save(path)} holds {made!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a vision transformer attends to.")
    parser.add_argument("--quick", action="store_true", help="8 training steps")
    parser.add_argument("--out", type=Path, default=Path("see_image.html"), help="the page")
    chosen = parser.parse_args()
    if find_spec("transformers") is None:
        print("skipped: needs the extra 'hf': pip install 'clearhead[hf]'")
        return
    torch.manual_seed(0)
    model = vit()
    print(ch.swap(model))
    train(model, 8 if chosen.quick else 300)
    model.eval()
    weight_on_disc(model)
    page(model, chosen.out)


if __name__ == "__main__":
    main()
