"""Memory of large results that are gone, cached for results to come.

glibc maps large memory anew each time, and a page that a process has not had yet costs a microsecond or two: a
training step of a few dozen large results waits longer for pages than for some of its GEMMs. So the library caches the
memory of large results for others of the same size: an eighth of the machine's memory at most, of which all but 256
MiB is the system's to take back whenever it needs some (``MADV_FREE``). ``CLEARHEAD_KEEP_MEMORY`` bounds it, in MiB; 0
caches nothing.
"""

from __future__ import annotations

from clearhead.ops.library import library, memory_bound

__all__ = ["kept_memory", "limit", "release_memory"]


def kept_memory() -> int:
    """Bytes that are kept for results to come."""
    loaded = library()
    return 0 if loaded is None else int(loaded.ch_kept_memory())


def release_memory() -> int:
    """Give the system back what is kept for results to come.

    The CPU kernels keep the memory of large results that are gone, an eighth of the machine's at most, for results to
    come; the system may take back all but 256 MiB of it at any time.

    Returns:
        The bytes that were kept.

    >>> import clearhead as ch
    >>> ch.release_memory() >= 0
    True
    >>> ch.release_memory()
    0
    """
    cached = kept_memory()
    if (loaded := library()) is not None:
        loaded.ch_keep_memory(loaded.ch_keep_memory(0))
    return cached


def limit() -> int:
    """The most bytes that are kept for results to come.

    Raises:
        UnsupportedError: ``CLEARHEAD_KEEP_MEMORY`` is no number of MiB.
    """
    loaded, most = library(), memory_bound()
    return 0 if loaded is None or most == 0 else int(loaded.ch_keep_memory(-1))
