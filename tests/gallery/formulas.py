"""Each variant of the gallery by its paper's formula: float64, dense, whole matrices of weights, nothing of clearhead.

``formula(module, x, allowed)`` reads the module's parameters and gives what the module should.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Formula = Callable[[Any, Tensor, Tensor], Tensor]


def projected(heads: Any, x: Tensor) -> list[Tensor]:
    """Queries, keys and values ``[batch, heads, len, head_dim]``."""
    names = ("query_projection", "key_projection", "value_projection")
    return [getattr(heads, name)(x).unflatten(-1, (-1, heads.head_dim)).transpose(1, 2) for name in names]


def softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    numbers = scores.exp() * allowed
    return numbers / numbers.sum(dim=-1, keepdim=True)


def side_by_side(heads: Tensor) -> Tensor:
    return torch.cat(list(heads.unbind(dim=1)), dim=-1)


def rotated(x: Tensor) -> Tensor:
    """Rotary, pair by pair."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for place in range(x.shape[-2]):
        for pair in range(half):
            angle = place * 10000.0 ** (-pair / half)
            left, right = x[..., place, pair], x[..., place, pair + half]
            out[..., place, pair] = left * math.cos(angle) - right * math.sin(angle)
            out[..., place, pair + half] = left * math.sin(angle) + right * math.cos(angle)
    return out


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum(dim=-1, keepdim=True).sqrt()


