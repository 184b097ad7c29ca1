"""What a language model attends to: statistics, single rows, inner points, an edit, a token explained, and a page.

    python examples/see_text.py                 # trains 200 steps, then writes see_text.html
    python examples/see_text.py --quick         # 10 steps

Needs the extra ``hf`` (``pip install "clearhead[hf]"``). The model is transformers' GPT-2, built from a config. It
learns to choose between "is" and "are" after words such as "the keys near the door under the box", where the number of
the first noun decides. ``minilm_heads.py`` looks at a pretrained model in the same way.
"""

from __future__ import annotations

import argparse
import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import clearhead as ch

NOUNS = ("key", "door", "box", "table", "lamp", "book")
WORDS = ("the", "near", "under", "by", "is", "are", *NOUNS, *(f"{noun}s" for noun in NOUNS))
LENGTH, SUBJECT = 8, 1


def sentence(draw: random.Random) -> list[str]:
    """Eight words and the verb, such as "the keys near the door under the box" and "are"."""
    noun = [draw.choice(NOUNS) + draw.choice(("", "s")) for _ in range(3)]
    words = ["the", noun[0], draw.choice(("near", "by")), "the", noun[1], draw.choice(("under", "by")), "the", noun[2]]
    return [*words, "are" if noun[0].endswith("s") else "is"]


def batch(count: int, draw: random.Random) -> tuple[Tensor, Tensor]:
    """Ids of the words ``[count, 8]``, and of the verbs ``[count]``."""
    ids = torch.tensor([[WORDS.index(word) for word in sentence(draw)] for _ in range(count)])
    return ids[:, :-1], ids[:, -1]


def gpt2() -> Any:
    """A small GPT-2 with random weights; a checkpoint of transformers is used the same way."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(WORDS), n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def train(model: Any, steps: int) -> None:
    """Learn the verb after the last word."""
    optimizer, draw = torch.optim.AdamW(model.parameters(), lr=2e-3), random.Random(0)
    for step in range(steps + 1):
        ids, verb = batch(32, draw)
        loss = cross_entropy(model(input_ids=ids).logits[:, -1], verb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 4) == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}")


@torch.no_grad()
def statistics(model: Any, ids: Tensor) -> None:
    """Statistics of every head, while the model runs; its output keeps its bits."""
    alone = model(input_ids=ids).logits
    want = ch.Want(entropy=True, received=True, rows=[LENGTH - 1])
    with ch.observe(model, want) as observed:
        watched = model(input_ids=ids).logits
    print(f"the output changes under observation: {not torch.equal(alone, watched)}")
    print(observed)
    for layer, record in observed.items():
        assert record.rows is not None
        weight = record.rows[:, :, 0, SUBJECT].mean(dim=0)
        print(f"last word to first noun, {layer}: {[f'{x:.2f}' for x in weight.tolist()]}")


@torch.no_grad()
def edits(model: Any, ids: Tensor, verb: Tensor) -> None:
    """Switch heads off one at a time: what the prediction loses without each."""
    whole = cross_entropy(model(input_ids=ids).logits[:, -1], verb)
    for layer in range(2):
        losses = []
        for head in range(4):
            with ch.trace(model, record=False) as traced:
                traced.switch_off(heads=head, layers=layer)
                logits = model(input_ids=ids).logits[:, -1]
            losses.append(cross_entropy(logits, verb) - whole)
        print(f"loss added without a head, layer {layer}: {[f'{x:+.3f}' for x in losses]}")


@torch.no_grad()
def points(model: Any, ids: Tensor) -> None:
    """Inner points by name."""
    with ch.trace(model, layers=1) as traced:
        model(input_ids=ids)
    print(traced)
    weights = traced[1].weights  # computed when it is read
    print(f"weights {list(weights.shape)}, each row sums to {weights.sum(-1).mean():.4f}")


@torch.no_grad()
def one_token(model: Any, words: list[str]) -> None:
    """One query of one head, step by step, and how far each step is from float64."""
    ids = torch.tensor([[WORDS.index(word) for word in words]])
    with ch.trace(model, layers=0) as traced:
        model(input_ids=ids)
    points = traced[0]
    head = int(points.weights[0, :, -1, SUBJECT].argmax())
    tensors = (points.query, points.key, points.value)
    print(ch.explain(*tensors, mask=ch.Causal(), token="lamp", head=head, tokens=words))


@torch.no_grad()
def page(model: Any, words: list[str], path: Path) -> None:
    """One page of every head over one sentence."""
    ids = torch.tensor([[WORDS.index(word) for word in words]])
    made = ch.view(model, ids, tokens=words, title="is or are?")
    print(f"{made.save(path)} holds {made!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a language model attends to.")
    parser.add_argument("--quick", action="store_true", help="10 training steps")
    parser.add_argument("--out", type=Path, default=Path("see_text.html"), help="the page")
    chosen = parser.parse_args()
    if find_spec("transformers") is None:
        print("skipped: needs the extra 'hf': pip install 'clearhead[hf]'")
        return
    torch.manual_seed(0)
    model = gpt2()
    print(ch.swap(model))
    train(model, 10 if chosen.quick else 200)
    model.eval()
    ids, verb = batch(64, random.Random(1))
    statistics(model, ids)
    edits(model, ids, verb)
    points(model, ids)
    words = ["the", "keys", "near", "the", "box", "under", "the", "lamp"]
    one_token(model, words)
    page(model, words, chosen.out)


if __name__ == "__main__":
    main()
