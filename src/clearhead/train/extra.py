"""The optional packages of training, imported when first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from clearhead.errors import UnsupportedError

__all__ = ["need"]


def need(module: str) -> Any:
    """Import a package of the extra ``train``; raises an error with the extra's name if it is not installed."""
    try:
        return import_module(module)
    except ImportError as error:
        raise UnsupportedError("clearhead train: needs the extra 'train'; install clearhead[train].") from error
