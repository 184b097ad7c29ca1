"""Make existing models faster: torch's own modules and a Hugging Face model, swapped in place, checked and timed.

    python examples/faster.py
    python examples/faster.py --quick     # smaller models

Needs torch; the part about BERT also needs the extra ``hf`` (``pip install "clearhead[hf]"``). Weights are random:
speed and agreement do not depend on them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch


def torch_encoder(width: int) -> nn.Module:
    """A plain encoder of torch, in eval mode."""
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False).eval()


def bert(width: int) -> Any:
    """A BERT of this width, with the structure of the released models and random weights."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=width, num_attention_heads=8, intermediate_size=4 * width, num_hidden_layers=4, vocab_size=1000
    )
    return BertModel(config).eval()


def padded_batch(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Token ids, and which of them are real: sequences fill from a half to all of ``length``."""
    lengths = torch.linspace(length // 2, length, batch).long()
    real = torch.arange(length) < lengths[:, None]
    return torch.randint(0, 1000, (batch, length)) * real, real


@torch.no_grad()
def compare(model: nn.Module, run: Callable[[], Tensor], real: Tensor) -> None:
    """Swap a model, compare outputs at the real tokens, time both forms, and restore the model."""
    before = run()
    print(ch.swap(model))
    output = run()
    difference = (before - output)[real].abs().max() / before[real].abs().max()
    print(f"largest difference at real tokens  {difference:.1e} of the largest output")
    slow, fast = [], []
    for _ in range(3):
        ch.unswap(model)
        slow.append(milliseconds(run))
        ch.swap(model)
        fast.append(milliseconds(run))
    ch.unswap(model)
    assert torch.equal(before, run()), "unswap restores the original computation"
    old, new = statistics.median(slow), statistics.median(fast)
    print(f"median time  {old:.1f} ms before, {new:.1f} ms swapped: {old / new:.2f} times as fast")


def milliseconds(run: Callable[[], Tensor]) -> float:
    """The shortest of three wall-clock times of a call."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


class GatedAttention(nn.MultiheadAttention):
    """A subclass with a learned gate: ``swap`` cannot know what it computes."""

    def __init__(self, embed_dim: int, num_heads: int) -> None:
        super().__init__(embed_dim, num_heads, batch_first=True)
        self.gate = nn.Parameter(torch.ones(embed_dim))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, weights = super().forward(*args, **kwargs)
        return output * self.gate, weights


class AttentionPool(nn.Module):
    """An attention written by hand."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(embed_dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights: Tensor = self.score(x).softmax(dim=1)
        return (weights * x).sum(dim=1)


def left_alone() -> None:
    """What ``swap`` leaves, and why."""
    model = nn.ModuleDict(
        {
            "plain": nn.MultiheadAttention(64, 4, batch_first=True),
            "gated": GatedAttention(64, 4),
            "pool": AttentionPool(64),
        }
    )
    report = ch.swap(model)
    print(report)
    for row in report.left:
        print(f"{row.path}: {row.reason}")


def linear_layers(width: int) -> None:
    """Plain linear layers are swapped in any model, here one without attention."""
    model = nn.Sequential(
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
        nn.LayerNorm(width),
        nn.Linear(width, width),
    )
    x = torch.randn(64, width)
    before = model(x)
    print(ch.swap(model))
    difference = (before - model(x)).abs().max() / before.abs().max()
    print(f"largest difference  {difference:.1e} of the largest output")


def quantised(width: int) -> None:
    """Quantise first, then swap: linear layers stay int8, all of it runs in the kernels."""
    model, x = torch_encoder(width), torch.randn(2, 64, width)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization announces its move to torchao
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    with torch.no_grad():
        # torch's fast path cannot run quantised layers.
        torch.backends.mha.set_fastpath_enabled(False)
        before = model(x)
        torch.backends.mha.set_fastpath_enabled(True)
        print(ch.swap(model))
        difference = (before - model(x)).abs().max() / before.abs().max()
    print(f"linear1 is {model.get_submodule('layers.0.linear1')}")
    print(f"largest difference to the quantised model  {difference:.1e} of the largest output")


@torch.no_grad()
def frozen(width: int) -> None:
    """Decode with all layers as one operator: the same tokens, sooner."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 8, "num_attention_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1000, pad_token_id=0)).eval()
    prompt = torch.randint(1, 1000, (1, 16))

    def generate() -> Tensor:
        tokens: Tensor = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False
        )
        return tokens

    ch.swap(model)
    swapped, before = milliseconds(generate), generate()
    print(ch.freeze(model))
    assert torch.equal(generate(), before), "freezing changes no bit"
    print(f"32 tokens  {swapped:.0f} ms swapped, {milliseconds(generate):.0f} ms frozen")
    ch.unfreeze(model)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make existing models faster with ch.swap.")
    parser.add_argument("--quick", action="store_true", help="small models")
    width, length = (128, 64) if parser.parse_args().quick else (512, 128)
    torch.manual_seed(0)
    ids, real = padded_batch(8, length)

    print("torch.nn.TransformerEncoder, a padded batch")
    encoder, x = torch_encoder(width), torch.randn(8, length, width)
    compare(encoder, lambda: encoder(x, src_key_padding_mask=~real), real)

    print("\ntransformers.BertModel, the same padding")
    if find_spec("transformers") is None:
        print("skipped: needs the extra 'hf': pip install 'clearhead[hf]'")
    else:
        model = bert(width)
        compare(model, lambda: model(input_ids=ids, attention_mask=real.long()).last_hidden_state, real)

    print("\nwhat is left, and why")
    left_alone()
    print("\nlinear layers of a model without attention")
    linear_layers(width)
    print("\nquantised first")
    quantised(width)
    print("\nfrozen for inference")
    if find_spec("transformers") is not None:
        frozen(width // 4)


if __name__ == "__main__":
    main()
