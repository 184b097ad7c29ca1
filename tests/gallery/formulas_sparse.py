"""Variants that choose their keys, by their papers' formulas: float64, dense, without clearhead."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.gallery.formulas import Formula, projected, rotated, side_by_side, softmax


def native_sparse_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """Query by query, block by block."""
    batch, length, embed_dim = x.shape
    size, heads = module.size, module.gates.out_features // 3
    width = embed_dim // heads
    parts = (x @ module.project.weight.T).split([embed_dim] + 6 * [width], dim=-1)
    query, (k1, v1, k2, v2, k3, v3) = parts[0].unflatten(-1, (heads, width)), parts[1:]
    gates = torch.sigmoid(module.gates(x)).unflatten(-1, (3, heads))
    rows = []
    for b in range(batch):
        for i in range(length):
            ends = [end for end in range(size, length + 1, size) if end <= i + 1]
            coarse, importance = x.new_zeros(heads, width), {}
            if ends:
                pooled = [
                    torch.stack([layer(part[b, end - size : end].reshape(-1)) for end in ends])
                    for layer, part in zip(module.compress, (k1, v1), strict=True)
                ]
                weights = torch.softmax(query[b, i] @ pooled[0].T / math.sqrt(width), dim=-1)
                coarse = weights @ pooled[1]
                importance = dict(enumerate(weights.sum(dim=0).tolist()))
            current = i // size
            always = {0, current, max(current - 1, 0)}
            others = sorted(set(range(current)) - always, key=lambda block: -importance[block])
            chosen = always | set(others[: max(module.keep - len(always), 0)])
            read = [[j for j in range(i + 1) if j // size in chosen], range(max(0, i + 1 - module.window), i + 1)]
            fine = [
                torch.softmax(query[b, i] @ key[b, list(keys)].T / math.sqrt(width), dim=-1) @ value[b, list(keys)]
                for keys, key, value in zip(read, (k2, k3), (v2, v3), strict=True)
            ]
            rows.append(sum(gates[b, i, c][:, None] * part for c, part in enumerate([coarse, *fine])).reshape(-1))
    return torch.stack(rows).view(batch, length, embed_dim) @ module.output.weight.T


def mixture_of_block_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    query, key, value = projected(module.heads, x)
    length, size = x.shape[1], module.size
    chosen = torch.zeros(*query.shape[:2], length, length)
    for b, h, i in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:3])).tolist():
        current = i // size
        means = [key[b, h, size * block : size * (block + 1)].mean(dim=0) for block in range(current)]
        affinity = [(query[b, h, i] @ mean).item() for mean in means]
        best = sorted(range(current), key=lambda block: -affinity[block])[: module.keep - 1]
        for block in [*best, current]:
            chosen[b, h, i, size * block : size * (block + 1)] = 1.0
    weights = softmax(query @ key.mT / query.shape[-1] ** 0.5, chosen * allowed)
    return module.heads.output_projection(side_by_side(weights @ value))


def interleaved_rope(module: Any, x: Tensor, allowed: Tensor, *, chunk: int = 4) -> Tensor:
    query, key, value = projected(module.heads, x)
    place = torch.arange(x.shape[1])
    allowed = allowed * (place <= place[:, None])
    if module.heads.rotary is not None:
        query, key = rotated(query), rotated(key)
        allowed = allowed * (place // chunk == (place // chunk)[:, None])
    else:
        factors = [1 + module.strength * math.log(1 + (p + 1) // module.floor) for p in place.tolist()]
        query = query * torch.tensor(factors, dtype=x.dtype)[:, None]
    weights = softmax(query @ key.mT / query.shape[-1] ** 0.5, allowed)
    return module.heads.output_projection(side_by_side(weights @ value))


def reformer_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """All pairs in the order of the text, no sorting."""
    shared, value = (
        part.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for part in (x @ module.project.weight.T).chunk(2, dim=-1)
    )
    sides = shared @ module.rotations
    bucket = torch.cat([sides, -sides], dim=-1).argmax(dim=-1)
    same = (bucket[..., None] == bucket[..., None, :]) * allowed
    key = shared / shared.square().sum(dim=-1, keepdim=True).sqrt()
    weights = torch.softmax((shared @ key.mT - 1e5 * torch.eye(x.shape[1])).masked_fill(same == 0, -math.inf), dim=-1)
    return side_by_side(weights @ value) @ module.output.weight.T


def longformer_attention(module: Any, x: Tensor, allowed: Tensor, *, window: int = 4) -> Tensor:
    place = torch.arange(x.shape[1])
    first = place < module.num_global
    pattern = ((place[:, None] - place).abs() <= window // 2) | first | first[:, None]
    outputs = []
    for heads in (module.local, module.everywhere):
        query, key, value = projected(heads, x)
        weights = softmax(query @ key.mT / query.shape[-1] ** 0.5, allowed * pattern)
        outputs.append(heads.output_projection(side_by_side(weights @ value)))
    return torch.where(first[:, None], outputs[1], outputs[0])


def big_bird_attention(module: Any, x: Tensor, allowed: Tensor, *, num_global: int = 1, num_random: int = 1) -> Tensor:
    """Which random blocks were drawn is the module's; how many, and all others, are the paper's."""
    blocks = module.table.shape[-1]
    place = torch.arange(blocks)
    fixed = ((place[:, None] - place).abs() <= 1) | (place < num_global) | (place[:, None] < num_global)
    assert not (fixed & ~module.table).any()
    drawn = (module.table & ~fixed).sum(dim=-1)
    assert torch.equal(drawn, (~fixed).sum(dim=-1).clamp(max=num_random).expand_as(drawn))
    block = torch.arange(x.shape[1]) // module.size
    pattern = module.table[0][:, block][:, :, block]
    query, key, value = projected(module.heads, x)
    weights = softmax(query @ key.mT / query.shape[-1] ** 0.5, allowed * pattern)
    return module.heads.output_projection(side_by_side(weights @ value))


def neighborhood_attention(module: Any, image: Tensor) -> Tensor:
    """Pixel by pixel: its square of keys, moved inwards at the edge."""
    batch, height, width, _ = image.shape
    side, heads = module.side, module.heads
    query, key, value = projected(heads, image.flatten(1, 2))
    rows = []
    for y in range(height):
        for x in range(width):
            top = min(max(y - side // 2, 0), max(height - side, 0))
            left = min(max(x - side // 2, 0), max(width - side, 0))
            near = [
                (row, column)
                for row in range(top, min(top + side, height))
                for column in range(left, min(left + side, width))
            ]
            places = [row * width + column for row, column in near]
            bias = torch.stack([module.bias[:, y - row + side - 1, x - column + side - 1] for row, column in near], -1)
            scores = (query[:, :, y * width + x, None] * key[:, :, places]).sum(-1) / math.sqrt(heads.head_dim) + bias
            rows.append((torch.softmax(scores, dim=-1)[..., None] * value[:, :, places]).sum(dim=2))
    output = torch.stack(rows, dim=1).flatten(-2)
    return heads.output_projection(output).view(batch, height, width, -1)


def axial_attention(module: Any, image: Tensor) -> Tensor:
    """One attention over all pixels for each axis, in which others' columns or rows are masked."""
    batch, height, width, embed_dim = image.shape
    place = torch.arange(height * width)
    x = image.reshape(batch, height * width, embed_dim)
    for heads, line in ((module.columns, place % width), (module.rows, place // width)):
        query, key, value = projected(heads, x)
        weights = softmax(query @ key.mT / query.shape[-1] ** 0.5, line == line[:, None])
        x = heads.output_projection(side_by_side(weights @ value))
    return x.view(batch, height, width, embed_dim)


SPARSE: dict[str, Formula] = {
    formula.__name__: formula
    for formula in (
        native_sparse_attention,
        mixture_of_block_attention,
        interleaved_rope,
        reformer_attention,
        longformer_attention,
        big_bird_attention,
    )
}
