"""Which promises of bits the engines on this machine keep: the table of benchmarks/INVARIANCE.md.

python benchmarks/invariance.py                  print the tables
python benchmarks/invariance.py --write          and write benchmarks/INVARIANCE.md
python benchmarks/invariance.py --only clearhead only those with "clearhead" in the title
python benchmarks/invariance.py --quick          fewer laws, for a quick look
"""

from __future__ import annotations

import argparse
import platform
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import clearhead as ch
from clearhead.verify import Report, law_names, model_law_names

REPORT = Path(__file__).resolve().parent / "INVARIANCE.md"
QUICK = {"functions": ["bits alone", "bits decoded"], "models": ["batch", "padding right", "decoding"]}


@dataclass(frozen=True)
class Engine:
    """A function, or a factory of models.

    Attributes:
        title: what the table calls it.
        about: what it is.
        make: makes what is verified.
        signature: the convention of a function; empty for a model.
    """

    title: str
    about: str
    make: Callable[[], Any]
    signature: str = ""


# functions -----------------------------------------------------------------------------------------------------------


@cache
def _compiled_flex() -> Callable[..., Any]:
    torch.compiler.reset()
    # Beyond the limit flex_attention would run uncompiled.
    torch._dynamo.config.recompile_limit = 512
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def compiled_flex(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, enable_gqa: bool = False
) -> Tensor:
    """FlexAttention, compiled; it has no gradient on the CPU."""
    if query.requires_grad:
        raise NotImplementedError("on the CPU it has no backward")
    block_mask = None
    if attn_mask is not None:
        sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        whole = attn_mask.expand(sizes).contiguous()
        block_mask = create_block_mask(lambda b, h, i, j: whole[b, h, i, j], *sizes, device="cpu")
    output: Tensor = _compiled_flex()(query, key, value, block_mask=block_mask, enable_gqa=enable_gqa)
    return output


class _Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@cache
def _session(heads: int) -> Any:
    """A session of ONNX Runtime for torch's attention with a mask, for any batch and lengths."""
    import onnxruntime

    sizes = dict.fromkeys(("batch", "q_len", "k_len", "dim"), torch.export.Dim.DYNAMIC)
    axes = ({0: "batch", 2: "q_len", 3: "dim"}, {0: "batch", 2: "k_len", 3: "dim"})
    shapes = [{axis: sizes[name] for axis, name in each.items()} for each in (axes[0], axes[1], axes[1])]
    inputs = (torch.randn(2, heads, 5, 8), *torch.randn(2, 2, heads, 7, 8), torch.ones(2, 1, 5, 7, dtype=torch.bool))
    buffer = BytesIO()
    mask_shape = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
    program = torch.onnx.export(
        _Attention(), inputs, dynamo=True, dynamic_shapes=(*shapes, mask_shape), opset_version=18, verbose=False
    )
    assert program is not None
    program.save(buffer)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(buffer.getvalue(), options, providers=["CPUExecutionProvider"])


def onnx_runtime(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, enable_gqa: bool = False
) -> Tensor:
    """ONNX Runtime, on what torch exports for its attention."""
    if query.requires_grad or query.dtype != torch.float32:
        raise NotImplementedError("it runs float32, without gradients")
    shares = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(shares, dim=1) for part in (key, value))
    shape = (query.shape[0], 1, query.shape[2], key.shape[2])
    mask = torch.ones(shape, dtype=torch.bool) if attn_mask is None else attn_mask.expand(shape)
    session = _session(query.shape[1])
    given = (part.contiguous().numpy() for part in (query, key, value, mask))
    names = [each.name for each in session.get_inputs()]
    (output,) = session.run(None, dict(zip(names, given, strict=True)))
    return torch.from_numpy(output)


FUNCTIONS = (
    Engine("torch SDPA", "torch's function; it chooses a kernel", lambda: F.scaled_dot_product_attention, "sdpa"),
    Engine("compiled flex", "torch's FlexAttention under torch.compile", lambda: compiled_flex, "sdpa"),
    Engine("ONNX Runtime", "torch's exported attention in ONNX Runtime", lambda: onnx_runtime, "sdpa"),
    Engine("clearhead", "ch.attention under ch.invariant()", lambda: ch.attention, "clearhead"),
)


# models --------------------------------------------------------------------------------------------------------------

_SIZES: dict[str, Any] = {"vocab_size": 97, "attn_implementation": "sdpa"}


def llama(implementation: str = "sdpa", *, swap: bool = False, compiled: bool = False) -> nn.Module:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{**_SIZES, "attn_implementation": implementation}, hidden_size=64, intermediate_size=176,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return _finished(LlamaForCausalLM(config), swap=swap, compiled=compiled)


def gpt2(implementation: str = "sdpa", *, swap: bool = False, compiled: bool = False) -> nn.Module:
    """A small GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        **{**_SIZES, "attn_implementation": implementation}, n_embd=64, n_layer=2, n_head=4, n_positions=256,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return _finished(GPT2LMHeadModel(config), swap=swap, compiled=compiled)


def bert(implementation: str = "sdpa", *, swap: bool = False, compiled: bool = False) -> nn.Module:
    """A small BERT with random weights."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        **{**_SIZES, "attn_implementation": implementation}, hidden_size=64, intermediate_size=176,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    return _finished(BertModel(config), swap=swap, compiled=compiled)


