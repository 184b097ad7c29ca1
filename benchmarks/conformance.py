"""Run the conformance suite over the attention functions of torch, transformers and clearhead; write the report.

python benchmarks/conformance.py                 print what differs
python benchmarks/conformance.py --write         and write benchmarks/CONFORMANCE.md
python benchmarks/conformance.py --only flex     only those with "flex" in the title
"""

from __future__ import annotations

import argparse
import math
import platform
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import clearhead as ch
from clearhead.ops import library as native_library
from clearhead.verify import Finding, Report

REPORT = Path(__file__).resolve().parent / "CONFORMANCE.md"


# torch's function, one kernel at a time ---------------------------------------------------------------------------


def only(kernel: SDPBackend) -> Callable[..., Tensor]:
    """``scaled_dot_product_attention`` with one kernel; a call that the kernel does not support counts as refused."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        try:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(query, key, value, **options)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise NotImplementedError("this kernel does not take the call") from error
            raise

    return attention


# FlexAttention ----------------------------------------------------------------------------------------------------


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """FlexAttention without compilation: bool masks as a ``mask_mod``, float masks as a ``score_mod``."""
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    block_mask = score_mod = None
    if is_causal:
        block_mask = create_block_mask(lambda b, h, i, j: j <= i, *sizes, device=query.device)
    elif attn_mask is not None:
        whole = attn_mask.expand(sizes)
        if attn_mask.dtype == torch.bool:
            block_mask = create_block_mask(lambda b, h, i, j: whole[b, h, i, j], *sizes, device=query.device)
        else:
            score_mod = lambda score, b, h, i, j: score + whole[b, h, i, j]  # noqa: E731
    output = flex_attention(
        query, key, value, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=enable_gqa
    )
    return output  # type: ignore[return-value]


# torch's module ---------------------------------------------------------------------------------------------------


class ModuleWithWeights(nn.MultiheadAttention):
    """``nn.MultiheadAttention`` on the path that computes its weights, even if they are not requested."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return super().forward(*inputs, **{**options, "need_weights": True, "average_attn_weights": False})


@contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """Count the calls of one of torch's functions."""
    plain, calls = getattr(torch, name), [0]

    def counting(*inputs: Any, **options: Any) -> Any:
        calls[0] += 1
        return plain(*inputs, **options)

    setattr(torch, name, counting)
    try:
        yield calls
    finally:
        setattr(torch, name, plain)


def module_fast_path(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """The fused inference path of ``nn.MultiheadAttention``, which needs self-attention.

    Query, key and value are concatenated in one token, a third of each head's width each; the projections select them.
    """
    batch, heads, length, head_dim = query.shape
    if any(tensor.requires_grad for tensor in (query, key, value)):
        raise NotImplementedError("the fast path is for inference")
    if key.shape[2] != length or heads % 2 or value.shape[3] != head_dim:
        raise NotImplementedError("the fast path takes self-attention with an even number of heads")
    width = 3 * heads * head_dim
    # The random weights are not used.
    with torch.random.fork_rng(devices=[]):
        module = nn.MultiheadAttention(width, heads, batch_first=True).to(query.dtype).eval()
    picks = torch.zeros(3, width, width, dtype=query.dtype)
    for part in range(3):
        for head in range(heads):
            for channel in range(head_dim):
                picks[part, head * 3 * head_dim + channel, (part * heads + head) * head_dim + channel] = 1.0
    with torch.inference_mode(), counted("_native_multi_head_attention") as calls:
        module.in_proj_weight.copy_(picks.flatten(0, 1))
        module.out_proj.weight.copy_(torch.eye(width))
        module.in_proj_bias.zero_()
        module.out_proj.bias.zero_()
        # The module divides by the root of its own head width, three times ours.
        parts = (query * math.sqrt(3.0), key, value)
        token = torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1)
        mask = None
        if attn_mask is not None:
            forbidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
            mask = forbidden.expand(batch, heads, length, length).flatten(0, 1)
        output, _ = module(token, token, token, attn_mask=mask, need_weights=False)
    if not calls[0]:
        raise NotImplementedError("the fast path was not taken")
    return output.unflatten(-1, (heads, 3 * head_dim)).transpose(1, 2)[..., :head_dim].clone()


# transformers -----------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """The attributes of a module that transformers' attention functions read."""

    num_key_value_groups: int
    training: bool = True
    is_causal: bool = False
    config: Any = field(default=None)


def transformers_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Llama's eager attention; bool masks are converted as in transformers, to the dtype's lowest number."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    output, weights = eager_attention_forward(
        Layer(query.shape[1] // key.shape[1]),
        query,
        key,
        value,
        attn_mask,
        scaling=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout=dropout_p,
    )
    return output.transpose(1, 2), weights


def transformers_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The function that transformers calls for ``attn_implementation="sdpa"``."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output, _ = sdpa_attention_forward(
        Layer(query.shape[1] // key.shape[1]),
        query,
        key,
        value,
        attn_mask,
        dropout=dropout_p,
        scaling=scale,
        is_causal=is_causal,
    )
    return output.transpose(1, 2)


# clearhead --------------------------------------------------------------------------------------------------------


