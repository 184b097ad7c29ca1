"""llama.cpp, by llama-cpp-python: a Llama model written as GGUF, with tokens that are decoded after a cached prompt."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from weakref import finalize

import numpy
import torch
from torch import Tensor

from clearhead.benchmark.model_peers.peer import CannotRunError
from clearhead.benchmark.model_peers.work import ModelWork
from clearhead.benchmark.peers import Call, Groups

__all__ = ["llama_cpp_call", "write_gguf"]

#: The type of the matrices, and of cached keys and values, by the format of the weights.
_TYPES: Final = {
    "float32": ("F32", "F32"),
    "bfloat16": ("BF16", "BF16"),
    "q8_0": ("Q8_0", "F16"),
    "q4_0": ("Q4_0", "F16"),
}
_NAMES: Final = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama_cpp_call(work: ModelWork, number_format: str) -> Call:
    """The call that computes a prompt's logits, or the logits of the next token of each sequence."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(work.model, path, _TYPES[number_format][0])
        context = _Context(path, work, _TYPES[number_format][1])
    return _prefill(context, work) if work.kind == "prefill" else _decoding(context, work)


def write_gguf(model: Any, path: Path, matrix_type: str) -> None:
    """Write a ``LlamaForCausalLM`` without a tokenizer; vectors stay in float32.

    Args:
        model: the model of transformers.
        path: the file.
        matrix_type: a name of ``gguf.GGMLQuantizationType``.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("none")
    wanted = gguf.GGMLQuantizationType[matrix_type]
    for name, tensor in _tensors(model):
        kind = wanted if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        array = tensor.detach().contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    config = model.config
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    yield "token_embd.weight", model.model.embed_tokens.weight
    yield "output_norm.weight", model.model.norm.weight
    yield "output.weight", model.lm_head.weight
    for number, layer in enumerate(model.model.layers):
        for module, name in _NAMES.items():
            weight = layer.get_submodule(module).weight
            yield f"blk.{number}.{name}.weight", _pairs(weight, heads[name]) if name in heads else weight


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows reordered from transformers' halves of a head to llama.cpp's neighbours, which RoPE rotates together."""
    pairs: Tensor = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2)
    return pairs.reshape(weight.shape)


class _Context:
    """A loaded model with its cache, and the batch of tokens that is decoded."""

    def __init__(self, path: Path, work: ModelWork, cache_type: str) -> None:
        import gguf
        import llama_cpp

        llama_cpp.llama_log_set(_SILENT, None)
        options = llama_cpp.llama_model_default_params()
        options.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise CannotRunError("llama.cpp could not load the model")
        self.words = int(work.model.config.vocab_size)
        tokens = work.batch * work.ids.shape[1]
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = tokens, work.batch
        settings.n_batch = settings.n_ubatch = work.batch * work.length
        settings.n_threads = settings.n_threads_batch = torch.get_num_threads()
        if cache_type == "F32":
            # Its flash attention rounds to float16.
            settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.type_k = settings.type_v = int(gguf.GGMLQuantizationType[cache_type])
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        if not self.context:
            raise CannotRunError("llama.cpp could not make a context")
        self.batch = llama_cpp.llama_batch_init(tokens, 0, 1)
        self.memory = llama_cpp.llama_get_memory(self.context)
        finalize(self, _free, self.batch, self.context, self.model)

    def decode(self, ids: Tensor, place: int, *, logits: bool = True) -> None:
        """Run tokens ``[batch, count]`` that begin at a position.

        Raises:
            CannotRunError: llama.cpp reports an error.
        """
        import llama_cpp

        batch, rows = self.batch, ids.tolist()
        batch.n_tokens = sum(map(len, rows))
        count = 0
        for sequence, row in enumerate(rows):
            for offset, token in enumerate(row):
                batch.token[count], batch.pos[count] = token, place + offset
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = logits
                count += 1
        code = llama_cpp.llama_decode(self.context, batch)
        if code:
            raise CannotRunError(f"llama_decode returned {code}")

    def logits(self, count: int) -> Tensor:
        """The logits ``[count, vocab]`` of the last call."""
        import llama_cpp

        pointer = llama_cpp.llama_get_logits(self.context)
        return torch.from_numpy(numpy.ctypeslib.as_array(pointer, shape=(count, self.words)).copy())

    def clear(self) -> None:
        """Empty the cache."""
        import llama_cpp

        llama_cpp.llama_memory_clear(self.memory, False)


def _free(batch: Any, context: Any, model: Any) -> None:
    import llama_cpp

    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


# llama.cpp calls it for every line of its log.
_SILENT: Final = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *line: None)


def _prefill(context: _Context, work: ModelWork) -> Call:
    def call() -> Groups:
        context.clear()
        context.decode(work.ids, 0)
        return ((context.logits(work.ids.numel()).unflatten(0, work.ids.shape),),)

    return call


def _decoding(context: _Context, work: ModelWork) -> Call:
    place = work.ids.shape[1]

    def call() -> Groups:
        nonlocal place
        if place == work.ids.shape[1]:
            place = work.length
            context.clear()
            context.decode(work.ids[:, :place], 0, logits=False)
        context.decode(work.ids[:, place : place + 1], place)
        place += 1
        return ((context.logits(work.batch),),)

    return call
