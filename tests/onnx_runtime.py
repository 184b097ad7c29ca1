"""Exports a module with ``torch.onnx.export`` and runs the model in ONNX Runtime."""

from __future__ import annotations

import importlib.util
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.benchmark.model_peers.exporter import quiet_exporter
from tests.budget import within_budget

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_MISSING = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)} (the extra onnx)")

#: The first opset with Attention.
ATTENTION = 23
#: The oldest opset that torch translates to.
PLAIN = 18


def export(module: nn.Module, inputs: tuple[Tensor, ...], *, opset: int = ATTENTION, dynamic: Any = None) -> Any:
    """The ONNX program of a module."""
    with quiet_exporter():
        return torch.onnx.export(
            module, inputs, dynamo=True, verbose=False, opset_version=opset, dynamic_shapes=dynamic
        )


def operators(program: Any) -> Counter[str]:
    """How often each operator is in the graph."""
    return Counter(node.op_type for node in program.model.graph)


def run(program: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The outputs that ONNX Runtime computes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    given = {each.name: tensor.numpy() for each, tensor in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, given)]


def same_values(
    module: nn.Module,
    example: tuple[Tensor, ...],
    inputs: tuple[Tensor, ...] | None = None,
    *,
    opset: int = ATTENTION,
    dynamic: Any = None,
    terms: int = 64,
) -> Counter[str]:
    """Assert that ONNX Runtime computes what the module does in float64, within the budget; the graph's operators.

    The module is exported for ``example`` and run on ``inputs``, of other sizes where ``dynamic`` names them.
    """
    inputs = example if inputs is None else inputs
    program = export(module, example, opset=opset, dynamic=dynamic)
    with torch.no_grad():
        textbook = module(*inputs)
        exact = deepcopy(module).double()(*(each.double() if each.is_floating_point() else each for each in inputs))
    (result,) = run(program, inputs)
    within_budget(type(module).__name__, result, textbook, exact, terms=terms)
    return operators(program)
