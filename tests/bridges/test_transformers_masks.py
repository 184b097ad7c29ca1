"""transformers' masks converted to clearhead masks equal the tensors of ``sdpa_mask``."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs the extra 'hf'")

from transformers import masking_utils as hf

import clearhead as ch
from clearhead.integrations.transformers.masks import MaskTensor, make_mask
from clearhead.masks.base import conjuncts

#: transformers 4 has fewer functions and takes query positions as one tensor.
TRANSFORMERS_5: Final = hasattr(hf, "bidirectional_mask_function")
needs_5 = pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 has no function that allows everything")
BATCH, KEYS = 3, 12
LEFT: Final = torch.tensor([0, 3, 5])

#: Which tokens are real, ``[batch, KEYS]``.
REAL: Final = {
    "nothing said": None,
    "all": torch.ones(BATCH, KEYS, dtype=torch.bool),
    "left": torch.arange(KEYS) >= LEFT[:, None],
    "right": torch.arange(KEYS) < (KEYS - LEFT)[:, None],
    "both": (torch.arange(KEYS) >= LEFT[:, None]) & (torch.arange(KEYS) < KEYS - 1),
    "a hole": ~torch.isin(torch.arange(KEYS), torch.tensor([4, 5])).expand(BATCH, KEYS),
    "none in one row": torch.tensor([True, False, True])[:, None].expand(BATCH, KEYS),
}
#: Queries, keys, position of the first query and of the first key: a prompt, a piece of one, a decode step with a
#: dynamic, a static and a sliding cache.
PLACES: Final = {
    "prompt": (12, 12, 0, 0),
    "second piece": (5, 12, 7, 0),
    "step": (1, 12, 11, 0),
    "prompt in static slots": (7, 20, 0, 0),
    "step in static slots": (1, 20, 11, 0),
    "step in a sliding cache": (1, 5, 11, 7),
    "piece in a sliding cache": (3, 7, 9, 5),
}
_IDS: Final = torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1, -1, 2, 2]] * 2 + [[3] * 4 + [-1] * 8])
_PACKED: Final = torch.tensor([[0] * 5 + [1] * 1 + [2] * 6, [0] * 12, [0] * 2 + [1] * 10])
_POSITIONS: Final = torch.tensor([[*range(5), 0, *range(6)], list(range(12)), [0, 1, *range(10)]])

#: Mask functions by name, and the classes that the converted masks must consist of.
FUNCTIONS: Final[dict[str, tuple[Callable[[int], Any], set[str]]]] = {
    "causal": (lambda k: hf.causal_mask_function, {"Causal"}),
    "sliding": (lambda k: hf.sliding_window_causal_mask_function(4), {"Window"}),
    "sliding of one": (lambda k: hf.sliding_window_causal_mask_function(1), {"Window"}),
    "wide sliding": (lambda k: hf.sliding_window_causal_mask_function(64), {"Causal"}),
    "sliding, later too": (lambda k: hf.sliding_window_overlay(3), {"Window"}),
    "chunks": (lambda k: hf.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.int64)), {"Causal", "Doc"}),
    "chunks from the left": (lambda k: hf.chunked_causal_mask_function(4, LEFT), {"Causal", "Doc"}),
}
if TRANSFORMERS_5:
    FUNCTIONS.update(
        {
            "bidirectional": (lambda k: hf.bidirectional_mask_function, set()),
            "sliding both ways": (lambda k: hf.sliding_window_bidirectional_mask_function(2), {"Window"}),
            "blocks": (
                lambda k: hf.or_masks(
                    hf.causal_mask_function, hf.blockwise_overlay(hf.maybe_pad_block_sequence_ids(_IDS, None, k, 0))
                ),
                {"Either"},
            ),
            "causal or anything": (
                lambda k: hf.or_masks(hf.causal_mask_function, hf.bidirectional_mask_function),
                set(),
            ),
        }
    )
if hasattr(hf, "packed_sequence_compatibility_function"):
    # transformers 5.24 has no such function.
    FUNCTIONS.update(
        {
            "packed": (
                lambda k: hf.packed_sequence_compatibility_function(hf.causal_mask_function, _POSITIONS, _PACKED),
                {"Causal", "Doc"},
            ),
            "packed sliding": (
                lambda k: hf.packed_sequence_compatibility_function(
                    hf.sliding_window_causal_mask_function(3), _POSITIONS, _PACKED
                ),
                {"Window", "Doc"},
            ),
        }
    )


def both(function: Any, place: str, real: Tensor | None) -> tuple[Tensor, Tensor]:
    q_len, k_len, q_offset, k_offset = PLACES[place]
    queries: dict[str, Any] = {"q_length": q_len, "q_offset": q_offset}
    if not TRANSFORMERS_5:
        queries = {"cache_position": torch.arange(q_len) + q_offset}
    arguments: dict[str, Any] = {
        "batch_size": BATCH,
        **queries,
        "kv_length": k_len,
        "kv_offset": k_offset,
        "mask_function": function,
        "attention_mask": real,
    }
    made, wanted = make_mask(**arguments), hf.sdpa_mask(**arguments, allow_is_causal_skip=False)
    assert made is not None
    assert wanted is not None
    return made, wanted


def queries_that_count(wanted: Tensor, place: str, real: Tensor | None) -> Tensor:
    """Rows of real tokens; rows of padded queries are undefined."""
    q_len, _, q_offset, _ = PLACES[place]
    if real is None:
        return torch.ones_like(wanted)
    queries = real[:, q_offset : q_offset + q_len]
    return queries[:, None, :, None].expand_as(wanted)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_allow_the_pairs_that_transformers_allows(name: str, place: str) -> None:
    if name.startswith("packed") and place != "prompt":
        pytest.skip("transformers packs whole prompts only")
    for padding, real in REAL.items():
        made, wanted = both(FUNCTIONS[name][0](PLACES[place][1] + PLACES[place][3]), place, real)
        assert isinstance(made, MaskTensor), padding
        assert made.shape == wanted.shape, padding
        counted = queries_that_count(wanted, place, real)
        assert torch.equal(made.table()[counted], wanted[counted]), f"{padding}: {made!r}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_convert_to_classes_that_kernels_support(name: str) -> None:
    make, words = FUNCTIONS[name]
    made, _ = both(make(KEYS), "prompt", None)
    assert isinstance(made, MaskTensor)
    parts = [] if made.mask is None else conjuncts(made.mask)
    kinds = {type(part).__name__ for part in parts}
    assert {kind[: len(word)] for kind in kinds for word in words if kind.startswith(word)} == words
    assert len(kinds) == len(words)


@needs_5
def test_contiguous_padding_converts_to_an_interval() -> None:
    kinds = {}
    for padding, real in REAL.items():
        made, _ = both(hf.bidirectional_mask_function, "prompt", real)
        assert isinstance(made, MaskTensor)
        kinds[padding] = "" if made.mask is None else repr(made.mask)
    assert kinds["nothing said"] == kinds["all"] == ""
    assert kinds["right"] == "Padding(lengths=[12, 9, 7])"
    assert kinds["left"] == "~Padding(lengths=[0, 3, 5])"
    assert kinds["both"] == "(~Padding(lengths=[0, 3, 5])) & Padding(lengths=[11, 11, 11])"
    assert kinds["a hole"] == "Dense(allowed=bool[3, 1, 1, 12], first=0)"


def test_a_decode_step_without_padding_needs_no_mask() -> None:
    for padding, place in itertools.product(("nothing said", "all"), ("step", "step in a sliding cache")):
        made, _ = both(hf.sliding_window_causal_mask_function(5), place, REAL[padding])
        assert isinstance(made, MaskTensor)
        assert (made.mask is None) == (place == "step in a sliding cache")
        made, _ = both(hf.causal_mask_function, place, REAL[padding])
        assert isinstance(made, MaskTensor)
        assert made.mask is None
    made, _ = both(hf.causal_mask_function, "step in static slots", REAL["all"])
    assert isinstance(made, MaskTensor)
    assert repr(made.mask) == "Causal()"


def test_a_user_mask_function_is_evaluated_everywhere() -> None:
    wanted = hf.and_masks(hf.causal_mask_function, lambda batch, head, q, k: (q - k) % 2 == 0)
    made, table = both(wanted, "prompt", REAL["left"])
    assert type(made) is Tensor
    assert torch.equal(made, table)


@needs_5
def test_a_mask_that_allows_everything_is_none() -> None:
    for real in (None, REAL["all"]):
        arguments: dict[str, Any] = {"mask_function": hf.bidirectional_mask_function, "attention_mask": real}
        assert make_mask(BATCH, KEYS, KEYS, **arguments, allow_is_bidirectional_skip=True) is None
        made = make_mask(BATCH, KEYS, KEYS, **arguments)
        assert isinstance(made, MaskTensor)
        assert made.mask is None
        assert bool(made.table().all())


def test_a_mask_read_as_a_tensor_takes_effect() -> None:
    made = make_mask(2, 4, 4, attention_mask=torch.tensor([[True] * 4, [False] + [True] * 3]))
    assert isinstance(made, MaskTensor)
    queries = 4 if TRANSFORMERS_5 else torch.arange(4)
    wanted = hf.sdpa_mask(2, queries, 4, attention_mask=torch.tensor([[True] * 4, [False] + [True] * 3]))
    assert not isinstance(made.meaning(), ch.Dense)
    assert "Causal() & (~Padding" in repr(made)
    assert type(made[:, :, 1:] & True) is Tensor
    assert torch.equal(made[:, :, 1:], wanted[:, :, 1:])
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            made[:, :, 0] = False
    meaning = made.meaning()
    assert isinstance(meaning, ch.Dense)
    assert not bool(meaning.dense(4, 4)[:, :, 0].any())
    assert torch.equal(meaning.dense(4, 4)[:, :, 1:], wanted[:, :, 1:])
