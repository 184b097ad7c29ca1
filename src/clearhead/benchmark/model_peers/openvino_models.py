"""OpenVINO: models converted from torch, decoders with their cache as the model's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from clearhead.benchmark.hugging_face import EncoderStates
from clearhead.benchmark.model_peers.exporter import quiet_exporter
from clearhead.benchmark.model_peers.peer import CannotRunError
from clearhead.benchmark.model_peers.plain_llama import PlainLlama, empty_cache
from clearhead.benchmark.model_peers.work import ModelWork
from clearhead.benchmark.peers import Call, Groups

__all__ = ["openvino_call"]

#: Batches that calibrate the activations of an encoder in int8.
_CALIBRATION: Final = 4


def openvino_call(work: ModelWork, number_format: str) -> Call:
    """The call of a compiled model; ``"int8"`` quantises encoders by calibration, and the weights of decoders."""
    import openvino

    core = openvino.Core()
    if number_format == "bfloat16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise CannotRunError("OpenVINO computes in bfloat16 only on processors with its instructions")
    # nncf prints progress bars.
    with quiet_exporter(), redirect_stdout(StringIO()):
        model = _encoder_model(work) if work.kind == "encoder" else _stateful_llama(work)
        if number_format == "int8":
            model = _quantised(model, work)
    # OpenVINO rounds to bfloat16 by itself where the processor can; each row says what it wants.
    precision = "bf16" if number_format == "bfloat16" else "f32"
    options = {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": "u8" if number_format == "int8" else precision,
    }
    request = core.compile_model(model, "CPU", options).create_infer_request()
    if work.kind == "encoder":
        return _encoder(request, work)
    return _prefill(request, work) if work.kind == "prefill" else _decoding(request, work)


def _encoder_model(work: ModelWork) -> Any:
    import openvino

    given = (work.ids,) if work.padding_mask is None else (work.ids, work.padding_mask)
    model = openvino.convert_model(EncoderStates(work.model).eval(), example_input=given)
    model.reshape({place: list(tensor.shape) for place, tensor in enumerate(given)})
    return model


def _stateful_llama(work: ModelWork) -> Any:
    import openvino
    from openvino._offline_transformations import apply_make_stateful_transformation

    plain = PlainLlama(work.model).eval()
    past = [torch.zeros(work.batch, plain.kv_heads, 3, plain.head_dim) for _ in empty_cache(plain, work.batch)]
    model = openvino.convert_model(plain, example_input=(work.ids[:, :2], *past))
    model.inputs[0].get_tensor().set_names({"ids"})
    pairs = {}
    for place, (before, now) in enumerate(zip(model.inputs[1:], model.outputs[1:], strict=True)):
        before.get_tensor().set_names({f"past.{place}"})
        now.get_tensor().set_names({f"present.{place}"})
        pairs[f"past.{place}"] = f"present.{place}"
    shape = [work.batch, plain.kv_heads, -1, plain.head_dim]
    model.reshape({"ids": [work.batch, -1], **dict.fromkeys(pairs, shape)})
    apply_make_stateful_transformation(model, pairs)
    return model


def _quantised(model: Any, work: ModelWork) -> Any:
    import nncf

    if work.kind != "encoder":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    generator = torch.Generator().manual_seed(3)
    words = int(work.model.config.vocab_size)
    batches = [torch.randint(1, words, work.ids.shape, generator=generator) for _ in range(_CALIBRATION)]
    mask = work.padding_mask
    given = [[ids.numpy()] if mask is None else [ids.numpy(), mask.numpy()] for ids in batches]
    return nncf.quantize(model, nncf.Dataset(given), model_type=nncf.ModelType.TRANSFORMER, subset_size=_CALIBRATION)


def _encoder(request: Any, work: ModelWork) -> Call:
    given = [work.ids.numpy()] if work.padding_mask is None else [work.ids.numpy(), work.padding_mask.numpy()]

    def call() -> Groups:
        request.infer(given, share_inputs=True)
        return ((_output(request),),)

    return call


def _output(request: Any) -> Tensor:
    return torch.from_numpy(numpy.array(request.get_output_tensor(0).data))


def _prefill(request: Any, work: ModelWork) -> Call:
    ids = work.ids.contiguous().numpy()

    def call() -> Groups:
        request.reset_state()
        request.infer([ids], share_inputs=True)
        return ((_output(request),),)

    return call


def _decoding(request: Any, work: ModelWork) -> Call:
    prompt = work.ids[:, : work.length].contiguous().numpy()
    tokens = [work.ids[:, place : place + 1].contiguous().numpy() for place in range(work.length, work.ids.shape[1])]

    def start() -> Iterator[Any]:
        request.reset_state()
        request.infer([prompt], share_inputs=True)
        return iter(tokens)

    rest = start()

    def call() -> Groups:
        nonlocal rest
        token = next(rest, None)
        if token is None:
            rest = start()
            token = next(rest)
        request.infer([token], share_inputs=True)
        return ((_output(request)[:, -1],),)

    return call
