"""The same bits for a sequence however it is computed: a language model alone, in a batch, in chunks, token by token.

    python examples/reproduce_bits.py

The model is small and has random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

import clearhead as ch


def small_model() -> ch.nn.LanguageModel:
    torch.manual_seed(0)
    return ch.nn.LanguageModel(100, 64, num_heads=4, num_layers=2, max_len=256, positions="rotary").eval()


@torch.no_grad()
def in_every_way(model: ch.nn.LanguageModel, prompt: Tensor, others: list[Tensor]) -> dict[str, Tensor]:
    """The logits of one prompt, computed alone and in four other ways."""
    batch = nn.utils.rnn.pad_sequence([*others, prompt], batch_first=True)
    lengths = [len(each) for each in (*others, prompt)]
    in_batch = model(batch, lengths=lengths)[-1, : len(prompt)]

    cache = model.new_cache()
    chunks = [model(part[None], cache=cache) for part in prompt.split(24)]
    cache = model.new_cache()
    tokens = [model(part[None], cache=cache) for part in prompt.split(1)]

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    on_one_thread = model(prompt[None])[0]
    torch.set_num_threads(threads)
    return {
        "alone": model(prompt[None])[0],
        "in a padded batch": in_batch,
        "in chunks of 24": torch.cat(chunks, dim=1)[0],
        "token by token": torch.cat(tokens, dim=1)[0],
        "on one thread": on_one_thread,
    }


def show(results: dict[str, Tensor]) -> None:
    for name, logits in results.items():
        same = torch.equal(logits, results["alone"])
        print(f"  {name:18} {'the same bits' if same else 'other bits'}")


def generate(model: ch.nn.LanguageModel, prompt: Tensor, others: list[Tensor], count: int) -> None:
    """A prompt is continued alike whatever shares its batch, greedily and from a seed."""
    for options in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7}):
        (alone,) = model.generate([prompt], count, **options)
        *_, in_batch = model.generate([*others, prompt], count, **options)
        assert torch.equal(alone, in_batch)
    print(f"generate: {count} tokens, equal alone and in a batch, greedily and from a seed")


def refuse(inputs: Tensor) -> None:
    """A call that cannot keep the promise raises."""
    try:
        ch.attention(inputs, inputs, inputs, backend="sdpa")
    except ch.UnsupportedError as error:
        print(error)


def swapped() -> None:
    """A model of torch: `swap` names what torch computes."""
    model = nn.Sequential(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), nn.GELU(), nn.Linear(64, 3)).eval()
    print(ch.swap(model))


def in_micro_batches(ids: Tensor, parts: int) -> list[Tensor]:
    """The gradients of a model with dropout, from a batch that is computed in parts."""
    torch.manual_seed(0)
    model = ch.nn.LanguageModel(100, 64, num_heads=4, num_layers=2, max_len=64, dropout=0.1)
    total = ch.train.GradientSum(model, len(ids), parts=parts)
    torch.manual_seed(1)  # the seed of the step's dropout
    with total:
        for rows in total.nodes:
            with total.node(rows):
                batch = ids[rows.start : rows.stop]
                logits = model(batch[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
                loss.backward()
    total.store()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def train() -> None:
    """Micro-batches of any size have the gradients of the whole batch."""
    ids = torch.randint(0, 100, (13, 33), generator=torch.Generator().manual_seed(2))
    whole = in_micro_batches(ids, 1)
    print(f"gradients of {len(ids)} sequences in micro-batches")
    for parts, sizes in ((2, "7 and 6"), (5, "3, 3, 3, 2 and 2"), (13, "1")):
        same = all(map(torch.equal, whole, in_micro_batches(ids, parts)))
        print(f"  of {sizes:17} {'the same bits' if same else 'other bits'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer tokens")
    count = 8 if parser.parse_args().quick else 64
    model, generator = small_model(), torch.Generator().manual_seed(1)
    prompt, *others = (torch.randint(0, 100, (length,), generator=generator) for length in (90, 131, 17, 64))

    with ch.invariant():
        print("with ch.invariant():")
        show(in_every_way(model, prompt, others))
        generate(model, prompt, others, count)
        refuse(torch.randn(1, 2, 8, 16))
        swapped()
        train()
        laws = ["batch", "decoding"] if count < 64 else None
        print(ch.verify_model(model, laws=laws, lengths=[40, 23, 9]))


if __name__ == "__main__":
    main()
