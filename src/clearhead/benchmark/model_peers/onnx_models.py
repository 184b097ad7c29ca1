"""ONNX Runtime: models exported by torch, with its graph optimisations."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from clearhead.benchmark.hugging_face import EncoderStates
from clearhead.benchmark.machine import machine
from clearhead.benchmark.model_peers.exporter import quiet_exporter
from clearhead.benchmark.model_peers.plain_llama import PlainLlama, empty_cache
from clearhead.benchmark.model_peers.work import ModelWork
from clearhead.benchmark.peers import Call, Groups

__all__ = ["onnx_call"]

_OPSET: Final = 17
_ONLY_ERRORS: Final = 3


def onnx_call(work: ModelWork, number_format: str) -> Call:
    """The call of an ONNX Runtime session; ``"int8"`` quantises weights beforehand and activations at run time."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        if work.kind == "encoder":
            given = [work.ids] if work.padding_mask is None else [work.ids, work.padding_mask]
            _export_encoder(work, given, path)
        else:
            _export_llama(work, path)
        session = _session(_quantised(path) if number_format == "int8" else path)
    if work.kind == "encoder":
        return _encoder(session, given)
    return _prefill(session, work) if work.kind == "prefill" else _decoding(session, work)


def _export_encoder(work: ModelWork, given: Sequence[Tensor], path: Path) -> None:
    model = deepcopy(work.model)
    model.set_attn_implementation("eager")
    with quiet_exporter():
        torch.onnx.export(EncoderStates(model).eval(), tuple(given), str(path), dynamo=False, opset_version=_OPSET)


def _export_llama(work: ModelWork, path: Path) -> None:
    model = PlainLlama(work.model).eval()
    # With a cached token, so that no length is 0 or 1 in the trace.
    past = [torch.zeros(work.batch, model.kv_heads, 3, model.head_dim) for _ in empty_cache(model, work.batch)]
    names = [f"past.{place}" for place in range(len(past))]
    results = ["logits", *(f"present.{place}" for place in range(len(past)))]
    axes = {"ids": {1: "length"}, **{name: {2: "cached"} for name in names}}
    with quiet_exporter():
        torch.onnx.export(
            model,
            (work.ids[:, :2], *past),
            str(path),
            dynamo=False,
            opset_version=_OPSET,
            input_names=["ids", *names],
            output_names=results,
            dynamic_axes=axes,
        )


def _quantised(path: Path) -> Path:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    smaller = path.with_name("int8.onnx")
    with quiet_exporter():
        quantize_dynamic(
            path,
            smaller,
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            # Without VNNI the kernels' 16 bit sums of pairs overflow with weights of 8 bits.
            reduce_range=not any("vnni" in name for name in machine()["instructions"]),
        )
    return smaller


def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = _ONLY_ERRORS
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _encoder(session: Any, given: Sequence[Tensor]) -> Call:
    feed = {node.name: tensor.numpy() for node, tensor in zip(session.get_inputs(), given, strict=True)}

    def call() -> Groups:
        return ((torch.from_numpy(session.run(None, feed)[0]),),)

    return call


def _prefill(session: Any, work: ModelWork) -> Call:
    step = _Step(session, work)

    def call() -> Groups:
        return ((step(work.ids, step.empty())[0],),)

    return call


def _decoding(session: Any, work: ModelWork) -> Call:
    step = _Step(session, work)
    place, past = work.length, step(work.ids[:, : work.length], step.empty())[1]

    def call() -> Groups:
        nonlocal place, past
        if place == work.ids.shape[1]:
            place, past = work.length, step(work.ids[:, : work.length], step.empty())[1]
        logits, past = step(work.ids[:, place : place + 1], past)
        place += 1
        return ((logits[:, -1],),)

    return call


class _Step:
    """A call of the session; keys and values stay in ONNX Runtime's own memory."""

    def __init__(self, session: Any, work: ModelWork) -> None:
        self.session, self.work = session, work
        self.names = [node.name for node in session.get_inputs()][1:]

    def empty(self) -> list[Any]:
        """A cache without tokens."""
        import onnxruntime

        past = empty_cache(PlainLlama(self.work.model), self.work.batch)
        return [onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in past]

    def __call__(self, ids: Tensor, past: Sequence[Any]) -> tuple[Tensor, list[Any]]:
        import onnxruntime

        feed = {"ids": onnxruntime.OrtValue.ortvalue_from_numpy(ids.contiguous().numpy())}
        feed.update(zip(self.names, past, strict=True))
        logits, *present = self.session.run_with_ort_values(None, feed)
        return torch.from_numpy(logits.numpy()), present
