"""Quantise a language model with torchao, run it on clearhead's kernels, and see the error of each layer.

    python examples/int8_int4.py
    python examples/int8_int4.py --quick     # a smaller model

Needs the extras ``hf`` and ``quantized`` (transformers and torchao). Weights are random: agreement and speed do not
depend on them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch


def language_model(width: int) -> nn.Module:
    """A Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, vocab_size=1000)).eval()
    return model


def configs() -> dict[str, Any]:
    """Three configs of torchao: what is rounded, and to how many bits."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    return {
        "int8 weights": Int8WeightOnlyConfig(),
        "int8 weights and activations": Int8DynamicActivationInt8WeightConfig(),
        "int4 weights in groups": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    }


def quantised(model: nn.Module, config: Any) -> nn.Module:
    """A copy whose linear layers torchao quantised, but for the head."""
    from torchao.quantization import quantize_

    copied = copy.deepcopy(model)
    quantize_(copied, config, filter_fn=lambda part, name: isinstance(part, nn.Linear) and name != "lm_head")
    return copied


@torch.no_grad()
def run(model: nn.Module, ids: Tensor) -> None:
    """Swap a quantised model: the same logits, sooner."""
    before, theirs = model(ids).logits, milliseconds(lambda: model(ids))
    print(ch.swap(model))
    difference = (model(ids).logits - before).norm() / before.norm()
    print(f"difference to torchao  {difference:.1e}")
    print(f"{ids.shape[1]} tokens  {theirs:.1f} ms by torchao, {milliseconds(lambda: model(ids)):.1f} ms swapped")


def errors(model: nn.Module, reference: nn.Module, ids: Tensor) -> None:
    """What quantising cost, layer by layer, on the inputs that the float model's layers get."""
    report = ch.verify_model(model, reference, inputs=ids)
    print("\n".join(str(report).splitlines()[:3]))
    print(f"logits differ by {report.output:.1e} from those of the float model")


def milliseconds(call: Callable[[], object]) -> float:
    """The median of five calls."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Quantise in three ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    width = 128 if parser.parse_args().quick else 512
    missing = [name for name in ("transformers", "torchao") if find_spec(name) is None]
    if missing:
        print(f"skipped: {' and '.join(missing)} is not installed; install the extras hf and quantized")
        return
    warnings.simplefilter("ignore")
    reference, ids = language_model(width), torch.randint(0, 1000, (1, 16))
    for name, config in configs().items():
        print(f"\n{name}")
        model = quantised(reference, config)
        run(model, ids)
        errors(model, reference, ids)


if __name__ == "__main__":
    main()
