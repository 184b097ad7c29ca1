"""torch's exporters of models without what they say."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_exporter"]


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Context without the warnings and log records of torch's exporters."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
