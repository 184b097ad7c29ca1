"""Calls of flash-linear-attention's kernels: their arguments, and the use of their results.

Their kernels need a GPU. Here stand-ins with their documented signatures compute token by token; a machine with a GPU
and the package runs the real ones.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.linear import LinearState, fla, forms
from clearhead.linear.recurrence import Recurrence
from tests.linear.members import MEMBERS, Member

#: Members that they have a kernel for; bfloat16 has eight bits.
SUPPORTED = [name for name in MEMBERS if name != "delta, gate per channel"]
ROUGH = 2.0**-8


def token_by_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """What each of their functions documents: ``[batch, len, heads, dim]``, gates in logarithms, states ``[K, V]``."""
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert initial_state.dtype == torch.float32
    assert all(part.is_contiguous() for part in (q, k, v))
    state, outputs = initial_state, []
    for place in range(q.shape[1]):
        query, key, value = (part[:, place].float() for part in (q, k, v))
        if g is not None:
            state = state * (g[:, place] if g.ndim == 4 else g[:, place, :, None]).exp()[..., None]
        if beta is not None:
            value = beta[:, place, :, None] * (value - torch.einsum("bhk,bhkv->bhv", key, state))
        state = state + key[..., None] * value[..., None, :]
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", query, state))
    return torch.stack(outputs, dim=1).to(q.dtype), state if output_final_state else None


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in set(fla.KERNELS.values()):
        module: Any = ModuleType(kernel.module)
        setattr(module, kernel.name, token_by_token)
        monkeypatch.setitem(sys.modules, kernel.module, module)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[Recurrence]:
    """Every call of a form uses the stand-ins, which record it."""
    calls: list[Recurrence] = []
    whole = fla.fla_chunks

    def counted(call: Recurrence, state: LinearState) -> Any:
        calls.append(call)
        return whole(call, state)

    monkeypatch.setattr(fla, "fla_chunks", counted)
    monkeypatch.setattr(fla, "takes", lambda call: True)
    monkeypatch.setattr(forms.native, "takes", lambda *given: False)
    return calls


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("group", [1, 2])
def test_fla_kernels_equal_the_formula(name: str, group: int, everywhere: list[Recurrence]) -> None:
    member: Member = MEMBERS[name]
    inputs = member.draw(dtype=torch.float64)
    if group == 2:
        inputs = type(inputs)(inputs.query.repeat_interleave(2, 1), inputs.key, inputs.value, inputs.extra)
    inputs = inputs.mapped(lambda part: part.to(torch.bfloat16))
    exact, last = member.run(inputs.mapped(lambda part: part.double()), form="recurrent")
    assert not everywhere
    output, state = member.run(inputs, form="chunked")
    assert len(everywhere) == 1
    assert everywhere[0].given == torch.bfloat16
    assert output.dtype == torch.bfloat16
    # Features, gates and outputs in bfloat16 against all of it in float64.
    assert float((output.double() - exact).abs().max()) <= 8 * ROUGH * float(exact.abs().max())
    assert state.matrix.dtype == torch.float32
    assert float((state.matrix - last.matrix).abs().max()) <= 8 * ROUGH * float(last.matrix.abs().max())
    if state.normalizer is not None:
        assert float((state.normalizer - last.normalizer).abs().max()) <= 8 * ROUGH * float(last.normalizer.abs().max())


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("name", SUPPORTED)
def test_split_sequence_continues_from_the_state(name: str) -> None:
    member: Member = MEMBERS[name]
    inputs = member.draw().mapped(lambda part: part.to(torch.bfloat16))
    whole, last = member.run(inputs, form="chunked")
    first, state = member.run(inputs.cut(0, 9), form="chunked")
    second, final = member.run(inputs.cut(9, 21), form="chunked", state=state)
    scale = float(whole.abs().max())
    assert float((torch.cat([first, second], dim=2) - whole).abs().max()) <= 2 * ROUGH * scale
    assert float((final.matrix - last.matrix).abs().max()) <= 1e-5 * float(last.matrix.abs().max())


def test_cpu_calls_do_not_use_fla() -> None:
    inputs = MEMBERS["elu"].draw(dtype=torch.bfloat16)
    call = Recurrence(
        query=inputs.query, key=inputs.key, value=inputs.value, feature_map=linear_map(), given=torch.bfloat16
    )
    assert not fla.takes(call)


def linear_map() -> Any:
    from clearhead.linear.feature_maps import FEATURE_MAPS

    return FEATURE_MAPS["identity"]


@pytest.mark.skipif(not (torch.cuda.is_available() and fla.installed()), reason="needs a GPU and the extra 'fla'")
@pytest.mark.parametrize("name", SUPPORTED)
def test_the_real_kernels_agree(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    member = MEMBERS[name]
    inputs = member.draw((2, 3, 150, 16)).mapped(lambda part: part.to("cuda", torch.bfloat16).requires_grad_())
    output, _ = member.run(inputs, form="chunked")
    exact, _ = member.run(inputs.mapped(lambda part: part.detach().double().cpu()), form="recurrent")
    assert float((output.cpu().double() - exact).abs().max()) <= 16 * ROUGH * float(exact.abs().max())
    assert all(part.isfinite().all() for part in torch.autograd.grad(output.sum(), inputs.tensors()))
