"""Laws of bits of whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clearhead.choices import overrides, set_overrides
from clearhead.observe import observe
from clearhead.statistics import Want
from clearhead.train.gradient_order import GradientSum
from clearhead.verify.bit_comparison import BitComparison
from clearhead.verify.law import Broken, NotApplicable
from clearhead.verify.laws.invariance import difference, threads
from clearhead.verify.model_under_test import ModelCall, ModelUnderTest, Piece, chunked, rows_of

__all__ = ["MODEL_LAWS", "ModelLaw", "upstream"]

#: Tokens that are generated, and the seed of sampling.
_NEW_TOKENS, _SEED = 6, 3


@dataclass(frozen=True, kw_only=True)
class ModelLaw:
    """One property of a model's bits.

    Attributes:
        name: a short name.
        says: the law as a sentence.
        check: raises ``Broken`` or ``NotApplicable``, or returns.
    """

    name: str
    says: str
    check: Callable[[BitComparison], None]


def _check_batch(trial: BitComparison) -> None:
    trial.compare("alone and in a batch", trial.alone(trial.equal), rows_of(trial.lengths, trial.equal))


def _check_place(trial: BitComparison) -> None:
    whole = rows_of(trial.lengths, trial.equal)
    for shift in range(1, len(trial.equal)):
        order = [*trial.equal[shift:], *trial.equal[:shift]]
        trial.compare("at another place", whole, rows_of(trial.lengths, order))
        trial.compare("in a smaller batch", whole, rows_of(trial.lengths, trial.equal[shift:]))


def _padded(side: str) -> Callable[[BitComparison], None]:
    def check(trial: BitComparison) -> None:
        for order in (trial.different, trial.different[::-1]):
            padded = rows_of(trial.lengths, order, side)
            trial.compare(f"alone and padded to the {side}", trial.alone(trial.different), padded)

    return check


def _check_packing(trial: BitComparison) -> None:
    for order in (trial.different, trial.different[::-1]):
        packed = ModelCall(tuple(Piece(place, 0, trial.lengths[place]) for place in order), packed=True)
        alone = trial.alone(trial.different)
        one, other = trial.run(alone), trial.run([packed])
        for place in trial.different:
            if not torch.allclose(one.results[place].float(), other.results[place].float(), atol=0.1, rtol=0.1):
                raise NotApplicable("a packed row is not its sequences one by one: the model takes none")
        trial.compare("alone and packed", alone, [packed])


def _check_chunks(trial: BitComparison) -> None:
    place = trial.different[0]
    length = trial.lengths[place]
    for ends in ([length], [length // 2, length], [1, length], [length - 1, length], [3, 16, 17, length]):
        cut = sorted({end for end in ends if 0 < end <= length})
        trial.compare(f"whole and in {len(cut)} chunks", trial.alone([place]), chunked([place], cut))


def _check_decoding(trial: BitComparison) -> None:
    place = trial.different[min(1, len(trial.different) - 1)]
    one_by_one = chunked([place], range(1, trial.lengths[place] + 1))
    trial.compare("prefilled and decoded token by token", trial.alone([place]), one_by_one)


def _check_batched_decoding(trial: BitComparison) -> None:
    length = trial.lengths[trial.equal[0]]
    together = chunked([*trial.equal], [length // 2, *range(length // 2 + 1, length + 1)])
    trial.compare("prefilled and decoded in a batch", trial.alone(trial.equal), together)


def _under(
    what: str, setting: Callable[[ModelUnderTest], AbstractContextManager[object]]
) -> Callable[[BitComparison], None]:
    """A check that other settings of the process, or of the model, leave the bits."""

    def check(trial: BitComparison) -> None:
        calls = [*rows_of(trial.lengths, trial.equal), *trial.alone(trial.different)]
        trial.compare(what, calls, calls, setting)

    return check


def _check_threads(trial: BitComparison) -> None:
    for count in (1, 3):
        _under(f"on {count} threads", lambda subject, count=count: threads(count))(trial)  # type: ignore[misc]


@contextmanager
def _op_by_op() -> Iterator[None]:
    before = set_overrides(replace(overrides(), fused=False))
    try:
        yield
    finally:
        set_overrides(before)


def _check_observed(trial: BitComparison) -> None:
    _under("observed", lambda subject: observe(subject.model, Want(entropy=True)))(trial)


def upstream(output: Tensor, seed: int) -> Tensor:
    drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed))
    return drawn.to(output)


def _backward(trial: BitComparison, order: list[int]) -> None:
    """A backward pass of one batch of sequences of one length."""
    (call,) = rows_of(trial.lengths, order)
    with torch.enable_grad():
        output, _ = trial.subject.forward(trial.subject.batch(trial.sequences, call), call, None)
        if not output.requires_grad:
            raise NotApplicable("its output carries no gradient")
        output.backward(torch.stack([upstream(row, place) for row, place in zip(output, order, strict=True)]))


def _gradients_of_states(trial: BitComparison, order: list[int]) -> dict[int, Tensor]:
    """Gradients of the first states of sequences of one length, in one batch."""
    subject, states = trial.subject, list[Tensor]()
    (call,) = rows_of(trial.lengths, order)
    batch, module = subject.batch(trial.sequences, call), subject.inputs()

    def keep(module: object, args: object, output: Tensor) -> Tensor:
        leaf = output.detach().requires_grad_() if not output.requires_grad else output
        leaf.retain_grad()
        states.append(leaf)
        return leaf

    if module is None:
        batch.requires_grad_()
        states.append(batch)
    handle = nullcontext() if module is None else module.register_forward_hook(keep)
    with handle, torch.enable_grad():
        output, _ = subject.forward(batch, call, None)
        if not output.requires_grad:
            raise NotApplicable("its output carries no gradient")
        output.backward(torch.stack([upstream(row, place) for row, place in zip(output, order, strict=True)]))
    if not states or states[0].grad is None:
        raise NotApplicable("its first states carry no gradient")
    parts = ((place, call.part(states[0].grad, row)) for row, place in enumerate(order))
    return {place: part for place, part in parts if part is not None}


@contextmanager
def _own_gradients(trial: BitComparison) -> Iterator[dict[str, torch.nn.Parameter]]:
    """The parameters, without gradients; those that they had are restored."""
    named = {name: part for name, part in trial.subject.model.named_parameters() if part.requires_grad}
    before = {name: part.grad for name, part in named.items()}
    try:
        for part in named.values():
            part.grad = None
        yield named
    finally:
        for name, part in named.items():
            part.grad = before[name]


def _check_gradients(trial: BitComparison) -> None:
    with _own_gradients(trial):
        whole = _gradients_of_states(trial, [*trial.equal])
        for place in trial.equal:
            error = difference(_gradients_of_states(trial, [place])[place], whole[place])
            if error is not None:
                raise Broken(f"the gradient of a sequence's first states differs by {error:.2g} alone and in a batch")


def _check_micro_batches(trial: BitComparison) -> None:
    def summed(parts: int) -> dict[str, Tensor]:
        """Gradients of so many micro-batches, added in the order in which one batch adds those of sequences."""
        with _own_gradients(trial) as named:
            total = GradientSum(trial.subject.model, len(trial.equal), parts=parts)
            with total:
                for rows in total.nodes:
                    with total.node(rows):
                        _backward(trial, [*trial.equal[rows.start : rows.stop]])
            total.store()
            return {name: part.grad.clone() for name, part in named.items() if part.grad is not None}

    whole = summed(1)
    if not whole:
        raise NotApplicable("no parameter requires a gradient")
    for parts in sorted({2, 3, len(trial.equal)} & {*range(2, len(trial.equal) + 1)}):
        errors = {name: difference(part, whole[name]) for name, part in summed(parts).items()}
        wrong = {name: error for name, error in errors.items() if error is not None}
        if wrong:
            name = max(wrong, key=wrong.__getitem__)
            raise Broken(
                f"in {parts} micro-batches, gradients of {len(wrong)} of {len(whole)} parameters differ, that of "
                f"{name} by {wrong[name]:.2g}"
            )


def _generated(seed: int | None) -> Callable[[BitComparison], None]:
    def check(trial: BitComparison) -> None:
        length = trial.subject.longest - _NEW_TOKENS
        prompts = [trial.sequences[place][:length] for place in trial.different]
        together = trial.subject.generate(prompts, _NEW_TOKENS, seed)
        for place, prompt in enumerate(prompts):
            (alone,) = trial.subject.generate([prompt], _NEW_TOKENS, seed)
            which = f"alone and in a batch, a prompt of {len(prompt)} tokens"
            if not torch.equal(alone.ids, together[place].ids):
                raise Broken(f"{which} is continued otherwise")
            one, other = alone.logits, together[place].logits
            error = None if one is None or other is None else difference(one, other)
            if error is not None:
                raise Broken(f"{which} has the same text, but logits that differ by {error:.2g}")

    return check


def _with_autograd(subject: ModelUnderTest) -> AbstractContextManager[object]:
    return torch.enable_grad()


MODEL_LAWS: tuple[ModelLaw, ...] = (
    ModelLaw(name="batch", says="a sequence has the same bits alone and in a batch", check=_check_batch),
    ModelLaw(name="place", says="a sequence has the same bits at any place of any batch", check=_check_place),
    ModelLaw(name="padding right", says="a sequence has the same bits alone and padded right", check=_padded("right")),
    ModelLaw(name="padding left", says="a sequence has the same bits alone and padded left", check=_padded("left")),
    ModelLaw(name="packing", says="a sequence has the same bits alone and packed with others", check=_check_packing),
    ModelLaw(name="chunks", says="a prompt has the same bits whole and in chunks of any sizes", check=_check_chunks),
    ModelLaw(name="decoding", says="decoding token by token gives the bits of prefill", check=_check_decoding),
    ModelLaw(
        name="decoding in a batch", says="decoding in a batch gives the bits of prefill", check=_check_batched_decoding
    ),
    ModelLaw(name="threads", says="any number of threads gives the same bits", check=_check_threads),
    ModelLaw(
        name="op by op",
        says="layers have the same bits fused and op by op",
        check=_under("op by op", lambda subject: _op_by_op()),
    ),
    ModelLaw(name="observed", says="an observed model has the same bits", check=_check_observed),
    ModelLaw(
        name="autograd",
        says="a call that autograd records has the same bits",
        check=_under("recorded by autograd", _with_autograd),
    ),
    ModelLaw(
        name="gradients",
        says="the gradient of a sequence's first states has the same bits alone and in a batch",
        check=_check_gradients,
    ),
    ModelLaw(
        name="micro-batches",
        says="gradients of parameters have the same bits for micro-batches of 1, 2 and 4, added as ch.train adds them",
        check=_check_micro_batches,
    ),
    ModelLaw(name="greedy text", says="a prompt is continued alike alone and in a batch", check=_generated(None)),
    ModelLaw(
        name="sampled text",
        says="a prompt is continued alike from a seed alone and in a batch",
        check=_generated(_SEED),
    ),
)
"""Laws of models, in the order in which they are tried."""
