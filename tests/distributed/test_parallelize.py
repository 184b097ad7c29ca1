"""Parallelized models compute and learn what one process does."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import clearhead as ch
from clearhead.distributed.launch import run_ranks

VOCABULARY, LENGTH, BATCH = 50, 16, 4


@dataclass(frozen=True)
class Run:
    """A training run on a mesh, beside the same run in one process."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    layout: str = "contiguous"
    dtype: str = "float32"
    steps: int = 3
    dropout: float = 0.0
    attention_dropout: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()
    scores: str = "none"
    mask: str = "none"
    compiled: bool = False


def _rules(kind: str, heads: int) -> list[Any]:
    torch.manual_seed(5)
    return {
        "none": lambda: [],
        "learned": lambda: [
            ch.RelativeBias(nn.Parameter(torch.randn(heads, 9))),
            ch.Sink(nn.Parameter(torch.randn(heads))),
        ],
        "shared": lambda: [ch.RelativeBias(nn.Parameter(torch.randn(1, 9))), ch.SoftCap(20.0)],
        "alibi": lambda: [ch.Alibi(heads)],
    }[kind]()


def _model(run: Run) -> ch.nn.LanguageModel:
    torch.manual_seed(0)
    options = {"num_heads": 4, "num_layers": 2, "max_len": LENGTH, **dict(run.options)}
    model = ch.nn.LanguageModel(
        VOCABULARY,
        embed_dim=32,
        dropout=run.dropout,
        attention_dropout=run.attention_dropout,
        scores=_rules(run.scores, options["num_heads"]),
        **options,
    )
    return model.to(getattr(torch, run.dtype))


def _mask(kind: str) -> Any:
    torch.manual_seed(6)
    return {
        "none": None,
        "window": ch.Window(5),
        "dense heads": ch.Dense(torch.rand(1, 4, LENGTH, LENGTH) > 0.3),
        "function": ch.MaskFunction(lambda batch, head, q_pos, k_pos: (q_pos + k_pos + head) % 3 > 0),
    }[kind]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: Tensor, labels: Tensor, mask: Any) -> Any:
    torch.manual_seed(3)
    loss = F.cross_entropy(model(ids, mask=mask).float().flatten(0, 1), labels.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    gradients = [_whole(parameter.grad) for parameter in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), float(_whole(norm)), gradients


def _whole(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def _part(run: Run, mesh: Any, x: Tensor) -> Tensor:
    """The rank's tokens of the rank's sequences."""
    sizes = dict(zip(run.names, run.shape, strict=True))
    place, parts = 0, 1
    for name in ("data", "shard"):
        if name in sizes:
            place, parts = place * sizes[name] + mesh.get_local_rank(name), parts * sizes[name]
    x = x.chunk(parts)[place]
    if "context" in sizes:
        return ch.distributed.shard(x, dim=1, layout=run.layout, group=mesh.get_group("context"))  # type: ignore[arg-type]
    return x


def _errors(run: Run) -> dict[str, float]:
    """The largest relative differences of losses, norms and gradients."""
    expected, model = _model(run), _model(run)
    mesh = init_device_mesh("cpu", run.shape, mesh_dim_names=run.names)
    ch.distributed.parallelize(model, mesh, layout=run.layout)  # type: ignore[arg-type]
    if run.compiled:
        model.compile_blocks("aot_eager")
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, expected)]
    errors = {"loss": 0.0, "norm": 0.0, "gradient": 0.0}
    mask = _mask(run.mask)
    for step in range(run.steps):
        torch.manual_seed(10 + step)
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
        ids, labels = tokens[:, :-1], tokens[:, 1:]
        loss, norm, gradients = _step(model, optimizers[0], _part(run, mesh, ids), _part(run, mesh, labels), mask)
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
        whole_loss, whole_norm, whole_gradients = _step(expected, optimizers[1], ids, labels, mask)
        errors["loss"] = max(errors["loss"], float((loss - whole_loss).abs() / whole_loss))
        errors["norm"] = max(errors["norm"], abs(norm - whole_norm) / whole_norm)
        for one, other in zip(gradients, whole_gradients, strict=True):
            scale = max(float(other.abs().max()), 1e-3)
            errors["gradient"] = max(errors["gradient"], float((one - other).abs().max()) / scale)
    model.eval(), expected.eval()
    with torch.no_grad():
        logits, whole = model(_part(run, mesh, ids), mask=mask), _part(run, mesh, expected(ids, mask=mask))
    errors["logits"] = float((logits - whole).abs().max() / whole.abs().max())
    return errors


def _check(run: Run, budget: float = 2e-5) -> None:
    for errors in run_ranks(_errors, prod(run.shape), run, timeout=200):
        assert errors["loss"] < 1e-6 or budget > 1e-3, errors
        assert max(errors.values()) < budget, errors


AXES = ["data", "shard", "tensor", "context"]


@pytest.mark.parametrize("axis", AXES)
def test_two_ranks_learn_as_one_process(axis: str) -> None:
    _check(Run((axis,), (2,)))
