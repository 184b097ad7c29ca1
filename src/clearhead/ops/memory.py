"""The allocator's cache of freed results.

glibc maps large memory anew each time, and a new page costs a microsecond or two: a training step with a few dozen
large results waits longer for pages than for some of its GEMMs. So the library caches the memory of freed results for
results of the same size: at most an eighth of the machine's memory, of which the system may reclaim all but 256 MiB
at any time (``MADV_FREE``). ``CLEARHEAD_KEEP_MEMORY`` is the bound in MiB; 0 caches nothing.
"""

from __future__ import annotations

from clearhead.ops.library import library, memory_bound

__all__ = ["kept_memory", "limit", "release_memory"]


def kept_memory() -> int:
    """Bytes in the cache of freed results."""
    loaded = library()
    return 0 if loaded is None else int(loaded.ch_kept_memory())


def release_memory() -> int:
    """Return the cache of freed results to the system.

    The CPU kernels cache the memory of large freed results, at most an eighth of the machine's memory, for later
    results. The system may reclaim all but 256 MiB of it at any time.

    Returns:
        The number of bytes that were cached.

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
    """The bound of the cache of freed results, in bytes.

    Raises:
        UnsupportedError: ``CLEARHEAD_KEEP_MEMORY`` is not a number of MiB.
    """
    loaded, most = library(), memory_bound()
    return 0 if loaded is None or most == 0 else int(loaded.ch_keep_memory(-1))
