"""Preset worksheets with the numbers of the source lessons."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["PRESETS", "Preset"]

Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A preset worksheet.

    ``W_q``, ``W_k`` and ``W_v`` are ``[embed_dim, heads * head_dim]``, heads side by side, as in the lessons
    (``nn.Linear`` stores the transpose). The lessons draw them from a seed; they are listed to eight decimal places, as
    the four places that a lesson prints do not reproduce its next results.

    Attributes:
        name: identifier in requests.
        title: title on the page.
        source: the lesson, and the document that the lesson follows.
        scale: factor of scores, or None for ``1 / sqrt(head_dim)``.
    """

    name: str
    title: str
    source: str
    X: Table
    W_q: Table
    W_k: Table
    W_v: Table
    b_q: tuple[float, ...] | None = None
    b_k: tuple[float, ...] | None = None
    b_v: tuple[float, ...] | None = None
    causal: bool = False
    scale: float | None = None
    heads: int = 1

    def as_json(self) -> dict[str, Any]:
        """The fields for JSON, with the causal or full mask as a table."""
        places = range(len(self.X))
        allowed = [[key <= query or not self.causal for key in places] for query in places]
        return {**asdict(self), "allowed": allowed}


_X: Final = ((1.16, 0.23), (0.57, 1.36), (4.41, -2.16))
_W_Q: Final = ((0.54061037, -0.16565566), (0.58690423, 0.64955628))
_W_K: Final = ((-0.15492962, -0.34425849), (0.14268756, 0.41527155))
_W_V: Final = ((0.62334496, 0.61461449), (-0.51875341, 0.13234161))
# The second head of lesson 4, drawn after the first one from the same seed.
_W_Q_2: Final = ((0.52241677, 0.34095848), (0.09576388, -0.09983712))
_W_K_2: Final = ((0.54509860, -0.33010566), (0.10451668, 0.18024032))
_W_V_2: Final = ((-0.32578999, -0.28719729), (-0.08292443, 0.46907410))


def _side_by_side(first: Table, second: Table) -> Table:
    return tuple((*left, *right) for left, right in zip(first, second, strict=True))


PRESETS: Final = (
    Preset(
        name="lesson-0", title="Three tokens, one head (3 × 2)",
        source="Lesson 0, document 000, “Coding Self-Attention in PyTorch”: weights from seed 42",
        X=_X, W_q=_W_Q, W_k=_W_K, W_v=_W_V,
    ),
    Preset(
        name="lesson-3", title="Three tokens, causal mask (3 × 2)",
        source="Lesson 3, document 003, “Coding Masked Self-Attention in PyTorch”: lesson 0 under a causal mask",
        X=_X, W_q=_W_Q, W_k=_W_K, W_v=_W_V, causal=True,
    ),
    Preset(
        name="lesson-4", title="Three tokens, two heads (3 × 2)",
        source="Lesson 4, document 004, “Coding Encoder-Decoder Attention and Multi-Head Attention in PyTorch”: "
               "two heads drawn one after the other from seed 42",
        X=_X, W_q=_side_by_side(_W_Q, _W_Q_2), W_k=_side_by_side(_W_K, _W_K_2), W_v=_side_by_side(_W_V, _W_V_2),
        heads=2,
    ),
    Preset(
        name="lesson-1", title="Five tokens, a narrower head (5 × 4)",
        source="Lesson 1, document 001, “Focusing on a Single Token's Perspective”: weights and biases from seed 123; "
               "it divides by the root of the input's width, √4, where the paper divides by the head's, √3. It prints "
               "X rounded, so a last digit may be one off",
        X=(
            (0.5159, 0.4220, 0.5786, 0.9455), (0.8057, 0.6775, 0.6087, 0.6179), (0.6932, 0.4354, 0.0353, 0.1908),
            (0.9268, 0.5299, 0.0950, 0.5789), (0.9131, 0.0275, 0.1634, 0.3009),
        ),
        W_q=(
            (-0.20388806, -0.42602754, -0.31594354), (0.01656228, 0.36652195, 0.22644675),
            (-0.24832928, -0.36342013, -0.18474609), (0.18855679, -0.39752096, 0.18710667),
        ),
        W_k=(
            (-0.09825987, 0.16049385, 0.48262936), (-0.38143170, 0.35357177, -0.22550470),
            (0.32739538, 0.09315300, 0.15837562), (-0.11791557, 0.13672537, -0.22245806),
        ),
        W_v=(
            (0.42682290, 0.41564953, -0.35213733), (0.23875719, -0.06601977, 0.03305334),
            (0.21788353, -0.42284924, -0.09335375), (0.20583743, -0.14347446, -0.26819247),
        ),
        b_q=(-0.42436469, -0.30336183, -0.18358803), b_k=(0.35732484, 0.39932823, -0.46098614),
        b_v=(-0.04546070, 0.47370189, -0.03943771), scale=0.5,
    ),
)  # fmt: skip
