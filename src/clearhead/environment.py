"""The environment variables of clearhead: the values of each, and a one-line error for any other."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from clearhead.errors import UnsupportedError

__all__ = ["INSTRUCTION_SETS", "VARIABLES", "Variable", "value_of"]

#: The instruction sets for which the kernels can be built, on x86, on ARM and anywhere.
INSTRUCTION_SETS: Final = (
    "amx",
    "avx512bf16",
    "avx512vnni",
    "avx512",
    "avxvnni",
    "avx2",
    "neonbf16",
    "neondot",
    "neon",
    "baseline",
)
_GEMMS: Final = ("torch", "onednn", "native")


@dataclass(frozen=True)
class Variable:
    """One environment variable.

    Attributes:
        name: its name.
        accepts: whether a text, which is not empty, is one of its values.
        must: the rule in words.
        then: what to do about another value.
        function: the function that an error names.
    """

    name: str
    accepts: Callable[[str], bool]
    must: str
    then: str
    function: str = "clearhead"

    def error(self, got: str, must: str = "") -> UnsupportedError:
        """The error about a value; ``must`` replaces the rule."""
        return UnsupportedError.about(self.function, self.name, must=must or self.must, got=got, then=self.then)


def _one_of(names: tuple[str, ...]) -> str:
    return f"be one of {', '.join(names)}"


VARIABLES: Final = {
    one.name: one
    for one in (
        Variable(
            "CLEARHEAD_NATIVE", ("0", "1").__contains__, "be 0 or 1", "Unset it to run by the CPU kernels, 0 does not."
        ),
        Variable(
            "CLEARHEAD_ISA",
            INSTRUCTION_SETS.__contains__,
            _one_of(INSTRUCTION_SETS),
            "Unset it for the processor's best set.",
        ),
        Variable(
            "CLEARHEAD_PROJECTION",
            _GEMMS.__contains__,
            _one_of(_GEMMS),
            "Unset it for the choice of the table of processors.",
            function="project",
        ),
        Variable(
            "CLEARHEAD_INVARIANT",
            ("0", "1", "portable").__contains__,
            "be 0, 1 or portable",
            "1 computes the same bits in any batch, in chunks and token by token; portable on any instruction set too.",
        ),
        Variable(
            "CLEARHEAD_KEEP_MEMORY",
            lambda text: text.isascii() and text.isdigit() and len(text) <= 9,
            "be a whole number of MiB, 0 or more",
            "Unset it to keep up to an eighth of the machine's memory.",
        ),
    )
}


def value_of(name: str) -> str:
    """The value of a variable without surrounding blanks; empty if it is not set.

    Raises:
        UnsupportedError: it is not one of the variable's values.

    >>> value_of("CLEARHEAD_NATIVE") in ("", "0", "1")
    True
    """
    text = os.environ.get(name, "").strip()
    if text and not VARIABLES[name].accepts(text):
        raise VARIABLES[name].error(repr(text)[:80])
    return text
