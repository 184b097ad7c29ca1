"""The command under torchrun, and with models of transformers."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.corpus import observe_corpus
from clearhead.distributed.launch import run_ranks
from clearhead.train import LanguageOptions, train_text_language_model
from tests.corpus import jobs

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(60))]
#: Sizes that all configurations of transformers spell alike, or that each spells in its own way.
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "Bert": ("BertModel", {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}),
    "Albert": ("AlbertModel", {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}),
    "Llama": ("LlamaModel", {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "GPT2": ("GPT2Model", {"n_embd": 64, "n_head": 4, "n_positions": 32}),
    "T5": ("T5ForConditionalGeneration", {"d_model": 64, "num_heads": 4, "d_kv": 16}),
}


#: Rows of a corpus that takes a few seconds.
ROWS = 6000


def _corpus(folder: Path) -> None:
    """A run and a file of texts."""
    draw, text = random.Random(0), "All:\nSpeak, speak.\n"
    (folder / "play.txt").write_text(text * 40)
    options = LanguageOptions(steps=1, eval_every=1, embed_dim=16, num_heads=2, num_layers=2, context=16)
    train_text_language_model(folder / "play.txt", out=folder / "run", options=options)
    rows = [json.dumps({"text": (text * 3)[: draw.randrange(1, 57)]}) + "\n" for _ in range(ROWS)]
    (folder / "texts.jsonl").write_text("".join(rows))


def _wait_for_totals(out: Path, said: Path, job: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 200
    while not (out / "state" / "rank-0.json").exists():
        assert time.monotonic() < end, said.read_text()
        assert job.poll() is None, said.read_text()
        time.sleep(0.05)


@pytest.mark.slow
def test_without_torchrun_a_dead_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    _corpus(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [sys.executable, "-m", "clearhead", "observe", "run", "--data", "texts.jsonl", "--out", "out"]
    said, ranks = tmp_path / "said", []
    with said.open("wb") as stream:
        try:
            for rank in range(2):
                environment = {**shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
                ranks.append(subprocess.Popen(words, cwd=tmp_path, stdout=stream, stderr=stream, env=environment))
            _wait_for_totals(tmp_path / "out", said, ranks[0])
            ranks[1].kill()
            assert ranks[0].wait(60) == 1, said.read_text()
        finally:
            for job in ranks:
                job.kill()
                job.wait()
    assert said.read_text().count(f"observe: rank 1 died (process {ranks[1].pid} on ") == 1
    assert said.read_text().count(" died (process ") == 1
    assert not (tmp_path / "out" / "summary.json").exists()
    assert json.loads((tmp_path / "out" / "state" / "rank-0.json").read_text())


@pytest.mark.slow
def test_torchrun_restarts_a_killed_rank_and_gives_the_same_bits(tmp_path: Path) -> None:
    _corpus(tmp_path)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    words += ["-m", "clearhead", "observe", "run", "--data", "texts.jsonl", "--out", "out"]
    with (tmp_path / "said").open("wb") as said:
        job = subprocess.Popen(words, cwd=tmp_path, stdout=said, stderr=said, env={**os.environ})
        try:
            _wait_for_totals(tmp_path / "out", tmp_path / "said", job)
            holder = re.match(r"process (\d+) on ", (tmp_path / "out" / ".lock").read_text())
            assert holder is not None
            os.kill(int(holder[1]), signal.SIGKILL)
            assert job.wait(300) == 0, (tmp_path / "said").read_text()
        finally:
            job.kill()
            job.wait()
    printed = (tmp_path / "said").read_text()
    assert re.search(r"going on after [\d,]+ of 6,000 texts", printed)
    assert printed.count("layer ") == 1
    assert printed.count(f"observe: rank 0 died (process {holder[1]} on ") == 1
    written = json.loads((tmp_path / "out" / "summary.json").read_text())
    alone = observe_corpus(tmp_path / "run", tmp_path / "texts.jsonl").to_dict()
    assert written["heads"] == json.loads(json.dumps(alone["heads"]))


def _saved(folder: Path, family: str) -> None:
    """A small untrained model of transformers with a tokenizer of words."""
    transformers: Any = pytest.importorskip("transformers")
    tokenizers: Any = pytest.importorskip("tokenizers")
    vocabulary = {word: place for place, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]")
    tokenizer.save_pretrained(folder)
    model, sizes = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(vocab_size=len(WORDS), **sizes)
    for name in ("num_hidden_layers", "num_layers", "n_layer"):
        if hasattr(config, name):
            setattr(config, name, 2)
    if "max_position_embeddings" in config.to_dict():
        config.max_position_embeddings = 32
    torch.manual_seed(0)
    getattr(transformers, model)(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_transformers_give_the_same_bits(tmp_path: Path, family: str) -> None:
    _saved(tmp_path / "model", family)
    draw = random.Random(0)
    texts = [" ".join(draw.choice(WORDS[4:]) for _ in range(draw.choice([1, 7, 20, 45]))) for _ in range(100)]
    (tmp_path / "t.txt").write_text("\n".join(texts))
    alone = observe_corpus(tmp_path / "model", tmp_path / "t.txt").to_dict()
    assert alone["texts"] == 100
    assert len(alone["heads"]) >= 8
    results = run_ranks(
        jobs.figures, 2, tmp_path / "model", tmp_path / "t.txt", threads=torch.get_num_threads(), timeout=300
    )
    assert [summary for summary, _ in results] == [alone] * 2
