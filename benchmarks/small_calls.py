"""Processor time of small calls, optionally interleaved with another version of clearhead.

    python benchmarks/small_calls.py                         this version alone
    python benchmarks/small_calls.py --against CHECKOUT      interleaved with the built version in another checkout

One thread, float32, no gradients. A round is a process for each version; a figure is the median of rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
#: Imports clearhead from a checkout, even if another one is installed as editable.
PROGRAM = """
import runpy, sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "clearhead" not in type(finder).__module__]
sys.path.insert(0, sys.argv[1])
sys.argv = [sys.argv[2], "--once"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def calls() -> dict[str, Callable[[], Any]]:
    """The calls, by name."""
    import clearhead as ch

    x, head = torch.randn(1, 8, 32), torch.randn(1, 1, 8, 8)
    modules = {
        "MultiHeadAttention(32, 2), 8 tokens": ch.nn.MultiHeadAttention(32, 2),
        "EncoderBlock(32, 2), 8 tokens": ch.nn.EncoderBlock(32, 2),
        "Encoder(32, 2, 8), 8 tokens": ch.nn.Encoder(32, 2, 8),
    }
    calls_by_name: dict[str, Callable[[], Any]] = {name: partial(module.eval(), x) for name, module in modules.items()}
    swap = getattr(ch, "swap", None) or ch.bridges.swap
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    stack = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    swap(stack)
    calls_by_name["swapped nn.TransformerEncoderLayer(32, 2, 64), 8 tokens"] = lambda: stack.layers[0](x)
    calls_by_name["Decoder(128, 4, 8), a token"] = decoding(ch, 128, 4, 8)
    if importlib.util.find_spec("transformers"):
        calls_by_name["swapped Llama, 3 layers of 64, 8 tokens"] = llama(swap)
    calls_by_name["attention, 1x1x8x8"] = lambda: ch.attention(head, head, head)
    calls_by_name["torch's scaled_dot_product_attention, 1x1x8x8"] = lambda: nn.functional.scaled_dot_product_attention(
        head, head, head
    )
    return calls_by_name


def decoding(ch: Any, width: int, heads: int, layers: int) -> Callable[[], Tensor]:
    """A decoding step with fewer than 128 cached tokens."""
    module, x = ch.nn.Decoder(width, heads, layers).eval(), torch.randn(1, 1, width)
    cache = module.new_cache()

    def call() -> Tensor:
        if cache.length == 127:
            cache.truncate(8)
        output: Tensor = module(x, cache=cache)
        return output

    return call


def llama(swap: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    """A model of transformers with random weights."""
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaModel(LlamaConfig(vocab_size=100, num_hidden_layers=3, **sizes)).eval()
    swap(model)
    tokens = torch.randint(0, 100, (1, 8))
    return lambda: model(tokens, use_cache=False)


def microseconds(call: Callable[[], Any], seconds: float = 0.4, parts: int = 8) -> float:
    """Processor time of a call: the fastest of several parts."""
    for _ in range(30):
        call()
    start = time.process_time()
    call()
    count = max(1, int(seconds / parts / max(time.process_time() - start, 1e-6)))
    fastest = float("inf")
    for _ in range(parts):
        start = time.process_time()
        for _ in range(count):
            call()
        fastest = min(fastest, (time.process_time() - start) / count)
    return fastest * 1e6


def measure_once() -> dict[str, float]:
    """The time of each call, in µs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        return {name: microseconds(call) for name, call in calls().items()}


def measured(checkout: Path) -> dict[str, float]:
    """The times of the version in a checkout, in a separate process."""
    command = [sys.executable, "-c", PROGRAM, str(checkout / "src"), str(Path(__file__).resolve())]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, whose kernels are built")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each version (default: 5)")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure_once()))
        return
    if options.against is not None and not (options.against / "src" / "clearhead").is_dir():
        parser.error(f"--against must be a checkout of clearhead; got {options.against}")
    checkouts = [ROOT, *([] if options.against is None else [options.against.resolve()])]
    rounds = []
    for place in range(options.rounds):
        rounds.append([measured(checkout) for checkout in checkouts])
        print(f"round {place + 1} of {options.rounds}", file=sys.stderr)
    print(f"torch {torch.__version__}, 1 thread, processor time of a call in us, median of {options.rounds} rounds\n")
    print("| call | this |" + (" other | difference |" if len(checkouts) > 1 else ""))
    print("|---|---|" + ("---|---|" if len(checkouts) > 1 else ""))
    for name in rounds[0][0]:
        medians = [statistics.median(each[place][name] for each in rounds) for place in range(len(checkouts))]
        difference = [f"{medians[0] - medians[1]:+.0f}"] if len(medians) > 1 else []
        print("| " + " | ".join([name, *(f"{median:.0f}" for median in medians), *difference]) + " |")


if __name__ == "__main__":
    main()