def ours(backend: str) -> Callable[..., Any]:
    """``observe_attention`` with the statistics that the suite checks; ``attention`` where the backend has none."""

    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        if backend == "sdpa":
            return ch.attention(query, key, value, backend=backend, **options)
        want = ch.Want(lse=True, entropy=True, received=True, rows=range(query.shape[2]))
        # The memory law does not cover weights, which are length x length numbers.
        want = want if query.shape[2] < 500 else ch.Want(lse=True, entropy=True, received=True)
        return ch.observe_attention(query, key, value, want=want, backend=backend, **options)

    return attention


@dataclass(frozen=True)
class Contender:
    """A function in the report: its title, its calling convention, and a note."""

    title: str
    fn: Callable[..., Any]
    signature: str = "sdpa"
    note: str = ""


def contenders() -> list[Contender]:
    rows = [
        Contender("SDPA", F.scaled_dot_product_attention, note="torch chooses among its CPU kernels"),
        Contender("SDPA flash", only(SDPBackend.FLASH_ATTENTION), note="the CPU flash kernel alone"),
        Contender("SDPA math", only(SDPBackend.MATH), note="the unfused kernel alone"),
        Contender("FlexAttention", flex, note="not compiled; on CPU it has no backward"),
        Contender("MHA", nn.MultiheadAttention, "mha", "need_weights=False, on SDPA"),
        Contender("MHA weights", ModuleWithWeights, "mha", "need_weights=True"),
        Contender("MHA fast path", module_fast_path, note="the fused path of inference"),
    ]
    try:
        metadata.version("transformers")
    except metadata.PackageNotFoundError:
        print("transformers is not installed: left out")
    else:
        rows.append(Contender("HF eager", transformers_eager, note="transformers, Llama's eager function"))
        rows.append(Contender("HF sdpa", transformers_sdpa, note="transformers, the function behind 'sdpa'"))
    names = {
        "native": "the CPU kernels",
        "tiled": "tiles of torch operations",
        "sdpa": "torch's kernels, guarded",
        "reference": "the formula",
    }
    for name, note in names.items():
        if name != "native" or native_library.reason() is None:
            rows.append(Contender(f"clearhead {name}", ours(name), "clearhead", note))
    return rows


SYMBOLS = {"holds": "ok", "fails": "**fails**", "does not apply": "–"}


def mark(finding: Finding) -> str:
    parts = finding.detail.split("; ")
    refused = finding.status == "does not apply" and all(part.startswith("refused") for part in parts)
    return "refused" if refused else SYMBOLS[finding.status]


def written(reports: list[tuple[Contender, Report]]) -> str:
    """The report as Markdown."""
    titles = [contender.title for contender, _ in reports]
    lines = [
        "# Conformance",
        "",
        "What `clearhead.verify` says about the attention functions in use on a CPU: which laws hold, which fail with "
        "the smallest failing example found, and which do not apply.",
        "Made by `python benchmarks/conformance.py --write`; "
        f"{', '.join(f'{name} {version}' for name, version in versions().items())}; float32, "
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}.",
        "",
        "A law does not apply (–) where a function has no argument for it, or returns nothing that it could check. "
        "*Refused*: the function raises NotImplementedError, which breaks no law.",
        "",
        "| law | " + " | ".join(titles) + " |",
        "|---|" + "---|" * len(titles),
    ]
    for place, finding in enumerate(reports[0][1].findings):
        if finding.law != "memory":
            cells = [mark(report.findings[place]) for _, report in reports]
            lines.append(f"| {finding.law} | " + " | ".join(cells) + " |")
    lines += ["", "| function | what it is | verdict | peak memory of forward, 2 heads × 64 |", "|---|---|---|---|"]
    for contender, report in reports:
        memory = report["memory"].detail.removeprefix("measured: ")
        lines.append(f"| {contender.title} | {contender.note} | {report.verdict} | {memory} |")
    lines += ["", "## What fails", ""]
    for contender, report in reports:
        for finding in report.findings:
            if finding.status == "fails":
                lines.append(f"- **{contender.title}, {finding.law}**: {finding.detail}; with `{finding.example}`.")
    lines += ["", "## The laws", ""]
    lines += [f"- **{finding.law}**: {finding.says}." for finding in reports[0][1].findings]
    return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    numbers = {"clearhead": ch.__version__, "torch": torch.__version__}
    with suppress(metadata.PackageNotFoundError):
        numbers["transformers"] = metadata.version("transformers")
    return {**numbers, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/CONFORMANCE.md")
    parser.add_argument("--only", default="", help="only contenders with this in their title")
    parser.add_argument("--examples", type=int, default=10, help="random cases for each law")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    reports = []
    for contender in contenders():
        if options.only.lower() in contender.title.lower():
            report = ch.verify(
                contender.fn, signature=contender.signature, examples=options.examples, name=contender.title
            )
            print(f"{contender.title}: {report.verdict}", flush=True)
            reports.append((contender, report))
    if options.write and not options.only:
        REPORT.write_text(written(reports), encoding="utf-8")
        print(f"wrote {REPORT.name}")
    else:
        print(written(reports))


if __name__ == "__main__":
    main()
