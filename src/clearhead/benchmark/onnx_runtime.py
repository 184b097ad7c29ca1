"""ONNX Runtime's two attention operators as contenders, on the same memory as torch's tensors.

``Attention`` is the operator of the ONNX standard (ai.onnx, version 23). ``MultiHeadAttention`` is ONNX Runtime's own
(com.microsoft): it takes ``[batch, len, heads * head_dim]`` and has a fused kernel for unmasked attention. Inputs and
outputs are bound beforehand, so no copy is timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from clearhead.benchmark.machine import machine
from clearhead.benchmark.peers import Call

__all__ = ["ONNX_OPERATORS", "onnx_calls"]

ONNX_OPERATORS = ("ONNX Runtime Attention", "ONNX Runtime MultiHeadAttention")
_STANDARD, _MULTI_HEAD = ONNX_OPERATORS
_OPSET, _FORMAT = 23, 10
_ONLY_ERRORS = 3


def onnx_calls(inputs: Sequence[Tensor], *, causal: bool) -> tuple[dict[str, Call], dict[str, str]]:
    """Both operators' calls for float32 query, key and value ``[batch, heads, len, head_dim]``.

    Each uses as many threads as torch.

    Returns:
        The calls by name, and the reason for each operator that is left out.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ModuleNotFoundError as error:
        reason = f"needs the package {error.name}; install clearhead[bench]"
        return {}, dict.fromkeys(ONNX_OPERATORS, reason)
    batch, heads, length, _ = inputs[0].shape
    score_bytes, memory = 8 * batch * heads * length**2, machine()["memory"]
    if memory is not None and score_bytes > memory / 2:
        return {}, dict.fromkeys(ONNX_OPERATORS, f"may hold {score_bytes / 2**30:.1f} GiB of scores")
    plain = [tensor.detach() for tensor in inputs]
    return {_STANDARD: _standard(plain, causal), _MULTI_HEAD: _multi_head(plain, causal)}, {}


def _standard(inputs: Sequence[Tensor], causal: bool) -> Call:
    output = torch.empty_like(inputs[0])
    run = _bound("Attention", inputs, output, is_causal=int(causal))

    def call() -> tuple[tuple[Tensor, ...], ...]:
        run()
        return ((output,),)

    return call


def _multi_head(inputs: Sequence[Tensor], causal: bool) -> Call:
    heads = inputs[0].shape[1]
    rows = [tensor.transpose(1, 2).flatten(-2).contiguous() for tensor in inputs]
    output = torch.empty_like(rows[0])
    run = _bound(
        "MultiHeadAttention", rows, output, domain="com.microsoft", num_heads=heads, unidirectional=int(causal)
    )
    by_head = output.unflatten(-1, (heads, -1)).transpose(1, 2)

    def call() -> tuple[tuple[Tensor, ...], ...]:
        run()
        return ((by_head,),)

    return call


def _bound(operator: str, inputs: Sequence[Tensor], output: Tensor, **attributes: Any) -> Any:
    """A session for a model of one node, its inputs and output bound to the tensors' memory."""
    import numpy
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = _ONLY_ERRORS
    model = _model(operator, inputs, output, attributes)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, tensor in zip("qkv", inputs, strict=True):
        binding.bind_input(name, "cpu", 0, numpy.float32, list(tensor.shape), tensor.data_ptr())
    binding.bind_output("y", "cpu", 0, numpy.float32, list(output.shape), output.data_ptr())

    def run(bound: Sequence[Tensor] = inputs) -> None:
        # The default argument keeps the bound tensors alive.
        session.run_with_iobinding(binding)

    return run


def _model(operator: str, inputs: Sequence[Tensor], output: Tensor, attributes: dict[str, Any]) -> bytes:
    from onnx import TensorProto, helper

    def described(name: str, tensor: Tensor) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(tensor.shape))

    node = helper.make_node(operator, ["q", "k", "v"], ["y"], **attributes)
    described_inputs = [described(name, tensor) for name, tensor in zip("qkv", inputs, strict=True)]
    graph = helper.make_graph([node], operator, described_inputs, [described("y", output)])
    opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
    content: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=_FORMAT).SerializeToString()
    return content
