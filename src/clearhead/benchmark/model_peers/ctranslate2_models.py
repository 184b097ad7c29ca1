"""CTranslate2: models converted from transformers, and a generation that is stepped from outside."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, Final
from weakref import finalize

import numpy
import torch
from torch import Tensor

from clearhead.benchmark.model_peers.peer import CannotRunError
from clearhead.benchmark.model_peers.work import DECODED, ModelWork
from clearhead.benchmark.peers import Call, Groups

__all__ = ["ctranslate2_call"]

_COMPUTE_TYPES: Final = {"float32": "float32", "bfloat16": "bfloat16", "int8": "int8_float32"}
_SECONDS: Final = 300.0


class _Tokenizer:
    """What the converter asks of a tokenizer: a word for each id."""

    bos_token, eos_token, unk_token = "w0", "w0", "w0"

    def __init__(self, words: int) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        """The words and their ids."""
        return {f"w{number}": number for number in range(self.words)}


def ctranslate2_call(work: ModelWork, number_format: str) -> Call:
    """The call of an encoder's states, of a prompt's logits, or of one step of a greedy generation."""
    import ctranslate2

    compute_type = _COMPUTE_TYPES[number_format]
    if compute_type not in ctranslate2.get_supported_compute_types("cpu"):
        raise CannotRunError(f"CTranslate2 does not compute in {compute_type} on this processor")
    with TemporaryDirectory() as folder:
        path = _converted(work, Path(folder))
        kind = ctranslate2.Encoder if work.kind == "encoder" else ctranslate2.Generator
        model = kind(
            str(path), device="cpu", compute_type=compute_type, inter_threads=1, intra_threads=torch.get_num_threads()
        )
    if work.kind == "encoder":
        return _encoder(model, work)
    return _prefill(model, work) if work.kind == "prefill" else _Generation(model, work)


def _converted(work: ModelWork, folder: Path) -> Path:
    from ctranslate2.converters import TransformersConverter

    model = _convertible(work)

    class Converter(TransformersConverter):  # type: ignore[misc]
        """The converter, with the model at hand in place of files."""

        def load_model(self, *arguments: Any, **options: Any) -> Any:
            return model

        def load_tokenizer(self, *arguments: Any, **options: Any) -> Any:
            return _Tokenizer(model.config.vocab_size)

    model.config.save_pretrained(folder / "source")
    return Path(Converter(str(folder / "source")).convert(str(folder / "model")))


def _convertible(work: ModelWork) -> Any:
    """A copy of the model with what the converter reads: Bert's pooler, and fields that transformers has dropped."""
    model = deepcopy(work.model)
    if work.kind == "encoder":
        from transformers import BertModel

        pooled = BertModel(model.config).eval()
        pooled.load_state_dict(model.state_dict(), strict=False)
        model = pooled
        model.config.position_embedding_type = "absolute"
    return model


def _storage(ids: Tensor) -> Any:
    import ctranslate2

    return ctranslate2.StorageView.from_array(numpy.ascontiguousarray(ids.numpy().astype(numpy.int32)))


def _tensor(storage: Any) -> Tensor:
    import ctranslate2

    if storage.dtype != ctranslate2.DataType.float32:
        storage = storage.to(ctranslate2.DataType.float32)
    return torch.from_numpy(numpy.array(storage))


def _encoder(model: Any, work: ModelWork) -> Call:
    ids, lengths = _storage(work.ids), _storage(work.lengths)

    def call() -> Groups:
        return ((_tensor(model.forward_batch(ids, lengths).last_hidden_state),),)

    return call


def _prefill(model: Any, work: ModelWork) -> Call:
    ids, lengths = _storage(work.ids), _storage(work.lengths)

    def call() -> Groups:
        return ((_tensor(model.forward_batch(ids, lengths)),),)

    return call


class _Generation:
    """Calls that run one step each of a greedy generation, which waits in its callback between the calls.

    CTranslate2 has no function that decodes a given token after a cache. The first step decodes the token after the
    prompt, as with the other peers; later steps decode the tokens that the model chose.
    """

    def __init__(self, model: Any, work: ModelWork) -> None:
        self.model, self.left = model, 0
        self.prompts = [[f"w{number}" for number in row] for row in work.ids[:, : work.length + 1].tolist()]
        self.permits: SimpleQueue[bool] = SimpleQueue()
        self.steps: SimpleQueue[Any] = SimpleQueue()
        self.threads: list[Thread] = []
        # If the call is dropped, its generation ends, so that the model is freed.
        finalize(self, _stop, self.permits, self.threads)

    def __call__(self) -> Groups:
        if self.left:
            self.permits.put(True)
        else:
            self.left = DECODED
            generation = (self.model, self.prompts, self.permits, self.steps)
            self.threads[:] = [Thread(target=_generate, args=generation, daemon=True)]
            self.threads[0].start()
        self.left -= 1
        step = self.steps.get(timeout=_SECONDS)
        if isinstance(step, BaseException):
            raise step
        return ((step,),)


def _stop(permits: SimpleQueue[bool], threads: Sequence[Thread]) -> None:
    permits.put(False)
    for thread in threads:
        thread.join(_SECONDS)


def _generate(
    model: Any, prompts: Sequence[Sequence[str]], permits: SimpleQueue[bool], steps: SimpleQueue[Any]
) -> None:
    """Generate tokens; each step's logits go to ``steps``, and the next step waits for a permit."""
    left, logits, stopped = 0, torch.zeros(0), False

    def waiting(result: Any) -> bool:
        nonlocal left, logits, stopped
        if not left:
            # The first callback of a step has the logits of all sequences, and only there do they live.
            left, logits = len(prompts), _tensor(result.logits).reshape(len(prompts), -1)
        left -= 1
        if not left and not stopped:
            steps.put(logits)
            stopped = not result.is_last and not permits.get()
        return stopped

    try:
        model.generate_batch(
            prompts,
            max_length=DECODED,
            end_token=[],
            beam_size=1,
            include_prompt_in_result=False,
            return_logits_vocab=True,
            callback=waiting,
        )
    except Exception as error:
        steps.put(error)