def _finished(model: nn.Module, *, swap: bool, compiled: bool) -> nn.Module:
    model = model.eval()
    if swap:
        # Under the setting small linear layers and parts are replaced too.
        with ch.invariant():
            ch.swap(model)
    if compiled:
        torch.compiler.reset()
        model.compile(dynamic=True)
    return model


def language_model() -> nn.Module:
    """A small model of ``ch.nn`` with random weights."""
    return ch.nn.LanguageModel(
        97, 64, 4, 2, max_len=256, positions="rotary", norm="rms", gated=True, activation="silu", bias=False
    )


def _model_engines() -> list[Engine]:
    engines = [
        Engine(f"{name} {how}", f"transformers' {name} with {how} attention", partial(make, how))
        for name, make in (("Llama", llama), ("GPT-2", gpt2), ("BERT", bert))
        for how in ("eager", "sdpa")
    ]
    engines.append(Engine("Llama compiled", "with sdpa, under torch.compile", partial(llama, compiled=True)))
    engines += [
        Engine(f"{name} clearhead", f"{name} after ch.swap, under ch.invariant()", partial(make, swap=True))
        for name, make in (("Llama", llama), ("GPT-2", gpt2), ("BERT", bert))
    ]
    torch_layer = partial(nn.TransformerEncoderLayer, 64, 4, 176, batch_first=True)
    engines.append(Engine("torch encoder", "nn.TransformerEncoder", lambda: _encoder(torch_layer, swap=False)))
    engines.append(
        Engine("torch encoder clearhead", "the same after ch.swap", lambda: _encoder(torch_layer, swap=True))
    )
    engines.append(Engine("ch.nn", "ch.nn.LanguageModel under ch.invariant()", language_model))
    return engines


def _encoder(layer: Callable[[], nn.TransformerEncoderLayer], *, swap: bool) -> nn.Module:
    return _finished(nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False), swap=swap, compiled=False)


# tables --------------------------------------------------------------------------------------------------------------


def _cell(report: Report, law: str) -> str:
    finding = report[law]
    if finding.status == "holds":
        return "kept"
    if finding.raised:
        return "raises"
    if finding.status == "fails":
        words = finding.detail.split("differs by ")
        return f"**broken** {words[1].split(';')[0].split(',')[0]}" if len(words) > 1 else "**broken**"
    return "refused" if finding.detail.startswith("refused") else "–"


def table(laws: Sequence[str], reports: dict[str, Report]) -> list[str]:
    """A Markdown table with a row for each law and a column for each engine."""
    lines = [f"| promise | {' | '.join(reports)} |", f"|---|{'---|' * len(reports)}"]
    return [*lines, *(f"| {law} | {' | '.join(_cell(report, law) for report in reports.values())} |" for law in laws)]


def _versions() -> str:
    packages = ("torch", "transformers", "onnxruntime")
    installed = [f"{name} {metadata.version(name)}" for name in packages]
    isa = torch.backends.cpu.get_cpu_capability()
    return f"clearhead {ch.__version__}, {', '.join(installed)}, python {platform.python_version()}; {isa}"


def written(dtype: torch.dtype, functions: dict[str, Report], models: dict[str, Report], laws: Any) -> list[str]:
    """The section of one dtype."""
    parts = [f"## {str(dtype)[6:]}", ""]
    if functions:
        parts += ["Attention functions:", "", *table(laws["functions"], functions), ""]
    if models:
        parts += ["Models with random weights, two layers of width 64:", "", *table(laws["models"], models), ""]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.name}")
    parser.add_argument("--only", default="", help="a part of the title")
    parser.add_argument("--quick", action="store_true", help="few laws")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    laws = QUICK if options.quick else {"functions": law_names(invariance=True), "models": model_law_names()}
    engines = (*FUNCTIONS, *_model_engines())
    lines = [
        "# Bits",
        "",
        "Which engines give a sequence the same bits however it is computed, on a CPU. A cell that is broken has the",
        "largest difference that was found first. A promise does not apply (–) where an engine has no argument for it.",
        f"Made by `python benchmarks/invariance.py --write`; {_versions()}.",
        "",
    ]
    for dtype in (torch.float32, torch.bfloat16):
        functions, models = dict[str, Report](), dict[str, Report]()
        for engine in engines:
            if options.only.lower() not in engine.title.lower():
                continue
            torch.manual_seed(0)
            made = engine.make()
            if engine.signature:
                report = ch.verify(
                    made, signature=engine.signature, dtype=dtype, laws=laws["functions"], invariance=True, examples=0
                )
                functions[engine.title] = report
            else:
                report = ch.verify_model(made.to(dtype), laws=laws["models"])
                models[engine.title] = report
            print(f"{str(dtype)[6:]} {engine.title}: {report.verdict}", flush=True)
        lines += written(dtype, functions, models, laws)
    described = [
        f"- {engine.title}: {engine.about}." for engine in engines if options.only.lower() in engine.title.lower()
    ]
    text = "\n".join([*lines, *described, ""])
    if options.write and not options.only and not options.quick:
        REPORT.write_text(text, encoding="utf-8")
        print(f"wrote {REPORT.name}")
    else:
        print(text)


if __name__ == "__main__":
    main()
