"""The jobs of all tabs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clearhead.lab import look, variants, worked
from clearhead.lab.limits import Limits
from clearhead.lab.models import Models
from clearhead.lab.views import Views
from clearhead.lab.work import Work

__all__ = ["works_of"]


def works_of(folders: Sequence[Path], views: Views, limits: Limits) -> tuple[Work, ...]:
    """Every kind of job that the page can request."""
    return (*worked.WORKS, *look.works_of(Models(folders, limits), views, limits), *variants.WORKS)
