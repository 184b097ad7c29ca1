"""Locks of a process that may fork."""

from __future__ import annotations

import os
import threading

__all__ = ["lock_for_process"]


def lock_for_process() -> threading.Lock:
    """A lock that a child made by a fork finds open.

    A child made while another thread holds it would otherwise wait for a thread that it does not have.

    >>> with lock_for_process() as held:
    ...     held
    True
    """
    lock = threading.Lock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock
