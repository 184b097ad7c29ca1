"""Masks of transformers read as ours: what ``sdpa_mask`` makes as numbers, entry by entry."""

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

#: transformers 4 has fewer functions, and is given the positions of queries in one tensor.
TRANSFORMERS_5: Final = hasattr(hf, "bidirectional_mask_function")
needs_5 = pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 has no function that allows everything")
BATCH, SEEN = 3, 12
LEFT: Final = torch.tensor([0, 3, 5])

#: Which tokens are real, ``[batch, SEEN]``.
REAL: Final = {
    "nothing said": None,
    "all": torch.ones(BATCH, SEEN, dtype=torch.bool),
    "left": torch.arange(SEEN) >= LEFT[:, None],
    "right": torch.arange(SEEN) < (SEEN - LEFT)[:, None],
    "both": (torch.arange(SEEN) >= LEFT[:, None]) & (torch.arange(SEEN) < SEEN - 1),
    "a hole": ~torch.isin(torch.arange(SEEN), torch.tensor([4, 5])).expand(BATCH, SEEN),
    "none in one row": torch.tensor([True, False, True])[:, None].expand(BATCH, SEEN),
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

#: Functions made for the keys of a call, by a name; the words that our masks must be made of.
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
    """Rows of real tokens; what a padded query sees is nobody's business."""
    q_len, _, q_offset, _ = PLACES[place]
    if real is None:
        return torch.ones_like(wanted)
    own = real[:, q_offset : q_offset + q_len]
    return own[:, None, :, None].expand_as(wanted)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_allow_what_transformers_allows(name: str, place: str) -> None:
    if name.startswith("packed") and place != "prompt":
        pytest.skip("transformers packs whole prompts only")
    for padding, real in REAL.items():
        made, wanted = both(FUNCTIONS[name][0](PLACES[place][1] + PLACES[place][3]), place, real)
        assert isinstance(made, MaskTensor), padding
        assert made.shape == wanted.shape, padding
        counted = queries_that_count(wanted, place, real)
        assert torch.equal(made.table()[counted], wanted[counted]), f"{padding}: {made!r}"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masks_are_made_of_what_kernels_know(name: str) -> None:
    make, words = FUNCTIONS[name]
    made, _ = both(make(SEEN), "prompt", None)
    assert isinstance(made, MaskTensor)
    parts = [] if made.mask is None else conjuncts(made.mask)
    kinds = {type(part).__name__ for part in parts}
    assert {kind[: len(word)] for kind in kinds for word in words if kind.startswith(word)} == words
    assert len(kinds) == len(words)


@needs_5
def test_padding_is_a_run_of_keys_where_it_is_one() -> None:
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


def test_a_decode_step_without_padding_asks_nothing_of_the_kernel() -> None:
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


def test_a_function_of_the_users_is_asked_for_every_place() -> None:
    wanted = hf.and_masks(hf.causal_mask_function, lambda batch, head, q, k: (q - k) % 2 == 0)
    made, table = both(wanted, "prompt", REAL["left"])
    assert type(made) is Tensor
    assert torch.equal(made, table)


@needs_5
def test_nothing_is_said_where_everything_is_allowed() -> None:
    for real in (None, REAL["all"]):
        arguments: dict[str, Any] = {"mask_function": hf.bidirectional_mask_function, "attention_mask": real}
        assert make_mask(BATCH, SEEN, SEEN, **arguments, allow_is_bidirectional_skip=True) is None
        made = make_mask(BATCH, SEEN, SEEN, **arguments)
        assert isinstance(made, MaskTensor)
        assert made.mask is None
        assert bool(made.table().all())


def test_a_mask_that_is_read_gives_numbers_which_then_count() -> None:
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
