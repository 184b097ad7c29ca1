"""The peers of each kind of row, as data: one entry a library and format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from clearhead.benchmark.model_peers.ctranslate2_models import ctranslate2_call
from clearhead.benchmark.model_peers.llama_cpp_models import llama_cpp_call
from clearhead.benchmark.model_peers.onnx_models import onnx_call
from clearhead.benchmark.model_peers.openvino_models import openvino_call
from clearhead.benchmark.model_peers.peer import Peer
from clearhead.benchmark.model_peers.torch_models import (
    clearhead_call,
    clearhead_integers_call,
    compiled_call,
    sdpa_call,
    torchao_dynamic_call,
    torchao_weights_call,
    zen_call,
)
from clearhead.benchmark.peers import OURS

__all__ = ["INT4", "INT8", "PEERS", "TORCH_THREADS", "peers_of"]

#: clearhead's contenders with integers for weights.
INT8: Final = f"{OURS} int8"
INT4: Final = f"{OURS} int4"
TORCH_THREADS: Final = "torch's OpenMP threads: after a call they spin, unless OMP_WAIT_POLICY=passive"
_FLOATS: Final = ("float32", "bfloat16")
_INFERENCE: Final[Mapping[str, str]] = {"training": "runs inference only"}
_NO_BFLOAT16: Final = {
    **_INFERENCE,
    **dict.fromkeys(("encoder", "prefill", "token"), "has no bfloat16 kernels for these operators on CPUs"),
}
_NO_ENCODER: Final = {**_INFERENCE, "encoder": "measured on decoders only"}
_ONNX: Final = {
    "build": onnx_call,
    "modules": ("onnx", "onnxruntime"),
    "threads": "intra_op_num_threads",
    "spinning": "off: session.intra_op.allow_spinning=0",
}
_OPENVINO: Final = {
    "build": openvino_call,
    "excuses": _INFERENCE,
    "threads": "INFERENCE_NUM_THREADS, one stream",
    "spinning": "its threads (TBB) look for work briefly before they sleep; no setting",
}
_CTRANSLATE2: Final = {
    "build": ctranslate2_call,
    "modules": ("ctranslate2",),
    "excuses": _INFERENCE,
    "threads": "intra_threads, inter_threads=1",
    "spinning": "OpenMP threads of its own: after a call they spin, unless OMP_WAIT_POLICY=passive",
}
_LLAMA_CPP: Final = {
    "build": llama_cpp_call,
    "modules": ("gguf", "llama_cpp"),
    "excuses": _NO_ENCODER,
    "threads": "n_threads, n_threads_batch",
    "spinning": "OpenMP threads: after a call they spin, unless OMP_WAIT_POLICY=passive",
}
_TORCH: Final = {"spinning": TORCH_THREADS}
# zentorch exports symbols that CTranslate2 looks up too, which computes garbage if it is loaded after it.
_ZENTORCH: Final = {**_TORCH, "modules": ("zentorch",), "excuses": _INFERENCE, "loaded_last": True}
_TORCHAO: Final = {**_TORCH, "modules": ("torchao",), "excuses": {"training": "its integer weights do not learn"}}

_FOUR_BITS: Final = {**_TORCHAO, "excuses": {**_NO_ENCODER, "training": "its integer weights do not learn"}}


def _float_peers(dtype: str) -> tuple[Peer, ...]:
    return tuple(
        Peer(rows=dtype, number_format=dtype, **fields)  # type: ignore[arg-type]
        for fields in (
            {"name": OURS, "build": clearhead_call, **_TORCH},
            {"name": "torch sdpa", "build": sdpa_call, **_TORCH},
            {"name": "torch.compile", "build": compiled_call, **_TORCH},
            {"name": "zentorch", "build": zen_call, **_ZENTORCH},
            {"name": "ONNX Runtime", "excuses": _INFERENCE if dtype == "float32" else _NO_BFLOAT16, **_ONNX},
            {"name": "OpenVINO", "modules": ("openvino",), **_OPENVINO},
            {"name": "CTranslate2", **_CTRANSLATE2},
            {"name": "llama.cpp", **_LLAMA_CPP},
        )
    )


def _int8_peers() -> tuple[Peer, ...]:
    return tuple(
        Peer(rows="int8", **fields)  # type: ignore[arg-type]
        for fields in (
            {"name": OURS, "number_format": "bfloat16", "build": clearhead_call, **_TORCH},
            {"name": INT8, "number_format": "int8", "build": clearhead_integers_call, **_TORCHAO},
            {"name": INT4, "number_format": "int4", "build": clearhead_integers_call, **_FOUR_BITS},
            {"name": "torchao weights", "number_format": "int8", "build": torchao_weights_call, **_TORCHAO},
            {"name": "torchao dynamic", "number_format": "int8", "build": torchao_dynamic_call, **_TORCHAO},
            {"name": "ONNX Runtime", "number_format": "int8", "excuses": _INFERENCE, **_ONNX},
            {"name": "OpenVINO", "number_format": "int8", "modules": ("openvino", "nncf"), **_OPENVINO},
            {"name": "CTranslate2", "number_format": "int8", **_CTRANSLATE2},
            {"name": "llama.cpp q8_0", "number_format": "q8_0", **_LLAMA_CPP},
            {"name": "llama.cpp q4_0", "number_format": "q4_0", **_LLAMA_CPP},
        )
    )


PEERS: Final[tuple[Peer, ...]] = (*(peer for dtype in _FLOATS for peer in _float_peers(dtype)), *_int8_peers())
"""All peers; clearhead is the first of each kind of row, in int8 rows in bfloat16 and in int8."""


def peers_of(rows: str) -> tuple[Peer, ...]:
    """The peers of the rows in ``"float32"``, ``"bfloat16"`` or ``"int8"``."""
    return tuple(peer for peer in PEERS if peer.rows == rows)
