"""Changes of a model between two calls, each a function that changes a model in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize, vector_to_parameters

__all__ = ["CHANGES", "OF_LAYERS"]

#: Factor on parameters, large enough to reveal a stale copy.
_FACTOR: Final = 0.8


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The linear layers by parent and name, without those whose weights their parent reads directly."""
    for parent in model.modules():
        for name, layer in parent.named_children():
            kinds = {base.__name__ for base in type(layer).__mro__}
            read_by_parent = "NonDynamicallyQuantizableLinear" in kinds
            if kinds & {"Linear", "Conv1D"} and not read_by_parent:
                yield parent, name, layer


def _scaled(tensor: Tensor) -> Tensor:
    return tensor.detach() * _FACTOR


def _assign_data(model: nn.Module) -> None:
    for part in model.parameters():
        part.data = _scaled(part)


def _write_to_data(model: nn.Module) -> None:
    for part in model.parameters():
        part.data.mul_(_FACTOR)


def _write_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for part in model.parameters():
            part.mul_(_FACTOR)


def _write_through_another_view(model: nn.Module) -> None:
    for part in model.parameters():
        part.detach().numpy()[...] *= _FACTOR


def _scaled_state(model: nn.Module) -> dict[str, Any]:
    return {name: _scaled(value) if value.is_floating_point() else value for name, value in model.state_dict().items()}


def _load(model: nn.Module) -> None:
    model.load_state_dict(_scaled_state(model))


def _load_assign(model: nn.Module) -> None:
    model.load_state_dict(_scaled_state(model), assign=True)


def _to_double_and_back(model: nn.Module) -> None:
    model.double()
    _write_in_place(model)
    model.float()


def _to_bfloat16_and_back(model: nn.Module) -> None:
    model.to(torch.bfloat16)
    _write_in_place(model)
    model.to(torch.float32)


def _replace_parameters(model: nn.Module) -> None:
    for part in model.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(_scaled(parameter)))


def _swap_tensors(model: nn.Module) -> None:
    for part in model.parameters():
        torch.utils.swap_tensors(part, nn.Parameter(_scaled(part)))


def _vector(model: nn.Module) -> None:
    vector_to_parameters(_scaled(parameters_to_vector(model.parameters())), model.parameters())


def _lay_out_transposed(model: nn.Module) -> None:
    for part in model.parameters():
        part.data = _scaled(part).T.contiguous().T if part.ndim == 2 else _scaled(part)


def _tie(model: nn.Module) -> None:
    """Linear layers of equal shape share the first one's weight, which then changes."""
    first: dict[tuple[type, torch.Size], nn.Parameter] = {}
    for _, _, layer in _linear_layers(model):
        weight = first.setdefault((type(layer), layer.weight.shape), layer.weight)
        layer.weight = weight
    with torch.no_grad():
        for weight in first.values():
            weight.mul_(_FACTOR)


def _optimize(model: nn.Module) -> None:
    for part in model.parameters():
        part.grad = part.detach().clone()
    torch.optim.SGD(model.parameters(), lr=1.0 - _FACTOR).step()
    model.zero_grad()


class _Scale(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * _FACTOR


def _parametrize(model: nn.Module) -> None:
    for _, _, layer in list(_linear_layers(model)):
        parametrize.register_parametrization(layer, "weight", _Scale())


def _weight_norm(model: nn.Module) -> None:
    for _, _, layer in list(_linear_layers(model)):
        parametrizations.weight_norm(layer)
        with torch.no_grad():
            layer.parametrizations.weight.original0.mul_(_FACTOR)


class _LowRank(nn.Module):
    """A wrapper around a linear layer, like LoRA's."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        width = base.weight.shape[0 if type(base).__name__.endswith("Conv1D") else 1]
        out = base.weight.numel() // width
        self.down = nn.Parameter(torch.linspace(-0.1, 0.1, 2 * width).view(2, width))
        self.up = nn.Parameter(torch.linspace(-0.5, 0.5, 2 * out).view(out, 2))

    @property
    def weight(self) -> Tensor:
        added = self.up @ self.down
        weight: Tensor = self.base.weight + (added.T if type(self.base).__name__.endswith("Conv1D") else added)
        return weight

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.base.bias
        return bias

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + x @ self.down.T @ self.up.T
        return output


def _wrap(model: nn.Module) -> None:
    for parent, name, layer in list(_linear_layers(model)):
        setattr(parent, name, _LowRank(layer))


def _hook(model: nn.Module) -> None:
    for _, _, layer in _linear_layers(model):
        layer.register_forward_hook(lambda module, given, output: output * _FACTOR)


def _hook_before(model: nn.Module) -> None:
    for _, _, layer in _linear_layers(model):
        layer.register_forward_pre_hook(lambda module, given: (given[0] * _FACTOR, *given[1:]))


def _replace_forward(model: nn.Module) -> None:
    for _, _, layer in _linear_layers(model):
        layer.forward = lambda x, before=layer.forward: before(x) * _FACTOR


CHANGES: Final[Mapping[str, Callable[[nn.Module], None]]] = {
    "data assigned": _assign_data,
    "data written to": _write_to_data,
    "written in place": _write_in_place,
    "written through another view": _write_through_another_view,
    "state dict loaded": _load,
    "state dict assigned": _load_assign,
    "to float64 and back": _to_double_and_back,
    "to bfloat16 and back": _to_bfloat16_and_back,
    "parameters replaced": _replace_parameters,
    "tensors swapped": _swap_tensors,
    "one vector": _vector,
    "laid out transposed": _lay_out_transposed,
    "weights tied": _tie,
    "optimizer step": _optimize,
    "parametrized": _parametrize,
    "weight norm": _weight_norm,
    "low rank wrapper": _wrap,
    "forward hook": _hook,
    "forward pre-hook": _hook_before,
    "forward replaced": _replace_forward,
}
#: Changes of linear layers, which have no effect on a model without them.
OF_LAYERS: Final = frozenset(
    {
        "weights tied",
        "parametrized",
        "weight norm",
        "low rank wrapper",
        "forward hook",
        "forward pre-hook",
        "forward replaced",
    }
)
