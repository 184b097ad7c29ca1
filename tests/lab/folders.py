"""Small model folders: runs of clearhead train, and untrained models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

WORDS = ("a", "fine", "film", "dull", "bad", "good", "play", "and", "the", "of", "it", "was")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def language_run(folder: Path) -> Path:
    """A short run of ``train lm`` on characters."""
    from clearhead.train import train_text_language_model
    from clearhead.train.options import LanguageOptions

    (folder / "play.txt").write_text("All:\nSpeak, speak.\n" * 40)
    options = LanguageOptions(
        steps=60, eval_every=30, context=24, embed_dim=16, num_heads=2, num_layers=2, device="cpu"
    )
    train_text_language_model(folder / "play.txt", out=folder / "play", options=options)
    return folder / "play"


def classifier_run(folder: Path) -> Path:
    """A run of ``train classify`` on a few sentences."""
    from clearhead.train import train_text_classifier
    from clearhead.train.options import ClassifierOptions

    rows = [f"good,{word} fine film\nbad,{word} dull play" for word in WORDS] * 4
    (folder / "films.csv").write_text("label,text\n" + "\n".join(rows) + "\n")
    options = ClassifierOptions(
        epochs=2, embed_dim=16, feedforward_dim=16, num_heads=2, num_layers=1, max_len=16, held_out=0.2, device="cpu"
    )
    train_text_classifier(folder / "films.csv", out=folder / "films", options=options)
    return folder / "films"


def transformers_folder(folder: Path, kind: str, **settings: Any) -> Path:
    """An untrained model of a class of transformers with a word tokenizer, in a folder named like its class."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'hf'")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra 'hf'")
    path = folder / kind
    vocabulary = {word: place for place, word in enumerate((*SPECIAL, *WORDS))}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if kind.startswith("Bert"):
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = dict(zip(("pad", "unk", "cls", "sep", "mask"), SPECIAL, strict=True))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, **{f"{name}_token": text for name, text in names.items()}
    ).save_pretrained(path)
    model = getattr(transformers, kind)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = model(model.config_class(vocab_size=len(vocabulary), **settings))
    for weight in made.parameters():
        # Larger weights make untrained heads differ.
        weight.data *= 4 if weight.ndim == 2 else 1
    made.save_pretrained(path)
    return path


def bert(folder: Path, kind: str = "BertForMaskedLM", **settings: Any) -> Path:
    small = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 24,
    }
    return transformers_folder(folder, kind, **{**small, **settings})


def gpt2(folder: Path) -> Path:
    return transformers_folder(
        folder, "GPT2LMHeadModel", n_embd=16, n_layer=2, n_head=2, n_positions=24, bos_token_id=2, eos_token_id=3
    )
