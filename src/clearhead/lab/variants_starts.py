"""Presets of the tab "Variants", as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["STARTS", "Start"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """A preset variant, as the page sends it.

    Attributes:
        name: the title on the page.
        source: where the variant is from.
        head: the head that shows its effect best.
        mask: the parts of the mask.
        rules: the score rules.
    """

    name: str
    source: str
    head: str
    mask: tuple[Mapping[str, Any], ...] = ()
    rules: tuple[Mapping[str, Any], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def _part(kind: str, join: str = "&", negated: bool = False, **values: Any) -> dict[str, Any]:
    return {"kind": kind, "values": values, "join": join, "not": negated}


STARTS: Final = (
    Start(
        name="Causal", source="Vaswani et al. 2017, section 3.2.3", head="near tokens", mask=(_part("Causal"),),
    ),
    Start(
        name="Sliding window", source="Longformer, Beltagy et al. 2020, section 3.1; causal as in Mistral 7B",
        head="same word", mask=(_part("Causal"), _part("Window", before=5, after=0)),
    ),
    Start(
        name="Window and global tokens", source="Longformer, Beltagy et al. 2020, section 3.1", head="same word",
        mask=(_part("Window", before=3, after=3), _part("Global", "|", num_tokens=2)),
    ),
    Start(
        name="Prefix language model", source="Raffel et al. 2020, section 3.2.1", head="near tokens",
        mask=(_part("Causal"), _part("Prefix", "|", length=8)),
    ),
    Start(
        name="Packed documents", source="attention within each document of a packed batch", head="same word",
        mask=(_part("Documents", lengths=[7, 5, 12]), _part("Causal")),
    ),
    Start(
        name="ALiBi", source="Press et al. 2022, section 3", head="uniform", mask=(_part("Causal"),),
        rules=(_part("Alibi", slope=0.25),),
    ),
    Start(
        name="Soft cap", source="Gemma 2 report, section 2, with a lower cap to show its effect", head="same word",
        mask=(_part("Causal"),), rules=(_part("SoftCap", cap=2.0),),
    ),
    Start(
        name="Sink", source="gpt-oss model card 2025; Miller 2023", head="near tokens", mask=(_part("Causal"),),
        rules=(_part("Sink", logit=2.0),),
    ),
    Start(
        name="Typed formulas", source="typed, parsed, never run as code", head="uniform",
        mask=(_part("Expression", formula="k_pos <= q_pos and (q_pos - k_pos < 4 or k_pos % 4 == 0)"),),
        rules=(_part("Expression", formula="score - 0.2 * min(q_pos - k_pos, 8)"),),
    ),
)  # fmt: skip
