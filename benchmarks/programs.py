"""Other packages' models with and without clearhead: torch alone, ``ch.accelerate()`` and ``ch.swap``.

    python benchmarks/programs.py                          # every installed package, full sizes
    python benchmarks/programs.py --quick                  # tiny models: agreement in seconds, no useful times
    python benchmarks/programs.py --only "timm|litgpt" --threads 1 --rounds 9

Each model is built by its own package with random weights. Output and gradients of every contender are compared with
a float64 run of the same model, on the error budget, before anything is timed. Times are medians of interleaved rounds
in milliseconds: a forward pass in ``eval()`` without gradients, and a training step (forward and backward) without an
optimizer. Packages that are not installed are named at the end; none of them is a requirement of clearhead.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch
from clearhead.benchmark import interleaved
from clearhead.benchmark.machine import load, machine, versions

#: A model and the arguments of its call.
Built = tuple[nn.Module, tuple[Any, ...]]

ACCELERATE, ATTENTION_ONLY, SWAP, PLAIN = "accelerate", "accelerate, attention only", "swap", "torch"


@dataclass(frozen=True)
class Program:
    """A model of another package.

    Attributes:
        name: the package's name for it.
        module: the module to import.
        build: makes the model and its arguments; True asks for a tiny one.
        package: the distribution's name, for its version.
    """

    name: str
    module: str
    build: Callable[[bool], Built]
    package: str

    def missing(self) -> str | None:
        """Why the package cannot be used here; None if it can."""
        try:
            importlib.import_module(self.module)
        except Exception as failure:  # packages fail in many ways beside another torch
            reason = " ".join(str(failure).split())[:120]
            return f"{self.package} cannot be imported: {type(failure).__name__}: {reason}"
        return None

    def made(self, quick: bool) -> Built:
        """The model with weights that depend on nothing else, and its arguments."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build(quick)


def _images(batch: int, size: int) -> Tensor:
    return torch.randn(batch, 3, size, size)


def _torchvision_vit(quick: bool) -> Built:
    from torchvision.models import VisionTransformer, vit_b_16

    if not quick:
        return vit_b_16(), (_images(8, 224),)
    return VisionTransformer(224, 16, 2, 3, 192, 768, num_classes=10), (_images(2, 224),)


def _torchvision_swin(quick: bool) -> Built:
    from torchvision.models import SwinTransformer, swin_t

    # Stochastic depth would drop other samples in each run.
    if not quick:
        return swin_t(stochastic_depth_prob=0.0), (_images(8, 224),)
    sizes: tuple[Any, ...] = ([4, 4], 96, [2, 2], [3, 6], [7, 7])
    return SwinTransformer(*sizes, stochastic_depth_prob=0.0, num_classes=10), (_images(2, 224),)


def _timm(name: str, tiny: Mapping[str, Any], full: Mapping[str, Any], quick: bool) -> Built:
    import timm

    model = timm.create_model(name, **(tiny if quick else full))
    return model, (_images(2 if quick else 8, 224),)


_TINY_VIT = {"embed_dim": 192, "depth": 2, "num_heads": 3, "num_classes": 10}
# Stochastic depth would drop other samples in each run.
_WHOLE_SWIN = {"drop_path_rate": 0.0}
_TINY_SWIN = {"depths": (2, 2), "num_heads": (3, 6), "num_classes": 10, **_WHOLE_SWIN}


def _open_clip(quick: bool) -> Built:
    import open_clip

    if not quick:
        return open_clip.create_model("ViT-B-32").visual, (_images(8, 224),)
    vision = open_clip.CLIPVisionCfg(layers=2, width=192, head_width=64, patch_size=16, image_size=224)
    text = open_clip.CLIPTextCfg(context_length=8, vocab_size=50, width=64, heads=2, layers=1)
    return open_clip.model.CLIP(64, vision, text).visual, (_images(2, 224),)


def _whisper(quick: bool) -> nn.Module:
    from whisper.model import ModelDimensions, Whisper

    tiny, base = (80, 500, 192, 3, 2, 100, 128, 192, 3, 2), (80, 1500, 512, 8, 6, 51865, 448, 512, 8, 6)
    model: nn.Module = Whisper(ModelDimensions(*(tiny if quick else base)))
    for module in model.modules():
        if type(module).__name__ == "LayerNorm":
            # Its own class computes in float32 whatever it is given, so there would be no float64 run.
            module.__class__ = nn.LayerNorm
    for parameter in model.parameters():
        # Two parameters start as uninitialised memory, which a checkpoint overwrites.
        if not bool(parameter.isfinite().all()) or (parameter.dim() == 2 and parameter.shape[0] in (128, 448)):
            nn.init.normal_(parameter, std=0.02)
    return model


def _whisper_encoder(quick: bool) -> Built:
    return _whisper(quick).encoder, (torch.randn(2, 80, 1000) if quick else torch.randn(2, 80, 3000),)


