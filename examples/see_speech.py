"""What a speech model attends to: Whisper's encoder over the sound, and its decoder over the encoder.

    python examples/see_speech.py               # trains 250 steps, then writes see_speech.html
    python examples/see_speech.py --quick       # 4 steps

Needs the extra ``hf`` (``pip install "clearhead[hf]"``). The model is transformers' Whisper, built from a config, with
its feature extractor. The sounds are tunes of five notes of different lengths, and the text is the notes' names. So the
right place to listen to is known: the cross-attention of a model that has learned follows the notes.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import clearhead as ch

RATE, SECONDS, NOTES = 16_000, 2, 5
NAMES = ("C", "E", "G", "c", "e", "g", "c'", "e'")
PITCHES = (262, 330, 392, 523, 659, 784, 1047, 1319)
START, END, PADDING = len(NAMES), len(NAMES) + 1, len(NAMES) + 2
FRAMES = 50 * SECONDS  # the encoder has 50 positions a second


def tune() -> tuple[Tensor, Tensor, Tensor]:
    """Samples ``[32000]``, the notes ``[5]``, and at which sample each note begins and ends ``[5, 2]``."""
    notes = torch.randint(0, len(NAMES), (NOTES,))
    ends = (torch.rand(NOTES) + 0.5).cumsum(0)
    ends = (ends / ends[-1] * RATE * SECONDS).long()
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    parts = []
    for note, length in zip(notes.tolist(), (ends - begins).tolist(), strict=True):
        phase = 2 * torch.pi * PITCHES[note] / RATE * torch.arange(length)
        parts.append(0.5 * torch.sin(phase) * torch.linspace(1.0, 0.2, length))
    return torch.cat(parts) + 0.01 * torch.randn(RATE * SECONDS), notes, torch.stack([begins, ends], dim=1)


def batch(count: int, extractor: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features ``[count, mels, 200]``, decoder inputs and labels ``[count, 6]``, and where the notes are."""
    sounds, notes, spans = zip(*(tune() for _ in range(count)), strict=True)
    extracted = extractor([sound.numpy() for sound in sounds], sampling_rate=RATE, return_tensors="pt")
    text, column = torch.stack(notes), torch.ones(count, 1, dtype=torch.int64)
    inputs, labels = torch.cat([START * column, text], dim=1), torch.cat([text, END * column], dim=1)
    return extracted.input_features, inputs, labels, torch.stack(spans)


def whisper() -> tuple[Any, Any]:
    """A small Whisper with random weights, and its feature extractor; a checkpoint is used the same way."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=len(NAMES) + 3, num_mel_bins=40, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=FRAMES, max_target_positions=16, pad_token_id=PADDING, bos_token_id=START,
        eos_token_id=END, decoder_start_token_id=START, dropout=0.0,
    )  # fmt: skip
    extractor = WhisperFeatureExtractor(feature_size=40, chunk_length=SECONDS)
    return WhisperForConditionalGeneration(config), extractor


def train(model: Any, extractor: Any, steps: int) -> None:
    """Learn to name the notes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps + 1):
        features, inputs, labels, _ = batch(16, extractor)
        result = model(input_features=features, decoder_input_ids=inputs, labels=labels)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        if step % max(1, steps // 5) == 0:
            print(f"step {step:4d}  loss {result.loss.item():.3f}")


@torch.no_grad()
def alignment(model: Any, extractor: Any) -> None:
    """How much of the cross-attention of each predicted note lies on that note's frames."""
    features, inputs, labels, spans = batch(16, extractor)
    want = ch.Want(rows=range(NOTES))
    with ch.observe(model, want, layers="*decoder*encoder_attn") as observed:
        logits = model(input_features=features, decoder_input_ids=inputs).logits
    right = (logits.argmax(-1) == labels).float().mean()
    frame = (torch.arange(FRAMES) + 0.5) * RATE / 50
    sounding = (frame >= spans[..., :1]) & (frame < spans[..., 1:])  # [tune, note, frame]
    share = sounding.float().mean()
    print(f"notes named correctly: {right:.2f}; a note has {share:.2f} of the frames")
    for layer, record in observed.items():
        assert record.rows is not None
        mean = (record.rows * sounding[:, None]).sum(-1).mean(dim=(0, 2))
        print(f"  {layer}: " + " ".join(f"{weight:.2f}" for weight in mean.tolist()))


@torch.no_grad()
def encoder(model: Any, extractor: Any) -> None:
    """How far the encoder's heads look, in seconds."""
    features, inputs, _, _ = batch(4, extractor)
    want = ch.Want(distance=True)
    with ch.observe(model, want, layers="*encoder.layers*self_attn") as observed:
        model(input_features=features, decoder_input_ids=inputs)
    for layer, record in observed.items():
        assert record.distance is not None
        seconds = record.distance.mean(dim=(0, 2)) / 50
        print(f"  {layer}: {[f'{each:.2f} s' for each in seconds.tolist()]}")


@torch.no_grad()
def page(model: Any, extractor: Any, path: Path) -> None:
    """A page of the cross-attention: rows are tokens, columns are times."""
    features, inputs, labels, _ = batch(1, extractor)
    with ch.trace(model, layers="*encoder_attn") as traced:
        model(input_features=features, decoder_input_ids=inputs)
    # A query predicts the next token: it is named by that.
    written = [*(NAMES[each] for each in labels[0, :-1].tolist()), "end"]
    times = [f"{frame / 50:.2f} s" for frame in range(FRAMES)]
    title = "Which sound does each note come from?"
    made = ch.view(traced, tokens=written, key_tokens=times, title=title)
    print(f"{made.save(path)} holds {made!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a speech model attends to.")
    parser.add_argument("--quick", action="store_true", help="4 training steps")
    parser.add_argument("--out", type=Path, default=Path("see_speech.html"), help="the page")
    chosen = parser.parse_args()
    if find_spec("transformers") is None:
        print("skipped: needs the extra 'hf': pip install 'clearhead[hf]'")
        return
    torch.manual_seed(0)
    model, extractor = whisper()
    print(ch.swap(model))
    train(model, extractor, 4 if chosen.quick else 250)
    model.eval()
    alignment(model, extractor)
    encoder(model, extractor)
    page(model, extractor, chosen.out)


if __name__ == "__main__":
    main()
