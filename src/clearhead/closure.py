"""The variables of a user's function: the tensors that it reaches, and a copy of the function with their values."""

from __future__ import annotations

import dis
import inspect
import itertools
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any, Final, Self, TypeAlias

import torch
from torch import Tensor

from clearhead.torch_private import break_graph, constant_when_compiled, is_compiled_function, tensors_of

__all__ = ["Bound", "bound_now", "closed_over", "find_learned", "learned_by"]

#: Longer collections are not searched for learned tensors.
_MOST_MEMBERS: Final = 1024
_WRITES_GLOBALS: Final = {dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL")}
_WRITES_CELLS: Final = {dis.opmap[name] for name in ("STORE_DEREF", "DELETE_DEREF")}
_COLLECTIONS: Final = (dict, list, tuple, set, frozenset)
#: Py_TPFLAGS_HEAPTYPE.
_WRITTEN_IN_PYTHON: Final = 1 << 9
#: Builtins that look up global variables whose names are not in the function's code.
_LOOKS_UP: Final = frozenset({"globals", "eval", "exec"})
#: Global variables that an import statement within a function reads.
_OF_A_FILE: Final = ("__builtins__", "__name__", "__package__", "__spec__", "__path__")
#: Part of each handle, so that a program exported here and run elsewhere finds no other function of the same name.
_PROCESS: Final = secrets.token_hex(4)
_NUMBERS: Final = itertools.count()
#: The dictionary in which an object stores a tensor, the key, and the tensor.
TensorSlot: TypeAlias = tuple[dict[Any, Any], Any, Tensor | None]
#: Stands for a key that was removed from its dictionary.
_GONE: Final = object()


class Bound:
    """A record of one function: its name in compiled graphs, and the values of its variables at a call."""

    fn: Callable[..., Any]
    #: Compiled code is guarded by this text: for a function the compiler would compare the code alone.
    handle: str = ""
    #: The tensors that the function reaches and that require a gradient, after the last ``find_learned``.
    learned: tuple[Tensor, ...] = ()
    #: The tensors that the function reached at a call; None before a call.
    reached: tuple[Tensor, ...] | None = None
    #: Where modules and other objects store those tensors, and where modules store their other tensors.
    slots: tuple[TensorSlot, ...] = ()

    def set_function(self, fn: Callable[..., Any]) -> None:
        """Set the function and give it a new handle."""
        if torch.compiler.is_compiling() and type(fn) is FunctionType and "<l" in fn.__qualname__:
            # The compiler cannot make a constant of a function that is defined within another one.
            break_graph("Make a rule or mask of such a function once, outside of the compiled function.")
        self.fn, self.handle = fn, f"f{_PROCESS}_{next(_NUMBERS)}"

    def bound(self) -> Self:
        """A copy with the current values of the function's variables: a loop has changed them by backward."""
        if torch.compiler.is_compiling():
            return self
        copy = object.__new__(type(self))
        objects = list(_reached_from(self.fn))
        reached = _without_results(self.fn, [one for one in objects if isinstance(one, Tensor)])
        copy.__dict__.update(
            self.__dict__, fn=bound_now(self.fn), reached=reached, slots=tuple(_slots_in(objects, reached))
        )
        return copy

    def as_called(self) -> AbstractContextManager[None]:
        """Give objects the tensors that they had at the call, for backward: ``functional_call`` has restored those of a
        module, and a loop may have given one object those of another layer."""
        return _with_tensors(self.slots) if self.slots else nullcontext()


@contextmanager
def _with_tensors(slots: tuple[TensorSlot, ...]) -> Iterator[None]:
    moved = [(*one, one[0].get(one[1], _GONE)) for one in slots if one[0].get(one[1], _GONE) is not one[2]]
    try:
        for holder, name, at_call, _ in moved:
            holder[name] = at_call
        yield
    finally:
        for holder, name, at_call, now in moved:
            # Do not restore an entry that the function itself has written.
            if now is _GONE:
                holder.pop(name, None)
            elif holder.get(name) is at_call:
                holder[name] = now


@constant_when_compiled
def find_learned(rule: Bound) -> int:
    """Set a record's ``learned`` tensors and return their number.

    The compiler runs it while it traces, and reads the tensors from the record, as it reads a module's parameters.
    """
    rule.__dict__["learned"] = tuple(_read_by(rule.fn, learned_by(rule.fn)))
    return len(rule.learned)


def _read_by(fn: Callable[..., Any], reached: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Those of the tensors that a score depends on: a function that names a module reaches all its parameters."""
    if not reached:
        return
    place = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=reached[0].device)
    with torch.enable_grad():
        try:
            score = fn(torch.zeros_like(place, dtype=reached[0].dtype).requires_grad_(), *(place,) * 4)
            # A tensor that was computed belongs to the caller's graph, which must be retained.
            grads = torch.autograd.grad(score.sum(), reached, allow_unused=True, retain_graph=True)
        except Exception:
            # The call with the scores raises the error.
            grads = reached
    yield from (tensor for tensor, grad in zip(reached, grads, strict=True) if grad is not None)


def learned_by(fn: Callable[..., Any]) -> tuple[Tensor, ...]:
    """The tensors that a function reaches and that require a gradient, each once."""
    return tuple(tensor for tensor in closed_over(fn) if tensor.requires_grad)


def bound_now(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function that keeps the current values of its variables and of the functions of its file it names.

    Variables that it writes itself remain shared, and so do the attributes of objects.
    """
    bound: Callable[..., Any] = _Binding().bound(fn)
    return bound


class _Binding:
    """Copies functions with the values of their variables; functions that name each other are copied once."""

    def __init__(self) -> None:
        self._functions: dict[int, tuple[object, FunctionType]] = {}
        self._globals: dict[int, tuple[object, dict[str, Any]]] = {}

    def bound(self, value: Any) -> Any:
        if type(value) is partial:
            given = [self.bound(one) if _is_of(value.func, one) else one for one in value.args]
            named = {name: self.bound(one) if _is_of(value.func, one) else one for name, one in value.keywords.items()}
            return partial(self.bound(value.func), *given, **named)
        if type(value) is MethodType:
            return MethodType(self.bound(value.__func__), value.__self__)
        return self._function(value) if type(value) is FunctionType else value

    def _function(self, fn: FunctionType) -> FunctionType:
        if id(fn) in self._functions:
            return self._functions[id(fn)][1]
        code = fn.__code__
        cells = [CellType() for _ in fn.__closure__ or ()]
        written = _written_cells(code)
        closure = [
            old if name in written or old == CellType() else new
            for name, old, new in zip(code.co_freevars, fn.__closure__ or (), cells, strict=True)
        ]
        copy = FunctionType(code, self._names(fn), fn.__name__, None, tuple(closure))
        copy.__qualname__, copy.__module__ = fn.__qualname__, fn.__module__
        copy.__dict__.update(fn.__dict__)
        self._functions[id(fn)] = (fn, copy)
        copy.__defaults__ = tuple(self._helper(one, fn) for one in fn.__defaults__ or ()) or None
        if fn.__kwdefaults__ is not None:
            copy.__kwdefaults__ = {name: self._helper(one, fn) for name, one in fn.__kwdefaults__.items()}
        for old, new in zip(fn.__closure__ or (), closure, strict=True):
            if new is not old:
                new.cell_contents = self._helper(old.cell_contents, fn)
        return copy

    def _names(self, fn: FunctionType) -> dict[str, Any]:
        """The global variables that a function looks up; all of its file's if it writes some or uses ``eval``."""
        if _uses(fn.__code__, _WRITES_GLOBALS) or not _LOOKS_UP.isdisjoint(_names(fn.__code__)):
            return fn.__globals__
        variables = self._globals.setdefault(id(fn.__globals__), (fn.__globals__, {}))[1]
        for name in (*_OF_A_FILE, *_names(fn.__code__)):
            if name in fn.__globals__ and name not in variables:
                # Set before the recursion, which ends at a function that names itself.
                variables[name] = fn.__globals__[name]
                variables[name] = self._helper(variables[name], fn)
        return variables

    def _helper(self, value: Any, fn: FunctionType) -> Any:
        """A function of the same file is copied too; functions of other files have no variables that a loop changes."""
        return self.bound(value) if _is_of(fn, value) else value


def _file_of(fn: object) -> object:
    """The globals of a function's file, or of the function that a decorator wraps; None for other values."""
    wrapped = inspect.unwrap(fn, stop=is_compiled_function) if isinstance(fn, (FunctionType, MethodType)) else fn
    return getattr(wrapped, "__globals__", None)


def _is_of(fn: object, value: object) -> bool:
    """Whether a value is a function of the same file."""
    file = _file_of(fn.func if type(fn) is partial else fn)
    return file is not None and _file_of(value) is file


def _uses(code: CodeType, operations: set[int]) -> bool:
    """Whether a function's code, or that of a function within it, may contain one of some operations."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return not operations.isdisjoint(code.co_code[::2]) or any(_uses(part, operations) for part in inner)


def _written_cells(code: CodeType) -> set[str]:
    """Names of an enclosing scope that a function, or a function within it, writes."""
    if not code.co_freevars or not _uses(code, _WRITES_CELLS):
        return set()
    written = {str(step.argval) for step in dis.get_instructions(code) if step.opcode in _WRITES_CELLS}
    inner = (_written_cells(part) for part in code.co_consts if isinstance(part, CodeType))
    return written.union(*inner)


def closed_over(fn: Callable[..., Any]) -> Iterator[Tensor]:
    """Tensors that a function reaches through the names that it reads, each once."""
    return (value for value in _reached_from(fn) if isinstance(value, Tensor))


def _without_results(fn: Callable[..., Any], tensors: list[Tensor]) -> tuple[Tensor, ...]:
    """Tensors without computed ones that a score does not depend on: a module may store its last output, whose graph
    does not belong to this call."""
    read = {id(tensor) for tensor in _read_by(fn, tuple(tensor for tensor in tensors if tensor.grad_fn is not None))}
    return tuple(tensor for tensor in tensors if tensor.grad_fn is None or id(tensor) in read)


def _slots_in(objects: list[object], reached: tuple[Tensor, ...]) -> Iterator[TensorSlot]:
    """The places where objects store tensors that may be replaced before backward, with the tensors."""
    learned = {id(tensor) for tensor in reached if tensor.requires_grad}
    for one in objects:
        for module in one.modules() if isinstance(one, torch.nn.Module) else ():
            for holder in tensors_of(module):
                yield from ((holder, name, tensor) for name, tensor in holder.items())
        of_object = vars(one) if _is_plain(one) and hasattr(one, "__dict__") and not isinstance(one, type) else {}
        namespace = one if isinstance(one, dict) else of_object
        yield from ((namespace, name, tensor) for name, tensor in namespace.items() if id(tensor) in learned)


def _reached_from(fn: Callable[..., Any]) -> Iterator[object]:
    """The objects that a function reaches through the names that it reads, each once: of modules the parameters, of
    plain objects and classes the attributes that functions name."""
    waiting: list[object] = [fn]
    # The objects are kept alive, so that no later one can have the same address.
    visited: dict[int, object] = {}
    functions: list[FunctionType] = []
    plain: list[object] = []
    while waiting:
        value = waiting.pop(0)
        if id(value) in visited:
            continue
        visited[id(value)] = value
        yield value
        # Only functions of the rule's file are searched: a library's functions and objects lead anywhere.
        if isinstance(value, FunctionType) and (not functions or _is_of(functions[0], value)):
            functions.append(value)
            waiting += [part for one in plain for part in _named_in(one, [value])]
        elif _is_plain(value):
            plain.append(value)
            waiting += _named_in(value, functions)
        if not isinstance(value, Tensor):
            waiting += value.parameters() if isinstance(value, torch.nn.Module) else _members_of(value)


def _is_plain(value: object) -> bool:
    """Whether a value is a class written in Python, or an object of one, and not torch's."""
    kind = value if isinstance(value, type) else type(value)
    written = kind is SimpleNamespace or bool(kind.__flags__ & _WRITTEN_IN_PYTHON)
    library = kind.__module__.partition(".")[0] == "torch"
    return written and not library and not issubclass(kind, (Tensor, torch.nn.Module, *_COLLECTIONS))


def _named_in(value: object, functions: list[FunctionType]) -> Iterator[object]:
    """The attributes of an object that functions name: data, and properties and methods of the functions' files."""
    for fn in functions:
        for name in _names(fn.__code__):
            attribute = inspect.getattr_static(value, name, None)
            if isinstance(attribute, MemberDescriptorType):
                attribute = getattr(value, name, None)
            if isinstance(attribute, property):
                attribute = attribute.fget
            if isinstance(attribute, (staticmethod, classmethod)):
                attribute = attribute.__func__
            if _file_of(attribute) is None or _is_of(fn, attribute):
                yield attribute


def _members_of(value: object) -> list[object]:
    """The objects that a collection, a function, a method or a callable object refers to."""
    if isinstance(value, _COLLECTIONS):
        members = list(value.values() if isinstance(value, dict) else value)
        return members if len(members) <= _MOST_MEMBERS else []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, getattr(value.__self__, "__dict__", None), value.__func__]
    if isinstance(value, FunctionType):
        # An empty cell belongs to a name without a value yet.
        referenced = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        referenced += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        named = (value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__)
        # Functions of other files belong to libraries: they refer to nothing learned, and could lead anywhere.
        return referenced + [one for one in named if _file_of(one) is None or _is_of(value, one)]
    call = next((vars(kind)["__call__"] for kind in type(value).__mro__ if "__call__" in vars(kind)), None)
    return [getattr(value, "__dict__", None), call] if isinstance(call, FunctionType) else []


def _names(code: CodeType) -> list[str]:
    """Names that a function and the functions within it look up."""
    inner = (name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part))
    return [*code.co_names, *inner]
