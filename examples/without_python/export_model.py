"""Export a classifier made of clearhead's modules, compile it with AOTInductor, and write numbers to compare with.

    python export_model.py FOLDER

FOLDER then contains model.pt2, the compiled package, and numbers.bin, an input and the output for it.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package

import clearhead as ch

#: Tokens that the compiled model takes at most.
MAX_LEN = 512


class Classifier(nn.Module):
    """``[batch, len, 32]`` to the logits of three classes; a token attends to the eight before it and to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = ch.nn.Encoder(32, 4, 1, scores=[ch.Alibi(4)])
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x, mask=ch.Causal() & ch.Window(8)).mean(dim=1))
        return logits


def write(file: BinaryIO, tensor: Tensor) -> None:
    """Write the number of axes, the sizes, and the elements as float32."""
    file.write(struct.pack(f"<{1 + tensor.ndim}q", tensor.ndim, *tensor.shape))
    file.write(tensor.contiguous().numpy().tobytes())


def main(folder: Path) -> None:
    torch.manual_seed(0)
    model, x = Classifier().eval(), torch.randn(2, 10, 32)
    with torch.no_grad():
        lengths = {1: torch.export.Dim("length", min=2, max=MAX_LEN)}
        program = torch.export.export(model, (x,), dynamic_shapes=(lengths,))
        aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        # Another length than the one that the model was exported with.
        x = torch.randn(2, 37, 32)
        with (folder / "numbers.bin").open("wb") as file:
            write(file, x)
            write(file, model(x))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