def query_key_norm(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    query, key, value = projected(module.heads, x)
    weights = softmax(module.gain * (unit(query) @ unit(key).mT), allowed)
    return module.heads.output_projection(side_by_side(weights @ value))


def gated_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    query, key, value = projected(module.heads, x)
    joined = side_by_side(softmax(query @ key.mT / query.shape[-1] ** 0.5, allowed) @ value)
    gate = 1 / (1 + torch.exp(-(x @ module.gate.weight.T)))
    return module.heads.output_projection(joined * gate)


def differential_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    width = x.shape[-1] // module.num_heads
    query, key, value = (x @ part.T for part in module.project.weight.chunk(3))
    a1, b1, a2, b2 = module.rates
    rate = (a1 * b1).sum().exp() - (a2 * b2).sum().exp() + module.lambda_init
    heads = []
    for head in range(module.num_heads):
        place = slice(head * width, (head + 1) * width)
        (q1, q2), (k1, k2) = (part[..., place].split(width // 2, dim=-1) for part in (query, key))
        first, second = (softmax(q @ k.mT / (width // 2) ** 0.5, allowed[0, 0]) for q, k in ((q1, k1), (q2, k2)))
        output = (first - rate * second) @ value[..., place]
        scaled = output / (output.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * module.norm.weight
        heads.append(scaled * (1 - module.lambda_init))
    return torch.cat(heads, dim=-1) @ module.output.weight.T


def latent_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """With every head's keys and values written out, as in the paper's equations 9 to 19."""
    width, rotary_dim = module.sizes
    latent_dim = module.up.shape[2]
    compressed = x @ module.compress.weight.T
    latent, shared = compressed[..., :latent_dim], rotated(compressed[..., latent_dim:])
    query = (x @ module.query.weight.T).unflatten(-1, (-1, width + rotary_dim))
    heads = []
    for head in range(query.shape[2]):
        keys = torch.cat([latent @ module.up[0, head], shared], dim=-1)
        queries = torch.cat([query[:, :, head, :width], rotated(query[:, :, head, width:])], dim=-1)
        weights = softmax(queries @ keys.mT / math.sqrt(width + rotary_dim), allowed[0, 0])
        heads.append(weights @ (latent @ module.up[1, head]))
    return torch.cat(heads, dim=-1) @ module.output.weight.T


def cosine_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    query, key, value = projected(module.heads, x)
    temperature = torch.exp(-module.log_scale).clamp(min=0.01)
    weights = softmax(unit(query) @ unit(key).mT / temperature, allowed)
    return module.heads.output_projection(side_by_side(weights @ value))


def talking_heads(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    query, key, value = projected(module.heads, x)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    mixed = torch.einsum("bgij,gh->bhij", scores, module.mix_scores)
    weights = torch.einsum("bgij,gh->bhij", softmax(mixed, allowed), module.mix_weights)
    return module.heads.output_projection(side_by_side(weights @ value))


def learned_sinks(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    query, key, value = projected(module.heads, x)
    (logits,) = (parameter for name, parameter in module.named_parameters() if "logits" in name)
    query, key = rotated(query), rotated(key)
    numbers = (query @ key.mT / query.shape[-1] ** 0.5).exp() * allowed * torch.ones(x.shape[1], x.shape[1]).tril()
    weights = numbers / (numbers.sum(dim=-1, keepdim=True) + logits.view(1, -1, 1, 1).exp())
    return module.heads.output_projection(side_by_side(weights @ value))


def t5_bucket(distance: int, num_buckets: int = 32, farthest: int = 128, *, decoder: bool = False) -> int:
    half = num_buckets if decoder else num_buckets // 2
    start, size = (0, max(distance, 0)) if decoder else (half if distance < 0 else 0, abs(distance))
    single = half // 2
    if size < single:
        return start + size
    far = single + int(math.log(size / single) / math.log(farthest / single) * (half - single))
    return start + min(far, half - 1)


def t5_attention(module: Any, x: Tensor, allowed: Tensor, *, decoder: bool = False) -> Tensor:
    query, key, value = projected(module.heads, x)
    length = range(x.shape[1])
    places = torch.tensor([[t5_bucket(i - j, decoder=decoder) for j in length] for i in length])
    weights = softmax(query @ key.mT + module.bias[:, places], allowed)
    return module.heads.output_projection(side_by_side(weights @ value))


def swin_windows(module: Any, image: Tensor) -> Tensor:
    """Pixel by pixel: who shares a window of the shifted grid, without wrapping around."""
    batch, height, width, _ = image.shape
    side = module.side
    down, right = (module.shift if size > side else 0 for size in (height, width))
    places = [(row, column) for row in range(height) for column in range(width)]
    group = [((row - down) // side, (column - right) // side) for row, column in places]
    query, key, value = projected(module.heads, image.flatten(1, 2))
    allowed = torch.tensor([[left == right for right in group] for left in group])
    rows, columns = torch.tensor(places).T
    far = side - 1
    offsets = [(line[:, None] - line).clamp(-far, far) + far for line in (rows, columns)]
    scores = query @ key.mT / query.shape[-1] ** 0.5 + module.bias[:, offsets[0], offsets[1]]
    weights = softmax(scores, allowed)
    return module.heads.output_projection(side_by_side(weights @ value)).view(batch, height, width, -1)


def perceiver_resampler(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """``allowed [batch, len]``: which tokens are real."""

    def norm(place: int, tokens: Tensor) -> Tensor:
        return layer_norm(module.norms[place], tokens)

    heads = module.heads
    read_by, read = norm(0, module.latents)[None], norm(1, x)
    pairs = ((heads.query_projection, read_by), (heads.key_projection, read), (heads.value_projection, read))
    query, key, value = (layer(source).unflatten(-1, (-1, heads.head_dim)).transpose(1, 2) for layer, source in pairs)
    weights = softmax(query @ key.mT / query.shape[-1] ** 0.5, allowed[:, None, None])
    read = module.latents + heads.output_projection(side_by_side(weights @ value))
    return read + module.feedforward(norm(2, read))


def induced_set_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """``allowed [batch, len]``: which tokens are real."""

    def block(place: int, query: Tensor, key: Tensor, real: Tensor) -> Tensor:
        heads = module.heads[place]
        pairs = ((heads.query_projection, query), (heads.key_projection, key), (heads.value_projection, key))
        q, k, v = (layer(source).unflatten(-1, (-1, heads.head_dim)).transpose(1, 2) for layer, source in pairs)
        weights = softmax(q @ k.mT / q.shape[-1] ** 0.5, real[:, None, None])
        read = layer_norm(module.norms[2 * place], query + heads.output_projection(side_by_side(weights @ v)))
        return layer_norm(module.norms[2 * place + 1], read + module.feedforwards[place](read))

    points = block(0, module.points.expand(x.shape[0], -1, -1), x, allowed)
    return block(1, x, points, torch.ones(points.shape[:2], dtype=torch.bool))


def layer_norm(norm: Any, x: Tensor) -> Tensor:
    middle = x - x.mean(dim=-1, keepdim=True)
    return middle / (middle.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def grouped_query_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """Each query head beside a copy of the key head that it reads."""
    query, key, value = projected(module.heads, x)
    group = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        weights = softmax(query[:, head] @ key[:, head // group].mT / query.shape[-1] ** 0.5, allowed[0, 0])
        heads.append(weights @ value[:, head // group])
    return module.heads.output_projection(torch.cat(heads, dim=-1))


def alibi_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    query, key, value = projected(module.heads, x)
    place, heads = torch.arange(x.shape[1]), query.shape[1]
    slopes = torch.tensor([2.0 ** (-8.0 * (head + 1) / heads) for head in range(heads)], dtype=x.dtype)
    scores = query @ key.mT / query.shape[-1] ** 0.5 - slopes[:, None, None] * (place[:, None] - place).abs()
    return module.heads.output_projection(side_by_side(softmax(scores, allowed) @ value))


def forgetting_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """Each pair has the sum of the logarithms of the gates between them."""
    query, key, value = projected(module.heads, x)
    gates = (1 / (1 + torch.exp(-module.forget(x)))).log().mT
    length = range(x.shape[1])
    rows = [torch.stack([gates[:, :, j + 1 : i + 1].sum(dim=-1) for j in length], dim=-1) for i in length]
    scores = query @ key.mT / query.shape[-1] ** 0.5 + torch.stack(rows, dim=-2)
    weights = softmax(scores, allowed * torch.ones(x.shape[1], x.shape[1]).tril())
    return module.heads.output_projection(side_by_side(weights @ value))


def transformer_xl(module: Any, x: Tensor, allowed: Tensor, *, memory: Tensor | None = None) -> Tensor:
    """The four terms of the score, with the vector of every distance written out."""
    tokens = x if memory is None else torch.cat([memory, x], dim=1)
    heads, first = module.heads, tokens.shape[1] - x.shape[1]
    query = heads.query_projection(x).unflatten(-1, (-1, heads.head_dim)).transpose(1, 2)
    key, value = projected(heads, tokens)[1:]
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    offsets = torch.arange(first, first + x.shape[1])[:, None] - torch.arange(tokens.shape[1])
    angle = offsets[..., None] * rate
    distance = torch.einsum("hde,ije->hijd", module.waves, torch.cat([angle.cos(), -angle.sin()], dim=-1))
    u, v = module.biases
    scores = (query + u) @ key.mT + torch.einsum("bhid,hijd->bhij", query + v, distance)
    weights = softmax(scores / heads.head_dim**0.5, allowed)
    return heads.output_projection(side_by_side(weights @ value))


def expanded_latent_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    return latent_attention(module, x, allowed)


SEQUENCES: dict[str, Formula] = {
    formula.__name__: formula
    for formula in (
        query_key_norm,
        gated_attention,
        differential_attention,
        latent_attention,
        cosine_attention,
        talking_heads,
        learned_sinks,
        t5_attention,
        expanded_latent_attention,
        grouped_query_attention,
        alibi_attention,
        forgetting_attention,
        transformer_xl,
    )
}