def _whisper_decoder(quick: bool) -> Built:
    shape, width, frames, words = ((2, 128), 192, 500, 100) if quick else ((2, 224), 512, 1500, 51865)
    return _whisper(quick).decoder, (torch.randint(words, shape), torch.randn(shape[0], frames, width))


class _Keywords(nn.Module):
    """A module whose call takes its arguments by name."""

    def __init__(self, inner: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.inner, self.names = inner, names

    def forward(self, *arguments: Any) -> Any:
        return self.inner(**dict(zip(self.names, arguments, strict=True)))


def _diffusers_block(quick: bool) -> Built:
    from diffusers.models.attention import BasicTransformerBlock

    heads, width, tokens, words = (4, 40, 256, 96) if quick else (8, 40, 4096, 768)
    block = BasicTransformerBlock(heads * width, heads, width, cross_attention_dim=words)
    arguments = torch.randn(1, tokens, heads * width), torch.randn(1, 77, words)
    return _Keywords(block, ("hidden_states", "encoder_hidden_states")), arguments


def _diffusers_joint_block(quick: bool) -> Built:
    from diffusers.models.attention import JointTransformerBlock

    heads, width, tokens = (4, 48, 256) if quick else (24, 64, 1024)
    block = JointTransformerBlock(heads * width, heads, width)
    names = ("hidden_states", "encoder_hidden_states", "temb")
    shapes = (1, tokens, heads * width), (1, 77, heads * width), (1, heads * width)
    return _Keywords(block, names), tuple(map(torch.randn, shapes))


def _x_transformers(quick: bool, *, flash: bool) -> Built:
    from x_transformers import Decoder, TransformerWrapper

    width, depth, heads, length, words = (192, 2, 3, 256, 100) if quick else (768, 12, 12, 1024, 50_000)
    layers = Decoder(dim=width, depth=depth, heads=heads, attn_flash=flash)
    model = TransformerWrapper(num_tokens=words, max_seq_len=length, attn_layers=layers)
    return model, (torch.randint(words, (2, length)),)


def _vit_pytorch(quick: bool) -> Built:
    from vit_pytorch import ViT

    width, depth, heads, size = (192, 2, 3, 224) if quick else (768, 12, 12, 224)
    model = ViT(
        image_size=size, patch_size=16, num_classes=1000, dim=width, depth=depth, heads=heads, mlp_dim=4 * width
    )
    return model, (_images(2 if quick else 8, size),)


def _litgpt(name: str, quick: bool) -> Built:
    from litgpt import GPT, Config

    tiny = {"n_layer": 2, "n_embd": 192, "n_head": 3, "n_query_groups": 3, "padded_vocab_size": 128, "block_size": 256}
    if quick and "intermediate_size" in vars(Config.from_name(name)):
        tiny["intermediate_size"] = 512
    config = Config.from_name(name, **(tiny if quick else {"n_layer": 12}))
    tokens = torch.randint(config.padded_vocab_size, (1, 256) if quick else (1, 1024))
    return GPT(config), (tokens,)


def _segment_anything(quick: bool) -> Built:
    from segment_anything.modeling import ImageEncoderViT

    # Half of its usual 1,024 pixels: global attention over 1,024 tokens, and windows of 14.
    width, depth, heads, size = (192, 2, 3, 224) if quick else (768, 12, 12, 512)
    model = ImageEncoderViT(
        img_size=size, patch_size=16, embed_dim=width, depth=depth, num_heads=heads, mlp_ratio=4, out_chans=256,
        qkv_bias=True, use_rel_pos=True, window_size=7 if quick else 14,
        global_attn_indexes=(1,) if quick else (2, 5, 8, 11), norm_layer=partial(nn.LayerNorm, eps=1e-6),
    )  # fmt: skip
    return model, (_images(1, size),)


def _torchtune(quick: bool) -> Built:
    from torchtune.models.llama2 import llama2

    width, depth, heads, length, words = (192, 2, 3, 256, 100) if quick else (1024, 12, 16, 1024, 32_000)
    model = llama2(
        vocab_size=words, num_layers=depth, num_heads=heads, num_kv_heads=heads, embed_dim=width, max_seq_len=length
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return model, (torch.randint(words, (1, length)),)


def _transformers(name: str, settings: Mapping[str, Any], quick: bool) -> Built:
    import transformers

    width, depth, length = (192, 2, 100) if quick else (768, 12, 128)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=1000, hidden_size=width, num_hidden_layers=depth, num_attention_heads=width // 64,
        intermediate_size=4 * width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings,
    )  # fmt: skip
    return getattr(transformers, f"{name}Model")(config), (torch.randint(3, 1000, (2 if quick else 8, length)),)


_DEBERTA_V3 = {
    "relative_attention": True, "position_buckets": 256, "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "type_vocab_size": 0,
}  # fmt: skip

PROGRAMS = (
    Program("torchvision ViT-B/16", "torchvision", _torchvision_vit, "torchvision"),
    Program("torchvision Swin-T", "torchvision", _torchvision_swin, "torchvision"),
    Program("timm ViT-S/16", "timm", partial(_timm, "vit_small_patch16_224", _TINY_VIT, {}), "timm"),
    Program("timm ViT-B/16", "timm", partial(_timm, "vit_base_patch16_224", _TINY_VIT, {}), "timm"),
    Program("timm Swin-T", "timm", partial(_timm, "swin_tiny_patch4_window7_224", _TINY_SWIN, _WHOLE_SWIN), "timm"),
    Program("open_clip ViT-B/32, vision tower", "open_clip", _open_clip, "open_clip_torch"),
    Program("whisper base, encoder", "whisper", _whisper_encoder, "openai-whisper"),
    Program("whisper base, decoder", "whisper", _whisper_decoder, "openai-whisper"),
    Program("diffusers BasicTransformerBlock, 4096 tokens", "diffusers", _diffusers_block, "diffusers"),
    Program("diffusers JointTransformerBlock, 1024 tokens", "diffusers", _diffusers_joint_block, "diffusers"),
    Program("x-transformers decoder, flash", "x_transformers", partial(_x_transformers, flash=True), "x-transformers"),
    Program(
        "x-transformers decoder, unfused", "x_transformers", partial(_x_transformers, flash=False), "x-transformers"
    ),
    Program("vit-pytorch ViT-B/16", "vit_pytorch", _vit_pytorch, "vit-pytorch"),
    Program("litgpt Pythia, 12 layers", "litgpt", partial(_litgpt, "pythia-410m"), "litgpt"),
    Program("litgpt TinyLlama, 12 layers", "litgpt", partial(_litgpt, "tiny-llama-1.1b"), "litgpt"),
    Program("segment-anything ViT-B encoder", "segment_anything.modeling", _segment_anything, "segment-anything"),
    Program("transformers MPNet base", "transformers", partial(_transformers, "MPNet", {}), "transformers"),
    Program(
        "transformers DeBERTa v3 base", "transformers", partial(_transformers, "DebertaV2", _DEBERTA_V3), "transformers"
    ),
    Program("torchtune Llama 2, 12 layers", "torchtune.models.llama2", _torchtune, "torchtune"),
)


def outputs_of(result: Any) -> list[Tensor]:
    """The floating-point tensors of what a model returns."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    parts = result.values() if isinstance(result, Mapping) else result if isinstance(result, list | tuple) else ()
    return [tensor for part in parts for tensor in outputs_of(part)]


def trained(model: nn.Module, arguments: tuple[Any, ...]) -> list[Tensor]:
    """The outputs of a training step; gradients stay in the parameters."""
    model.zero_grad(set_to_none=True)
    outputs = outputs_of(model(*arguments))
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    return [output.detach() for output in outputs]


def results(model: nn.Module, arguments: tuple[Any, ...], context: AbstractContextManager[Any]) -> dict[str, Tensor]:
    """Outputs in evaluation and in training, and the gradients of all parameters, by name."""
    with context:
        with torch.no_grad():
            values = {f"eval output {n}": each for n, each in enumerate(outputs_of(model.eval()(*arguments)))}
        values |= {f"training output {n}": each for n, each in enumerate(trained(model.train(), arguments))}
    named = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return values | {f"gradient of {name}": each.clone() for name, each in named.items()}


def in_float64(model: nn.Module, arguments: tuple[Any, ...]) -> Built:
    """A copy of the model and of its arguments in float64."""
    doubled = (each.double() if isinstance(each, Tensor) and each.is_floating_point() else each for each in arguments)
    return copy.deepcopy(model).double(), tuple(doubled)


def disagreements(
    plain: Mapping[str, Tensor], fast: Mapping[str, Tensor], exact: Mapping[str, Tensor], terms: int
) -> Iterator[str]:
    """The results that are further from float64 than the budget: twice the error of torch alone, and rounding.

    Errors are norms of whole tensors. Rounding is ``8 eps sqrt(terms)`` of a tensor's norm, or of that which it would
    have with the root mean square of all gradients: the exact gradient of a key's bias is 0, and no float32 gives it.
    """
    gradients = [each for name, each in exact.items() if name.startswith("gradient")]
    mean = math.sqrt(sum(float(each.square().sum()) for each in gradients) / sum(each.numel() for each in gradients))
    floor = 8 * torch.finfo(torch.float32).eps * math.sqrt(terms)
    if plain.keys() != fast.keys():
        yield f"other results: {sorted(plain.keys() ^ fast.keys())[:3]}"
        return
    for name, value in exact.items():
        usual = mean * math.sqrt(value.numel()) if name.startswith("gradient") else 0.0
        allowed = 2 * float((plain[name] - value).norm()) + floor * max(float(value.norm()), usual)
        error = float((fast[name] - value).norm())
        # A NaN is no smaller than anything.
        if not error <= allowed:
            yield f"{name}: error {error:.3g} above its budget {allowed:.3g}"


def contexts() -> dict[str, Callable[[], AbstractContextManager[Any]]]:
    """What surrounds a call of each contender that runs the unmodified model."""
    return {
        PLAIN: nullcontext,
        ACCELERATE: ch.accelerate,
        ATTENTION_ONLY: partial(ch.accelerate, linear=False),
    }


@dataclass(frozen=True)
class Row:
    """The medians of a program in seconds, by pass and contender, and the number of modules that ``swap`` replaced."""

    program: Program
    seconds: Mapping[str, Mapping[str, float]]
    replaced: int


def checked(program: Program, quick: bool) -> tuple[Built, nn.Module, int]:
    """The program and its swapped copy, both within the error budget; raises AssertionError otherwise."""
    model, arguments = program.made(quick)
    exact = results(*in_float64(model, arguments), nullcontext())
    plain = results(model, arguments, nullcontext())
    swapped = copy.deepcopy(model)
    replaced = len(ch.swap(swapped).replaced)
    terms = max((each.shape[-1] for each in model.parameters() if each.dim() > 1), default=1)
    for name, context in contexts().items():
        wrong = list(disagreements(plain, results(model, arguments, context()), exact, terms))
        assert not wrong, f"{program.name}, {name}: {wrong[:3]}"
    wrong = list(disagreements(plain, results(swapped, arguments, nullcontext()), exact, terms))
    assert not wrong, f"{program.name}, {SWAP}: {wrong[:3]}"
    return (model, arguments), swapped, replaced


def measured(program: Program, quick: bool, rounds: int) -> Row:
    """Check and time one program."""
    (model, arguments), swapped, replaced = checked(program, quick)

    def forward(module: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        with torch.no_grad(), context():
            module(*arguments)

    def step(module: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> None:
        with context():
            trained(module, arguments)

    seconds = {}
    for name, run, training in (("forward", forward, False), ("training", step, True)):
        calls = {who: partial(run, model.train(training), context) for who, context in contexts().items()}
        if replaced:
            calls[SWAP] = partial(run, swapped.train(training), nullcontext)
        timings = interleaved(calls, repeats=rounds, warmup=1)
        seconds[name] = {who: timing.median for who, timing in timings.items()}
    return Row(program, seconds, replaced)


def table(rows: Sequence[Row]) -> str:
    """A Markdown table: medians in milliseconds, and how many times as fast as torch alone."""
    contenders = (PLAIN, ACCELERATE, ATTENTION_ONLY, SWAP)
    lines = [
        f"| program | pass | {' | '.join(contenders)} |",
        f"|---|---|{'---:|' * len(contenders)}",
    ]
    for row in rows:
        for name, seconds in row.seconds.items():
            cells = [_cell(seconds, who) for who in contenders]
            lines.append(f"| {row.program.name} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(seconds: Mapping[str, float], who: str) -> str:
    if who not in seconds:
        return "replaces nothing"
    said = f"{seconds[who] * 1e3:,.1f}"
    return said if who == PLAIN else f"{said} ({seconds[PLAIN] / seconds[who]:.2f})"


def _head(programs: Sequence[Program]) -> str:
    packages = sorted({program.package for program in programs})
    installed = {"clearhead": versions()["clearhead"], **{name: metadata.version(name) for name in packages}}
    said = ", ".join(f"{name} {version}" for name, version in installed.items())
    about = machine()
    return (
        f"{about['processor']}, {about['cores']} cores, {torch.get_num_threads()} threads, load {load()}; "
        f"torch {torch.__version__}, {said}"
    )


def main() -> None:
    """Check and time the chosen programs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny models")
    parser.add_argument("--only", default="", metavar="PATTERN", help="programs whose names match, as in 'timm|litgpt'")
    parser.add_argument("--threads", type=int, help="threads of torch; by default as many as torch takes")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds")
    words = parser.parse_args()
    if words.threads:
        torch.set_num_threads(words.threads)
    chosen = [program for program in PROGRAMS if re.search(words.only, program.name)]
    missing = {program: reason for program in chosen if (reason := program.missing())}
    present = [program for program in chosen if program not in missing]
    print(_head(present))
    rows = []
    for program in present:
        rows.append(measured(program, words.quick, words.rounds))
        print("\n".join(table(rows[-1:]).splitlines()[2:]), flush=True)
    print(f"\n{table(rows)}")
    for program, reason in missing.items():
        print(f"left out: {program.name}: {reason}")


if __name__ == "__main__":
    main()
