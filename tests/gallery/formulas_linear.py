"""Variants of cost linear in the length, by their papers' formulas: float64, token by token, without clearhead."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.gallery.formulas import Formula, projected, rotated, side_by_side, unit


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def convolved(layer: Any, x: Tensor) -> Tensor:
    """A causal convolution of each channel over four tokens, tap by tap."""
    length = x.shape[1]
    padded = torch.cat([x.new_zeros(x.shape[0], 3, x.shape[2]), x], dim=1)
    output = sum(padded[:, tap : tap + length] * layer.weight[:, 0, tap] for tap in range(4))
    return output if layer.bias is None else output + layer.bias


def rms(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def performer(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """Weights are products of random features, written out for all pairs."""
    query, key, value = projected(module.heads, x)
    weights = module.heads.random_features
    scaled = (part / part.shape[-1] ** 0.25 for part in (query, key))
    left, right = (torch.exp(y @ weights.T - y.square().sum(dim=-1, keepdim=True) / 2) for y in scaled)
    products = left @ right.mT * allowed
    return module.heads.output_projection(side_by_side(products / products.sum(dim=-1, keepdim=True) @ value))


def gated_delta_net(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    batch, length, embed_dim = x.shape
    heads = module.fade.shape[1]
    mixed, gate, fade, rate = (x @ module.project.weight.T).split([3 * embed_dim, embed_dim, heads, heads], dim=-1)
    query, key, value = silu(convolved(module.convolve, mixed)).unflatten(-1, (3, heads, -1)).unbind(dim=2)
    query, key = unit(query), unit(key)
    decay = torch.exp(-torch.exp(module.fade[0]) * torch.log1p(torch.exp(fade + module.fade[1])))
    rate = 1 / (1 + torch.exp(-rate))
    width = embed_dim // heads
    state, rows = x.new_zeros(batch, heads, width, width), []
    for i in range(length):
        k, v, b = key[:, i, :, :, None], value[:, i, :, None], rate[:, i, :, None, None]
        erased = torch.eye(width, dtype=x.dtype) - b * (k @ k.mT)
        state = decay[:, i, :, None, None] * (erased @ state) + b * (k @ v)
        rows.append((query[:, i, :, None] @ state)[..., 0, :] / math.sqrt(width))
    output = rms(torch.stack(rows, dim=1), module.norm).flatten(-2)
    return (output * silu(gate)) @ module.output.weight.T


def mamba2(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """The state space recurrence, discretised by the step."""
    batch, length, embed_dim = x.shape
    inner, heads = 2 * embed_dim, module.step.shape[0]
    size = (module.sizes[1] - inner) // 2
    gate, mixed, step = (x @ module.project.weight.T).split([inner, inner + 2 * size, heads], dim=-1)
    u, b, c = silu(convolved(module.convolve, mixed)).split([inner, size, size], dim=-1)
    u, step = u.unflatten(-1, (heads, -1)), torch.log1p(torch.exp(step + module.step))
    state, rows = x.new_zeros(batch, heads, inner // heads, size), []
    for i in range(length):
        fade = torch.exp(-torch.exp(module.log_rate) * step[:, i])
        state = fade[..., None, None] * state + torch.einsum("bh,bhp,bn->bhpn", step[:, i], u[:, i], b[:, i])
        rows.append(torch.einsum("bhpn,bn->bhp", state, c[:, i]) + module.skip[:, None] * u[:, i])
    output = torch.stack(rows, dim=1).flatten(-2)
    return rms(output * silu(gate), module.norm) @ module.output.weight.T


def infini_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """Token by token: the memory of the segments before its own, and its own segment."""
    query, key, value = projected(module.heads, x)
    gate = 1 / (1 + torch.exp(-module.gate[:, 0]))
    rows = []
    for i in range(x.shape[1]):
        start = i // module.segment * module.segment
        scores = torch.einsum("bhd,bhjd->bhj", query[:, :, i], key[:, :, start : i + 1]) / key.shape[-1] ** 0.5
        local = torch.einsum("bhj,bhjd->bhd", torch.softmax(scores, dim=-1), value[:, :, start : i + 1])
        memory = torch.zeros_like(local)
        if start:
            left, right = (torch.where(part > 0, part + 1, part.exp()) for part in (query[:, :, i], key[:, :, :start]))
            weights = torch.einsum("bhd,bhjd->bhj", left, right)
            memory = torch.einsum("bhj,bhjd->bhd", weights / weights.sum(-1, keepdim=True), value[:, :, :start])
        rows.append(gate * memory + (1 - gate) * local)
    return module.heads.output_projection(torch.stack(rows, dim=1).flatten(-2))


def linformer(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    query, key, value = projected(module.heads, x)
    mixed = [
        torch.einsum("kn,bhnd->bhkd", mix[:, : x.shape[1]], part)
        for mix, part in zip(module.mix, (key, value), strict=True)
    ]
    weights = torch.softmax(query @ mixed[0].mT / query.shape[-1] ** 0.5, dim=-1)
    return module.heads.output_projection(side_by_side(weights @ mixed[1]))


def multi_scale_retention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    """The parallel form of the paper: products times a matrix of decays."""
    query, key, value = projected(module.heads, x)
    query, key = rotated(query), rotated(key)
    place = torch.arange(x.shape[1])
    decay = 1 - 2.0 ** (-5.0 - torch.arange(query.shape[1], dtype=x.dtype))
    faded = decay[:, None, None] ** (place[:, None] - place).clamp(min=0) * (place <= place[:, None])
    output = (query @ key.mT / query.shape[-1] ** 0.5 * faded) @ value
    middle = output - output.mean(dim=-1, keepdim=True)
    scaled = middle / (middle.square().mean(dim=-1, keepdim=True) + module.norm.eps).sqrt()
    joined = side_by_side(scaled * module.norm.weight + module.norm.bias)
    return module.heads.output_projection(joined * silu(x @ module.gate.weight.T))


def cross_covariance_attention(module: Any, x: Tensor, allowed: Tensor) -> Tensor:
    query, key, value = projected(module.heads, x)
    query, key = (part / part.square().sum(dim=-2, keepdim=True).sqrt() for part in (query, key))
    weights = torch.softmax(module.gain * torch.einsum("bhnc,bhnd->bhcd", query, key), dim=-1)
    return module.heads.output_projection(side_by_side(torch.einsum("bhcd,bhnd->bhnc", weights, value)))


LINEAR: dict[str, Formula] = {
    formula.__name__: formula
    for formula in (
        performer,
        gated_delta_net,
        mamba2,
        infini_attention,
        linformer,
        multi_scale_retention,
        cross_covariance_attention,
    )
}
