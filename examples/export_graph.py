"""Export a model with ``torch.export``, list the operators in its graph, and compile it with AOTInductor.

    python examples/export_graph.py            # exports, compiles (needs a C++ compiler), loads and runs
    python examples/export_graph.py --quick    # exports and runs the exported program

``examples/without_python`` runs such a compiled package in a C++ program.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn

import clearhead as ch


class Classifier(nn.Module):
    """``[batch, len, 32]`` to the logits of three classes; a token attends to the eight before it and to itself."""

    def __init__(self, mask: ch.Mask) -> None:
        super().__init__()
        self.encoder = ch.nn.Encoder(32, 4, 2, scores=[ch.Alibi(4)])
        self.head = nn.Linear(32, 3)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x, mask=self.mask).mean(dim=1))
        return logits


def exported(mask: ch.Mask) -> tuple[Classifier, torch.export.ExportedProgram]:
    """A classifier and its graph, for any length from 2 to 512."""
    model = Classifier(mask).eval()
    length = torch.export.Dim("length", min=2, max=512)
    return model, torch.export.export(model, (torch.randn(2, 10, 32),), dynamic_shapes=({1: length},))


class DecodeStep(nn.Module):
    """One layer's attention of new tokens, whose cache is an input and an output."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(32, 96)

    def forward(self, x: Tensor, past_key: Tensor, past_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = self.projections(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        keys, values = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
        output = ch.attention(query, keys, values, mask=ch.Causal(), query_offset=past_key.shape[2])
        return output.transpose(1, 2).flatten(2), keys, values


def exported_step() -> tuple[DecodeStep, torch.export.ExportedProgram]:
    """A decoding step and its graph, for 1 to 511 cached tokens."""
    step, past = DecodeStep().eval(), torch.randn(2, 1, 4, 5, 8)
    length = torch.export.Dim("past", min=1, max=511)
    shapes = (None, {2: length}, {2: length})
    return step, torch.export.export(step, (torch.randn(1, 1, 32), *past), dynamic_shapes=shapes)


def operators(program: torch.export.ExportedProgram) -> Counter[str]:
    """How often each operator of clearhead is in a graph."""
    names = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return Counter(name for name in names if name.startswith("clearhead"))


def compiled(program: torch.export.ExportedProgram, folder: Path) -> Path:
    """The package that AOTInductor makes of a graph."""
    from torch._inductor import aoti_compile_and_package

    package = folder / "model.pt2"
    aoti_compile_and_package(program, package_path=str(package))
    return package


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Export and compile a model.")
    parser.add_argument("--quick", action="store_true", help="leave AOTInductor out")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    x = torch.randn(2, 37, 32)  # another length than the one that is exported

    model, program = exported(ch.Causal() & ch.Window(8))
    print(f"Causal() & Window(8): {dict(operators(program))}")
    difference = (program.module()(x) - model(x)).abs().max().item()
    print(f"  exported program at length 37: largest difference {difference:.1e}")

    step, decoding = exported_step()
    token, past = torch.randn(1, 1, 32), torch.randn(2, 1, 4, 20, 8)
    difference = (decoding.module()(token, *past)[0] - step(token, *past)[0]).abs().max().item()
    print(f"decoding step: {dict(operators(decoding))}")
    print(f"  exported program with 20 cached tokens: largest difference {difference:.1e}")

    _, other = exported(ch.MaskFunction(lambda batch, head, q_pos, k_pos: (q_pos - k_pos) % 2 == 0))
    print(f"MaskFunction: {dict(operators(other))}")

    if quick:
        return
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        print("skipped: AOTInductor needs a C++ compiler")
        return
    with tempfile.TemporaryDirectory() as folder:
        package = torch._inductor.aoti_load_package(str(compiled(program, Path(folder))))
        difference = (package(x) - model(x)).abs().max().item()
        print(f"AOTInductor package at length 37: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
