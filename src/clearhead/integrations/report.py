"""What ``swap`` and ``unswap`` did, row by row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

__all__ = ["BEFORE", "OUTSIDE", "OUTSIDE_IN_TRAINING", "How", "SwapReport", "SwapRow"]

How = Literal["fused", "native", "left"]

#: The reason of a row for a module that an earlier ``swap`` replaced.
BEFORE: Final = "swapped before"
#: The reason of a row for a module whose bits torch decides, while ``ch.set_invariant(True)`` is on.
OUTSIDE: Final = "outside the promise of ch.set_invariant: torch computes it"
#: That of a module whose output keeps the promise, and whose parameters' gradients torch adds.
OUTSIDE_IN_TRAINING: Final = "outside the promise of ch.set_invariant in training: torch adds its parameters' gradients"


@dataclass(frozen=True)
class SwapRow:
    """A module of the model. Rows are equal if they are of the same module.

    Attributes:
        path: its name in ``model.named_modules()``; empty for the model itself.
        class_name: the name of its class.
        how: ``"fused"`` if its calls are one operation, ``"native"`` if it computes with clearhead's operations,
            ``"left"`` if it was not replaced.
        difference: the largest relative difference, of outputs and gradients, from the original in a trial; None
            without a trial.
        reason: why it was left, or how it is native.
    """

    path: str
    class_name: str
    how: How = field(default="native", compare=False)
    difference: float | None = field(default=None, compare=False)
    reason: str = field(default="", compare=False)

    @property
    def name(self) -> str:
        """The same as ``path``."""
        return self.path

    @property
    def kind(self) -> str:
        """The same as ``class_name``."""
        return self.class_name

    @property
    def why(self) -> str:
        """The same as ``reason``."""
        return self.reason


@dataclass(frozen=True)
class SwapReport:
    """What ``swap`` or ``unswap`` did; ``str`` of it is a table that counts equal rows.

    Attributes:
        rows: one per module that was replaced, or that attends and was left.
    """

    rows: tuple[SwapRow, ...] = ()

    @property
    def replaced(self) -> tuple[SwapRow, ...]:
        """Modules that changed."""
        return tuple(row for row in self.rows if row.how != "left" and not row.reason.endswith(BEFORE))

    @property
    def left(self) -> tuple[SwapRow, ...]:
        """Modules that attend, or contain some that do, and did not change."""
        return tuple(row for row in self.rows if row.how == "left")

    @property
    def outside(self) -> tuple[SwapRow, ...]:
        """Modules whose bits torch decides although ``ch.set_invariant(True)`` was on in ``swap``; else empty."""
        return tuple(row for row in self.rows if row.reason.startswith(OUTSIDE))

    @property
    def before(self) -> tuple[SwapRow, ...]:
        """Modules that an earlier ``swap`` had replaced."""
        return tuple(row for row in self.rows if row.reason.endswith(BEFORE))

    def __str__(self) -> str:
        groups: dict[tuple[str, str, str], list[SwapRow]] = {}
        for row in self.rows:
            groups.setdefault((row.how, row.class_name, row.reason), []).append(row)
        if not groups:
            return "no module of the model attends, or was swapped"
        order = ("fused", "native", "left")
        lines = [
            (how, str(len(rows)), name, _remark(rows, reason))
            for (how, name, reason), rows in sorted(groups.items(), key=lambda item: order.index(item[0][0]))
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(3)]
        return "\n".join(
            f"{how:<{widths[0]}}  {count:>{widths[1]}} {name:<{widths[2]}}  {remark}".rstrip()
            for how, count, name, remark in lines
        )


def _remark(rows: list[SwapRow], reason: str) -> str:
    differences = [row.difference for row in rows if row.difference is not None]
    agrees = f"agrees to {max(differences):.1e}" if differences and rows[0].how != "left" else ""
    return ", ".join(part for part in (agrees, reason) if part)
