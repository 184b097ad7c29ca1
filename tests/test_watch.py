"""``clearhead.watch``: watchers observe and edit calls, and statistics leave the output bitwise identical."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead.watch import (
    Attend,
    Call,
    attend,
    attend_wanting,
    carried,
    edited,
    laid_out,
    layout_of,
    watched,
    watching,
)


class Recorder:
    """Records each call that is not silent, with statistics of its own."""

    edits = False

    def __init__(self, want: ch.Want | None = None) -> None:
        self.want = want or ch.Want()
        self.observations: list[ch.Observation] = []

    def attend(self, owner: object, call: Call, want: ch.Want, inner: Attend) -> ch.Observation:
        answer = inner(call, self.want)
        if not call.silent:
            self.observations.append(answer)
        return answer


class Doubler:
    """Doubles values."""

    def attend(self, owner: object, call: Call, want: ch.Want, inner: Attend) -> ch.Observation:
        return inner(replace(call, value=2.0 * call.value), want)


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 33, 16, generator=generator) for _ in range(3))
    return query, key, value


ALL = ch.Want(lse=True, entropy=True, received=True, top_k=3, distance=True, sink=1)


def test_attend_without_watcher_is_attention(tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    assert not watched()
    assert torch.equal(attend(None, *tensors, mask=ch.Causal()), ch.attention(*tensors, mask=ch.Causal()))


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": ch.Causal()}, {"scores": ch.Alibi(4)}, {"dropout": 0.3}, {"mask": ch.Window(3), "scale": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("gradients", [False, True])
def test_statistics_leave_output_and_random_state_unmodified(
    tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, object], gradients: bool
) -> None:
    query, key, value = (tensor.requires_grad_(gradients) for tensor in tensors)
    torch.manual_seed(0)
    wanted = ch.attention(query, key, value, **options)  # type: ignore[arg-type]
    state = torch.get_rng_state()
    torch.manual_seed(0)
    recorder = Recorder(ALL)
    with watching(recorder):
        output = attend(None, query, key, value, **options)
    assert torch.equal(output, wanted)
    assert torch.equal(torch.get_rng_state(), state)
    (observation,) = recorder.observations
    exact = ch.observe_attention(query, key, value, want=ALL, **{**options, "backend": "reference"})  # type: ignore[arg-type]
    assert observation.entropy is not None
    assert exact.entropy is not None
    torch.testing.assert_close(observation.entropy, exact.entropy, rtol=1e-5, atol=1e-5)


def test_named_backend_without_the_statistics_raises(
    tensors: tuple[Tensor, Tensor, Tensor],
) -> None:
    with watching(Recorder(ALL)), pytest.raises(ch.UnsupportedError, match="sdpa: cannot compute"):
        attend(None, *tensors, backend="sdpa")


def test_newest_watcher_is_outermost(tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    recorder = Recorder()
    with watching(Doubler()), watching(recorder):
        assert edited()
        output = attend(None, *tensors)
    torch.testing.assert_close(output, 2.0 * ch.attention(*tensors))
    assert recorder.observations[0].output is output
    with watching(recorder):
        assert watched()
        assert not edited()


def test_attend_wanting_describes_the_edited_call(tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    with watching(Doubler()):
        observation = attend_wanting(None, *tensors, want=ch.Want(rows=[0]))
    assert observation.rows is not None
    assert observation.rows.shape == (2, 4, 1, 33)
    torch.testing.assert_close(observation.output, 2.0 * ch.attention(*tensors))


def test_other_threads_are_not_watched(tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    recorder, inside = Recorder(), []
    with watching(recorder):
        thread = threading.Thread(target=lambda: inside.append((watched(), attend(None, *tensors))))
        thread.start()
        thread.join()
    assert inside[0][0] is False
    assert recorder.observations == []


def test_exception_deactivates_the_watcher(tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    with pytest.raises(ch.ShapeError), watching(Recorder()):
        attend(None, tensors[0], tensors[1][..., :3], tensors[2])
    assert not watched()


@pytest.mark.parametrize("inside", [True, False], ids=["backward inside", "backward after"])
def test_checkpoint_recomputes_edits_and_records_once(tensors: tuple[Tensor, Tensor, Tensor], inside: bool) -> None:
    query, key, value = tensors

    def run(part: Tensor) -> Tensor:
        return attend(None, query, key, part)

    def gradient(through: Callable[[Tensor], Tensor]) -> tuple[Tensor, int]:
        leaf, recorder = value.clone().requires_grad_(), Recorder()
        with watching(recorder), watching(Doubler()):
            output = through(leaf).square().sum()
            if inside:
                output.backward()
        if not inside:
            output.backward()
        assert leaf.grad is not None
        return leaf.grad, len(recorder.observations)

    wanted, calls = gradient(run)
    recomputed, checkpointed_calls = gradient(
        lambda leaf: checkpoint(run, leaf, use_reentrant=False, context_fn=carried)
    )
    assert (calls, checkpointed_calls) == (1, 1)
    assert torch.equal(recomputed, wanted)


def test_layout_is_registered_under_watchers_until_its_mask_is_deleted() -> None:
    documents = ch.Documents(lengths=[2, 1])
    laid_out(documents, 2, 4)
    assert layout_of(documents) is None
    with watching(Recorder()):
        laid_out(documents, 2, 4)
    assert layout_of(documents) == (2, 4)
    mask, gone = weakref.ref(documents), ch.Documents(lengths=[1])
    del documents
    gc.collect()
    assert mask() is None
    assert layout_of(gone) is None
