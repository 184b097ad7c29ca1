"""Fail if files of clearhead import each other in a cycle: ``python tools/import_cycles.py``.

Imports inside functions count; imports under TYPE_CHECKING do not, because Python never runs them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter

import grimp

__all__ = ["find_cycle", "main"]


def find_cycle(imports: Mapping[str, Set[str]]) -> list[str]:
    """A cycle of files, each imported by the next, or an empty list.

    >>> find_cycle({"a": {"b"}, "b": {"c"}, "c": set()})
    []
    >>> sorted(find_cycle({"a": {"b"}, "b": {"a"}})[1:])
    ['a', 'b']
    """
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main() -> int:
    graph = grimp.build_graph("clearhead", exclude_type_checking_imports=True, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    cycle = find_cycle(imports)
    if cycle:
        print(f"imports in a cycle: {' <- '.join(cycle)}")
    # The package imports its public names from all modules on first use.
    importers = sorted(graph.find_modules_that_directly_import("clearhead"))
    if importers:
        print(f"imports of the package itself, not of the module that defines the name: {', '.join(importers)}")
    return 1 if cycle or importers else 0


if __name__ == "__main__":
    sys.exit(main())
