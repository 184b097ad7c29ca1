"""The options of clearhead bench: what they mean, and which are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clearhead.errors import ShapeError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from clearhead.benchmark.rows import SuiteRow
    from clearhead.benchmark.selection import Selection
    from clearhead.benchmark.sparse_rows import SparseRow

__all__ = ["DTYPES", "FUNCTION", "dtypes_of", "selection_of", "shape_of", "suite_names", "time_budget"]

FUNCTION = "bench"
DTYPES = ("float32", "bfloat16", "float16")
_LONGEST = 2**15
_MOST_NUMBERS = 2**27
#: Rounds, and seconds after which a setting's rounds stop.
_BUDGET, _SUITE_BUDGET, _QUICK_BUDGET = (15, 2.0), (21, 10.0), (5, 0.25)


def selection_of(
    dtypes: Sequence[torch.dtype],
    only: Sequence[str] | None,
    against: str | None,
    names: Sequence[str],
    *,
    with_grid: bool,
    with_sparse: bool,
) -> Selection:
    """The rows and the peers that ``--only`` and ``--against`` name; each text has to name one."""
    from clearhead.benchmark import SUITES, grid_rows
    from clearhead.benchmark.selection import Selection
    from clearhead.benchmark.sparse_rows import sparse_rows
    from clearhead.benchmark.suites import PEERS_SUITE

    if only and not (names or with_grid or with_sparse):
        raise UnsupportedError.about(
            FUNCTION, "--only", must="be used with --suite, --grid or --sparse", got="none of them", then="Add one."
        )
    selection = Selection(dtypes=dtypes, only=only or (), against=_peer_names(against, names))
    rows: list[SuiteRow | SparseRow] = [row for name in names for row in SUITES[name].rows()]
    rows += grid_rows() if with_grid else []
    rows += sparse_rows() if with_sparse else []
    for text in selection.without_rows(rows):
        raise UnsupportedError.about(
            FUNCTION,
            "--only",
            must="be part of a row's title",
            got=repr(text)[:80],
            then=f"'clearhead bench --list --suite {names[0] if names else PEERS_SUITE}' shows titles.",
        )
    return selection


def _peer_names(text: str | None, names: Sequence[str]) -> list[str]:
    """What ``--against`` names: peers, or parts of their names."""
    from clearhead.benchmark.selection import peer_names
    from clearhead.benchmark.suites import PEERS_SUITE

    if text is None:
        return []
    if PEERS_SUITE not in names:
        raise UnsupportedError.about(
            FUNCTION,
            "--against",
            must=f"be used with --suite {PEERS_SUITE}",
            got=", ".join(names) or "no suite",
            then="Leave it out.",
        )
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not part or not any(part in name for name in peer_names()):
            raise UnsupportedError.about(
                FUNCTION,
                "--against",
                must="name peers, or parts of their names",
                got=repr(part)[:80],
                then=f"They are {', '.join(peer_names())}.",
            )
    return parts


def suite_names(text: str | None, shape: list[str] | None, with_grid: bool) -> list[str]:
    if text is None and not with_grid:
        return []
    if shape:
        raise UnsupportedError.about(
            FUNCTION, "--shape", must="not be used with --suite or --grid", got="both", then="Leave one out."
        )
    from clearhead.benchmark import SUITES

    names = [name.strip() for name in text.split(",")] if text is not None else []
    for name in names:
        if name not in (*SUITES, "all"):
            raise UnsupportedError.about(
                FUNCTION,
                "--suite",
                must=f"contain only {', '.join(SUITES)}, all",
                got=repr(name)[:80],
                then="'clearhead bench --list' describes them.",
            )
    named = [each for name in names for each in ([s for s in SUITES if SUITES[s].in_all] if name == "all" else [name])]
    return list(dict.fromkeys(named))


def shape_of(text: str) -> tuple[int, int, int, int]:
    parts = text.replace("x", ",").split(",")
    sizes = [int(part) for part in parts if part.strip().isascii() and part.strip().isdigit()]
    if len(parts) != 4 or len(sizes) != 4 or min(sizes) < 1:
        raise ShapeError.about(
            FUNCTION,
            "--shape",
            must="be four whole numbers of at least 1",
            got=repr(text)[:80],
            then="Write batch,heads,length,head_dim, as in 1,8,512,64.",
        )
    batch, heads, length, head_dim = sizes
    if length > _LONGEST or batch * heads * length * head_dim > _MOST_NUMBERS:
        raise ShapeError.about(
            FUNCTION,
            "--shape",
            must=f"have a length of at most {_LONGEST} and {_MOST_NUMBERS} numbers in all",
            got=repr(text)[:80],
            then="Measure a smaller one.",
        )
    return batch, heads, length, head_dim


def dtypes_of(text: str) -> list[torch.dtype]:
    import torch

    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in DTYPES:
            raise UnsupportedError.about(
                FUNCTION,
                "--dtype",
                must=f"contain only {', '.join(DTYPES)}",
                got=repr(name)[:80],
                then="Separate them by commas.",
            )
    return [getattr(torch, name) for name in dict.fromkeys(names)]


def time_budget(repeats: int | None, *, quick: bool, with_suites: bool) -> tuple[int, float | None]:
    """The rounds of a setting or row, and the seconds after which they stop."""
    if repeats is None:
        return _QUICK_BUDGET if quick else _SUITE_BUDGET if with_suites else _BUDGET
    if repeats < 1:
        raise ShapeError.about(FUNCTION, "--repeats", must="be at least 1", got=repeats, then="Use 5 or more.")
    return repeats, None
