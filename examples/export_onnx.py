"""Export a model to ONNX and run it in ONNX Runtime.

python examples/export_onnx.py            # needs the extra onnx
python examples/export_onnx.py --quick    # one opset
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

import clearhead as ch


class Classifier(nn.Module):
    """``[batch, len, 32]`` and each sequence's length to the logits of three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = ch.nn.Encoder(32, 4, 2, scores=[ch.Alibi(4)])
        self.head = nn.Linear(32, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x, lengths=lengths).mean(dim=1))
        return logits


def exported(model: nn.Module, opset: int) -> Any:
    """The model as an ONNX program, for any batch and any length up to 512."""
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=2, max=512)
    example = (torch.randn(2, 10, 32), torch.tensor([10, 4]))
    shapes = ({0: batch, 1: length}, {0: batch})
    return torch.onnx.export(model, example, dynamo=True, opset_version=opset, dynamic_shapes=shapes, verbose=False)


def run(program: Any, *inputs: Tensor) -> Tensor:
    """What ONNX Runtime computes on the CPU."""
    import onnxruntime

    content = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    (output,) = session.run(None, {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)})
    return torch.from_numpy(output)


class EmptyRow(nn.Module):
    """Attention whose first query may attend to nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return ch.attention(x, x, x, mask=ch.Causal() & ~ch.Window(0))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="Export a model to ONNX and run it in ONNX Runtime.")
    parser.add_argument("--quick", action="store_true", help="one opset")
    quick = parser.parse_args().quick
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        print(f'skipped: needs {", ".join(missing)}; pip install "clearhead[onnx]"')
        return
    # The exporter warns of packages that it would translate, too.
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    model, x, lengths = Classifier().eval(), torch.randn(3, 37, 32), torch.tensor([37, 5, 20])
    for opset in (23,) if quick else (18, 23):
        program = exported(model, opset)
        operators = Counter(node.op_type for node in program.model.graph)
        difference = (run(program, x, lengths) - model(x, lengths)).abs().max().item()
        print(
            f"opset {opset}: {operators['Attention']} Attention, {operators['Softmax']} Softmax; "
            f"largest difference {difference:.1e}"
        )
    x = torch.randn(5, 4)
    program = torch.onnx.export(EmptyRow(), (x,), dynamo=True, opset_version=23, verbose=False)
    print(f"an empty row is {run(program, x)[0].tolist()}")


if __name__ == "__main__":
    main()
