"""Times models of other libraries as they are and swapped, and compares outputs and gradients.

    python benchmarks/swapped_models.py                                  all that can be imported, one and two threads
    python benchmarks/swapped_models.py --only timm --threads 1 --rounds 9
    python benchmarks/swapped_models.py --quick                          narrow models of one or two layers

Weights and inputs are random, nothing is downloaded. Calls are float32: one without gradients in eval mode, and a
forward and backward pass in training mode without dropout. The two forms alternate, and a figure is the median of
rounds, in milliseconds of wall-clock time (``--process-time``: of processor time, for a machine with other work).
Before the timing, outputs and gradients are compared, relative to the largest element. A library that cannot be
imported is named with the reason.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch

Call = tuple[nn.Module, tuple[Tensor, ...]]
BATCH = 8


def _images(model: nn.Module, batch: int, size: int) -> Call:
    return model, (torch.randn(batch, 3, size, size),)


def _ids(model: nn.Module, batch: int, length: int, vocabulary: int) -> Call:
    return model, (torch.randint(2, vocabulary, (batch, length)),)


def timm(name: str, small: dict[str, Any], quick: bool, batch: int) -> Call:
    import timm as library

    size = small.get("img_size", 224) if quick else 224
    return _images(library.create_model(name, num_classes=10, **(small if quick else {})), batch, size)


def torchvision_swin(quick: bool, batch: int) -> Call:
    import torchvision

    if not quick:
        return _images(torchvision.models.swin_t(weights=None), batch, 224)
    return _images(torchvision.models.SwinTransformer([4, 4], 96, [2], [3], [7, 7], num_classes=10), batch, 56)


def open_clip_tower(quick: bool, batch: int) -> Call:
    from open_clip.transformer import VisionTransformer

    size, width, layers = (64, 128, 1) if quick else (224, 768, 12)
    model = VisionTransformer(
        image_size=size, patch_size=16, width=width, layers=layers, heads=width // 64, mlp_ratio=4.0, output_dim=width
    )
    return _images(model, batch, size)


def x_transformers(quick: bool, batch: int) -> Call:
    from x_transformers import Decoder, TransformerWrapper

    width, depth, length = (128, 1, 48) if quick else (512, 6, 512)
    layers = Decoder(dim=width, depth=depth, heads=width // 64)
    return _ids(TransformerWrapper(num_tokens=1000, max_seq_len=length, attn_layers=layers), batch, length, 1000)


def vit_pytorch(quick: bool, batch: int) -> Call:
    from vit_pytorch import ViT

    size, width, depth = (64, 128, 1) if quick else (224, 384, 12)
    model = ViT(
        image_size=size, patch_size=16, num_classes=10, dim=width, depth=depth, heads=width // 64, mlp_dim=4 * width
    )
    return _images(model, batch, size)


def litgpt(quick: bool, batch: int) -> Call:
    from litgpt import GPT, Config

    width, layers, length = (128, 1, 48) if quick else (768, 12, 256)
    config = Config(
        block_size=length, vocab_size=1000, padded_vocab_size=1024, n_layer=layers, n_head=width // 64, n_embd=width
    )
    return _ids(GPT(config), batch, length, 1000)


def torchtune(quick: bool, batch: int) -> Call:
    from torchtune.models.llama3 import llama3

    width, layers, length = (128, 1, 48) if quick else (768, 12, 256)
    model = llama3(
        vocab_size=1000, num_layers=layers, num_heads=width // 64, num_kv_heads=width // 64, embed_dim=width,
        max_seq_len=length,
    )  # fmt: skip
    return _ids(model, batch, length, 1000)


def _of_transformers(cls: str, layers: int, quick: bool, batch: int, **settings: Any) -> Call:
    import transformers

    width, layers, length = (128, 1, 48) if quick else (768, layers, 128)
    config = getattr(transformers, cls.replace("Model", "Config"))(
        vocab_size=1000, hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 64,
        intermediate_size=4 * width, **settings,
    )  # fmt: skip
    return _ids(getattr(transformers, cls)(config), batch, length, 1000)


def mpnet(quick: bool, batch: int) -> Call:
    return _of_transformers("MPNetModel", 12, quick, batch)


def deberta_v3(layers: int, quick: bool, batch: int) -> Call:
    return _of_transformers(
        "DebertaV2Model", layers, quick, batch, relative_attention=True, position_buckets=256, share_att_key=True,
        norm_rel_ebd="layer_norm", pos_att_type=["p2c", "c2p"], position_biased_input=False, type_vocab_size=0,
    )  # fmt: skip


_VIT = {"img_size": 64, "embed_dim": 128, "depth": 1, "num_heads": 2}
_SWIN = {"img_size": 56, "embed_dim": 96, "depths": (1,), "num_heads": (3,)}
#: A function of (quick, batch) for each model.
MODELS: dict[str, Callable[[bool, int], Call]] = {
    "timm ViT-S": partial(timm, "vit_small_patch16_224", _VIT),
    "timm ViT-B": partial(timm, "vit_base_patch16_224", _VIT),
    "timm Swin-T": partial(timm, "swin_tiny_patch4_window7_224", _SWIN),
    "torchvision Swin-T": torchvision_swin,
    "open_clip vision tower": open_clip_tower,
    "x-transformers decoder": x_transformers,
    "vit-pytorch ViT": vit_pytorch,
    "litgpt GPT": litgpt,
    "torchtune Llama": torchtune,
    "MPNet base": mpnet,
    "DeBERTa-v3 small": partial(deberta_v3, 6),
    "DeBERTa-v3 base": partial(deberta_v3, 12),
}


def output_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """The first tensor that a model returns."""
    output: Any = model(*inputs)
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, (tuple, list)) else output.last_hidden_state


def without_dropout(model: nn.Module) -> nn.Module:
    """The model, in which nothing is dropped in training mode, neither elements nor whole layers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout) or type(module).__name__ in ("DropPath", "StochasticDepth"):
            vars(module).update({name: 0.0 for name in ("p", "drop_prob") if name in vars(module)})
    return model


def gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    """Gradients of the learned parameters."""
    output = output_of(model, inputs)
    arriving = torch.linspace(-1, 1, output.numel()).view_as(output).to(output.dtype)
    learned = [part for part in model.parameters() if part.requires_grad]
    return list(torch.autograd.grad(output, learned, arriving, allow_unused=True))


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Relative to the largest element."""
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-12))


def compare(theirs: nn.Module, ours: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """The largest differences of outputs and of gradients, relative to the largest element of all gradients."""
    with torch.no_grad():
        output = largest_difference(*(output_of(each, inputs) for each in (theirs, ours)))
    pairs = [
        (one, other)
        for one, other in zip(*(gradients(each, inputs) for each in (theirs, ours)), strict=True)
        if one is not None and other is not None
    ]
    size = max(float(one.abs().max()) for one, _ in pairs)
    return output, max(float((one - other).abs().max()) for one, other in pairs) / size


def medians(calls: list[Callable[[], object]], rounds: int, clock: Callable[[], float]) -> list[float]:
    """Milliseconds of calls that alternate."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for place, call in enumerate(calls):
            start = clock()
            call()
            times[place].append(1e3 * (clock() - start))
    return [statistics.median(each) for each in times]


def without_gradients(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """One call in inference."""
    with torch.no_grad():
        output_of(model, inputs)


def line(name: str, options: argparse.Namespace) -> str:
    """A row of the table."""
    torch.manual_seed(0)
    model, inputs = MODELS[name](options.quick, options.batch)
    theirs = without_dropout(model).eval()
    ours = copy.deepcopy(theirs)
    swapped = len([row for row in ch.swap(ours).replaced if row.class_name == "Linear"])
    output, gradient = compare(theirs, ours, inputs)
    clock = time.process_time if options.process_time else time.perf_counter
    cells = [name, str(torch.get_num_threads()), str(swapped), f"{output:.0e}", f"{gradient:.0e}"]
    for call in (without_gradients, gradients):
        for each in (theirs, ours):
            each.train(call is gradients)
        before, after = medians([partial(call, each, inputs) for each in (theirs, ours)], options.rounds, clock)
        cells += [f"{before:.0f}", f"{after:.0f}", f"{before / after:.2f}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--process-time", action="store_true", help="time of the processor, not of the clock")
    parser.add_argument("--quick", action="store_true", help="small models")
    options = parser.parse_args()
    clock = "processor" if options.process_time else "wall-clock"
    print(f"torch {torch.__version__}, {ch.__name__} {ch.__version__}, {platform.machine()}, batch {options.batch},")
    print(f"medians of {options.rounds} rounds, ms of {clock} time, original / swapped\n")
    names = "model | threads | linear layers | output differs | gradients differ | eval | swapped | ratio"
    print(f"| {names} | training | swapped | ratio |")
    print(f"|{'---|' * 11}")
    for name in MODELS:
        if options.only.lower() not in name.lower():
            continue
        for threads in options.threads:
            torch.set_num_threads(threads)
            try:
                print(line(name, options), flush=True)
            except (ImportError, RuntimeError, AttributeError) as error:
                print(f"| {name} | not run: {type(error).__name__}: {str(error).splitlines()[0][:90]} |", flush=True)
                break


if __name__ == "__main__":
    main()
