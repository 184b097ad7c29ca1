"""Where the time of a token goes in a small frozen model of transformers: what it costs beside its weights.

    python benchmarks/token_parts.py
    python benchmarks/token_parts.py --width 1024 --threads 2
    python benchmarks/token_parts.py --width 1024 --threads 2 --weights int8 --batch 8

A Llama of 8 layers with random weights decodes with a cache. Each part is timed where it runs, within the token: in a
loop of its own the same code takes less time, since its instructions stay in the processor's caches. Last comes how
fast the operator reads the layers' weights, norms and attention included, beside a plain read of as many bytes, which
alternates with tokens: the fastest of torch's sum and largest element. Weights in int8 are torchao's, with bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

import clearhead as ch
from clearhead.integrations.transformers import stack
from clearhead.integrations.transformers.calls import cache_argument
from clearhead.nn import fused

PROMPT, WARM, TOKENS, LAYERS = 8, 50, 400, 8
MICRO = 1e6
#: Bytes of an element of a weight.
SIZES = {"float32": 4, "bfloat16": 2, "int8": 1}


def frozen(width: int, weights: str = "float32") -> LlamaForCausalLM:
    """A swapped and frozen Llama, with weights in one of ``SIZES``."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).eval()
    if weights != "float32":
        model = model.bfloat16()
    if weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(model, Int8WeightOnlyConfig())
    ch.swap(model)
    ch.freeze(model)
    return model


def timed(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """The function; its times are appended to a list."""

    def call(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        result = function(*arguments, **options)
        seconds.append(time.perf_counter() - start)
        return result

    return call


def decode(
    model: LlamaForCausalLM, batch: int = 1, tokens: int = TOKENS, meanwhile: Callable[[], object] = lambda: None
) -> float:
    """The median time of so many tokens in microseconds; ``meanwhile`` is called after each."""
    cache, ids = DynamicCache(config=model.config), torch.arange(1, PROMPT + 1).expand(batch, PROMPT)
    given = cache_argument(model, cache)
    model(ids, **given)
    seconds: list[float] = []
    step = timed(model.forward, seconds)
    for _ in range(WARM + tokens):
        step(ids[:, :1], **given)
        meanwhile()
    return statistics.median(seconds[WARM:]) * MICRO


def watch(model: LlamaForCausalLM) -> dict[str, list[float]]:
    """Time the parts of a token from now on."""
    seconds: dict[str, list[float]] = defaultdict(list)
    body = model.model
    modules: dict[str, nn.Module] = {
        "embedding": body.embed_tokens,
        "cosines and sines of positions": body.rotary_emb,
        "last norm": body.norm,
        "head": model.lm_head,
    }
    for name, module in modules.items():
        module.forward = timed(module.forward, seconds[name])  # type: ignore[method-assign]
    modeling_llama.create_causal_mask = timed(modeling_llama.create_causal_mask, seconds["mask"])
    stack.output_of_layers = timed(stack.output_of_layers, seconds["layers"])
    fused.run_blocks = timed(fused.run_blocks, seconds["the operator"])
    return seconds


def pace_of_operator(model: LlamaForCausalLM, batch: int, seconds: list[float], weights: str) -> str:
    """How fast the operator, whose times are appended to ``seconds``, reads the layers' weights."""
    layers = model.model.layers
    size = sum(layer.weight.numel() for layer in layers.modules() if isinstance(layer, nn.Linear)) * SIZES[weights]
    same = torch.ones(size // 4, dtype=torch.int32)
    reads: list[list[float]] = [[], []]
    plain = [timed(same.sum, reads[0]), timed(same.amax, reads[1])]
    seconds.clear()
    decode(model, batch, TOKENS // 8, lambda: [read() for read in plain])
    read = min(map(statistics.median, reads))
    operator = statistics.median(seconds[1 + WARM :])
    return (
        f"The operator reads {size / 1e6:.0f} MB of weights at {size / operator / 1e9:.1f} GB/s, "
        f"{read / operator:.2f} of a plain read's {size / read / 1e9:.1f}."
    )


def operator_alone(model: LlamaForCausalLM, batch: int) -> float:
    """The operator's time in a loop of its own, in microseconds."""
    calls: list[tuple[Any, ...]] = []
    run = fused.run_blocks

    def recorded(*arguments: Any) -> Tensor:
        calls.append(arguments)
        return run(*arguments)

    fused.run_blocks = recorded  # type: ignore[assignment]
    cache, ids = DynamicCache(config=model.config), torch.arange(1, PROMPT + 1).expand(batch, PROMPT)
    for tokens in (ids, ids[:, :1]):
        model(tokens, **cache_argument(model, cache))
    fused.run_blocks = run
    seconds: list[float] = []
    step = timed(run, seconds)
    for _ in range(WARM + TOKENS):
        step(*calls[-1])
    return statistics.median(seconds[WARM:]) * MICRO


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: %(default)s)")
    parser.add_argument(
        "--weights", choices=SIZES, default="float32", help="how they are stored (default: %(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = frozen(options.width, options.weights)
    decode(model, options.batch)
    whole, alone = decode(model, options.batch), operator_alone(model, options.batch)
    seconds = watch(model)
    decode(model, options.batch)
    parts = {name: statistics.median(times[WARM:]) * MICRO for name, times in seconds.items()}
    operator, layers = parts.pop("the operator"), parts.pop("layers")
    parts["layers, in Python"] = layers - operator
    parts["layers, the operator"] = operator
    print(
        f"torch {torch.__version__}, {options.threads} thread(s), {LAYERS} layers {options.width} wide, "
        f"{options.weights}, batch {options.batch}, medians\n"
    )
    print("| part of a token | us |\n|---|---|")
    for name, part in parts.items():
        print(f"| {name} | {part:.0f} |")
    print(f"| the rest of transformers' code | {whole - sum(parts.values()):.0f} |")
    print(f"| all | {whole:.0f} |\n\nThe operator takes {alone:.0f} us in a loop of its own.")
    print(pace_of_operator(model, options.batch, seconds["the operator"], options.weights))


if __name__ == "__main__":
    main()
