"""``verify_model``: whether the bits of a whole model depend on how its sequences are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, overload

import torch
from torch import nn

from clearhead.arguments import repr_of, whole
from clearhead.errors import ClearheadError, ShapeError, UnsupportedError
from clearhead.invariance import invariant
from clearhead.nn.checks import check_model
from clearhead.nn.generation import evaluating
from clearhead.verify.bit_comparison import BitComparison
from clearhead.verify.law import REFUSALS, Broken, NotApplicable
from clearhead.verify.laws.models import MODEL_LAWS, ModelLaw
from clearhead.verify.layer_errors import LayerErrors, layer_errors
from clearhead.verify.model_under_test import under_test
from clearhead.verify.process import undisturbed
from clearhead.verify.report import Finding, Report, error_detail, versions

__all__ = ["model_law_names", "verify_model"]

#: Lengths of sequences by default: beyond a tile of 64 keys, and shorter.
_LENGTHS: Final = (97, 40, 23, 6)


@overload
def verify_model(model: nn.Module, tokenizer: nn.Module, *, inputs: Any = None) -> LayerErrors: ...


@overload
def verify_model(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    laws: Iterable[str] | None = None,
    lengths: Sequence[int] = _LENGTHS,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report: ...


def verify_model(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    inputs: Any = None,
    laws: Iterable[str] | None = None,
    lengths: Sequence[int] = _LENGTHS,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report | LayerErrors:
    """Test whether a model's bits depend on how a sequence is computed, or compare its quantised layers with others.

    ``verify_model(model, reference)`` lists, layer by layer, how far each quantised linear layer of ``model`` is from
    the layer of the same name in ``reference``, the model before it was quantised: ``|difference| / |output|`` of the
    same inputs. The rest is of the test of bits.

    Each law computes the same sequences in two ways, under ``ch.invariant()``, and compares outputs bit by bit: alone
    and in a batch, at another place, padded, packed, in chunks, decoded token by token, on other numbers of threads,
    op by op, observed, recorded by autograd. Two more compare gradients, alone and in a batch and in micro-batches.
    ``ch.set_invariant`` states what holds for models of clearhead and swapped ones; other models can be tested too, and
    the setting means nothing to them.

    Args:
        model: a ``LanguageModel``, ``SequenceClassifier``, ``Encoder``, ``Decoder`` or block of ``ch.nn``; an
            ``nn.TransformerEncoder`` or one of its layers, batch first; or a model of Hugging Face transformers that
            reads token ids. It is tested in evaluation mode, and left as it was.
        tokenizer: makes ids from a text by ``encode(text)``; by default ids are random. Or the reference, a
            ``torch.nn.Module``, given by place.
        inputs: with a reference: arguments of a call of it, a tensor, a sequence or a mapping of keywords. Both layers
            get what the reference's layers get in it; by default they get random inputs.
        laws: names of the laws to try, by default all of ``verify.model_law_names()``.
        lengths: lengths of the sequences, cut to the model's longest.
        name: name of the model in the report.
        progress: called with the name of each law before it is tried.

    Returns:
        A ``Report``: ``str()`` gives a table, ``.ok`` says whether no law fails, ``.broken`` names the laws that fail.
        The detail of a law that fails has the largest difference, and the first module whose output differs. With a
        reference ``LayerErrors``: ``str()`` gives a table, ``.layers`` has a row for each layer with ``path``, ``kind``
        and ``error``, and ``.output`` is the error of the model's output if there are ``inputs``.

    Raises:
        UnsupportedError: the model is of no known kind, or there is no such law; with a reference, no layer is
            quantised, the reference lacks one of them, or an argument of the test of bits is given.
        ShapeError: no lengths, or one below 1.

    Cost: about 150 calls of the model, and 10 backward passes; with a reference a call of each layer or of both models.

    >>> import torch, clearhead as ch
    >>> model = ch.nn.Encoder(16, num_heads=2, num_layers=1)
    >>> report = ch.verify_model(model, laws=["batch", "padding left"], lengths=[9, 4])
    >>> report["batch"].status, report["padding left"].detail
    ('holds', 'it pads to the right only, and blocks take no lengths')
    """
    check_model("verify_model", model)
    if isinstance(tokenizer, nn.Module):
        _check_alone(given=laws is not None or tuple(lengths) != _LENGTHS or name is not None or progress is not None)
        return layer_errors(model, tokenizer, inputs)
    if inputs is not None:
        must, then = "come with a reference", "Pass verify_model(model, reference, inputs=inputs)."
        raise UnsupportedError.about("verify_model", "inputs", must=must, got="inputs without one", then=then)
    chosen = _chosen(laws)
    subject = under_test(model, None if tokenizer is None else _encode(tokenizer))
    counts = _checked(lengths, subject.longest)
    findings = []
    # Gradients need other tensors than inference mode makes.
    with invariant(), torch.inference_mode(False), undisturbed(), evaluating(model):
        trial = BitComparison.of(subject, counts)
        for law in chosen:
            if progress is not None:
                progress(law.name)
            findings.append(_try(law, trial))
    parameter = subject.parameter
    return Report(
        name=name or type(model).__name__,
        signature=subject.kind,
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(parameter.device),
        findings=tuple(findings),
        versions=versions(),
        searched=True,
    )


def model_law_names() -> tuple[str, ...]:
    """The names of the laws of models, in the order in which ``verify_model`` tries them.

    >>> model_law_names()[:3]
    ('batch', 'place', 'padding right')
    """
    return tuple(law.name for law in MODEL_LAWS)


def _check_alone(given: bool) -> None:
    if given:
        must, then = "be left out with a reference", "Pass a reference and inputs alone."
        what = "laws, lengths, name and progress"
        raise UnsupportedError.about("verify_model", what, must=must, got="some of them", then=then)


def _chosen(names: Iterable[str] | None) -> list[ModelLaw]:
    there_are = model_law_names()
    wanted = there_are if names is None else (names,) if isinstance(names, str) else tuple(names)
    for name in wanted:
        if name not in there_are:
            raise UnsupportedError.about(
                "verify_model",
                "laws",
                must="be names of laws",
                got=repr_of(name),
                then=f"There are: {', '.join(there_are)}.",
            )
    return [law for law in MODEL_LAWS if law.name in wanted]


def _encode(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    encode = getattr(tokenizer, "encode", None)
    if not callable(encode):
        raise UnsupportedError.about(
            "verify_model", "tokenizer", must="have a method encode", got=type(tokenizer).__name__, then="Pass None."
        )
    return encode  # type: ignore[no-any-return]


def _checked(lengths: Sequence[int], longest: int) -> list[int]:
    counts = [min(longest, whole("verify_model", "lengths", length, low=1)) for length in lengths]
    if not counts:
        raise ShapeError.about("verify_model", "lengths", must="name a length", got="none", then="Pass [40, 23, 6].")
    return counts


def _try(law: ModelLaw, trial: BitComparison) -> Finding:
    """Try one law, without gradients unless it enables them."""
    try:
        with torch.no_grad():
            law.check(trial)
    except Broken as broken:
        return Finding(law=law.name, says=law.says, status="fails", detail=str(broken), cases=1)
    except NotApplicable as reason:
        return Finding(law=law.name, says=law.says, status="does not apply", detail=str(reason))
    except (*REFUSALS, ClearheadError) as refusal:
        detail = f"refused: {' '.join(str(refusal).split())}"
        return Finding(law=law.name, says=law.says, status="does not apply", detail=detail)
    except Exception as error:
        return Finding(law=law.name, says=law.says, status="fails", detail=error_detail(error), cases=1)
    return Finding(law=law.name, says=law.says, status="holds", cases=1)
