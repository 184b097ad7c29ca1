"""What a user's function closes over: the tensors that it reaches, and its variables as they are at a call."""

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

#: Learned tensors are not looked for in longer collections.
_MOST_MEMBERS: Final = 1024
_WRITES_GLOBALS: Final = {dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL")}
_WRITES_CELLS: Final = {dis.opmap[name] for name in ("STORE_DEREF", "DELETE_DEREF")}
_COLLECTIONS: Final = (dict, list, tuple, set, frozenset)
#: Py_TPFLAGS_HEAPTYPE.
_WRITTEN_IN_PYTHON: Final = 1 << 9
#: What looks global variables up by names that a function's code does not tell.
_LOOKS_UP: Final = frozenset({"globals", "eval", "exec"})
#: What an import within a function reads of its file.
_OF_A_FILE: Final = ("__builtins__", "__name__", "__package__", "__spec__", "__path__")
#: A program that is exported here and run elsewhere must not find another function by the same name.
_PROCESS: Final = secrets.token_hex(4)
_NUMBERS: Final = itertools.count()
#: Where an object keeps a tensor, its name there, and the tensor.
Held: TypeAlias = tuple[dict[Any, Any], Any, Tensor | None]
#: What a name stands for that is no longer there.
_GONE: Final = object()


class Bound:
    """A record of one function: its name for compiled graphs, and itself as it is at a call."""

    fn: Callable[..., Any]
    #: Compiled code is guarded by this text: of a function itself the compiler compares the code alone.
    handle: str = ""
    #: The tensors that it reaches and that want a gradient, as ``find_learned`` last found them.
    learned: tuple[Tensor, ...] = ()
    #: The tensors that it reaches, as they were at a call; None before there was one.
    reached: tuple[Tensor, ...] | None = None
    #: Those of them that modules and other objects hold, and a module's further numbers.
    held: tuple[Held, ...] = ()

    def hold(self, fn: Callable[..., Any]) -> None:
        """Take the function."""
        if torch.compiler.is_compiling() and type(fn) is FunctionType and "<l" in fn.__qualname__:
            # The compiler makes no constant of a function that was written within another: it comes from outside.
            break_graph("Make a rule or mask of such a function once, outside of what is compiled.")
        self.fn, self.handle = fn, f"f{_PROCESS}_{next(_NUMBERS)}"

    def bound(self) -> Self:
        """The same with the function's variables as they are now: a loop's have moved on when backward comes."""
        if torch.compiler.is_compiling():
            return self
        copy = object.__new__(type(self))
        objects = list(_reached_from(self.fn))
        reached = _without_results(self.fn, [one for one in objects if isinstance(one, Tensor)])
        copy.__dict__.update(
            self.__dict__, fn=bound_now(self.fn), reached=reached, held=tuple(_held_in(objects, reached))
        )
        return copy

    def as_called(self) -> AbstractContextManager[None]:
        """Objects with the tensors that they had at the call, for backward: ``functional_call`` takes a module's away
        again, and a loop gives one object those of each layer."""
        return _with_numbers(self.held) if self.held else nullcontext()


@contextmanager
def _with_numbers(held: tuple[Held, ...]) -> Iterator[None]:
    moved = [(*one, one[0].get(one[1], _GONE)) for one in held if one[0].get(one[1], _GONE) is not one[2]]
    try:
        for holder, name, own, _ in moved:
            holder[name] = own
        yield
    finally:
        for holder, name, own, now in moved:
            # What the function wrote itself stays.
            if now is _GONE:
                holder.pop(name, None)
            elif holder.get(name) is own:
                holder[name] = now


@constant_when_compiled
def find_learned(rule: Bound) -> int:
    """Look for a record's ``learned`` tensors; how many there are.

    The compiler lets it run while it traces, and then reads the tensors where they lie, as it does with a module's.
    """
    rule.__dict__["learned"] = tuple(_read_by(rule.fn, learned_by(rule.fn)))
    return len(rule.learned)


def _read_by(fn: Callable[..., Any], reached: tuple[Tensor, ...]) -> Iterator[Tensor]:
    """Those of the tensors that a score depends on: who names a module reaches all that is learned in it."""
    if not reached:
        return
    place = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=reached[0].device)
    with torch.enable_grad():
        try:
            score = fn(torch.zeros_like(place, dtype=reached[0].dtype).requires_grad_(), *(place,) * 4)
            # The graph behind a tensor that was computed is the caller's.
            grads = torch.autograd.grad(score.sum(), reached, allow_unused=True, retain_graph=True)
        except Exception:
            # What is wrong is told when the function is called with the scores.
            grads = reached
    yield from (tensor for tensor, grad in zip(reached, grads, strict=True) if grad is not None)


def learned_by(fn: Callable[..., Any]) -> tuple[Tensor, ...]:
    """The tensors that a function reaches and that want a gradient, each once."""
    return tuple(tensor for tensor in closed_over(fn) if tensor.requires_grad)


def bound_now(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that goes on with what its variables hold now, and those of the functions of its file that it names.

    Variables that it writes itself stay shared; so does what is inside of objects.
    """
    found: Callable[..., Any] = _Binding().bound(fn)
    return found


class _Binding:
    """One look at all variables: functions that name each other are bound once."""

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
        """The global variables that a function looks up; its file's own where it writes some, or hides which."""
        if _uses(fn.__code__, _WRITES_GLOBALS) or not _LOOKS_UP.isdisjoint(_names(fn.__code__)):
            return fn.__globals__
        found = self._globals.setdefault(id(fn.__globals__), (fn.__globals__, {}))[1]
        for name in (*_OF_A_FILE, *_names(fn.__code__)):
            if name in fn.__globals__ and name not in found:
                # A function that names itself finds the name taken.
                found[name] = fn.__globals__[name]
                found[name] = self._helper(found[name], fn)
        return found

    def _helper(self, value: Any, fn: FunctionType) -> Any:
        """Functions of other files are libraries, which hold nothing that a loop moves."""
        return self.bound(value) if _is_of(fn, value) else value


def _file_of(fn: object) -> object:
    """What tells the file of a function, or of one that a library's decorator wraps; None for what is none."""
    wrapped = inspect.unwrap(fn, stop=is_compiled_function) if isinstance(fn, (FunctionType, MethodType)) else fn
    return getattr(wrapped, "__globals__", None)


def _is_of(fn: object, value: object) -> bool:
    """Whether a value is a function of the same file."""
    file = _file_of(fn.func if type(fn) is partial else fn)
    return file is not None and _file_of(value) is file


def _uses(code: CodeType, operations: set[int]) -> bool:
    """Whether a function's code, or that of one written inside it, may hold one of some operations."""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return not operations.isdisjoint(code.co_code[::2]) or any(_uses(part, operations) for part in inner)


def _written_cells(code: CodeType) -> set[str]:
    """Names from outside that a function, or one written inside it, writes."""
    if not code.co_freevars or not _uses(code, _WRITES_CELLS):
        return set()
    own = {str(step.argval) for step in dis.get_instructions(code) if step.opcode in _WRITES_CELLS}
    inner = (_written_cells(part) for part in code.co_consts if isinstance(part, CodeType))
    return own.union(*inner)


def closed_over(fn: Callable[..., Any]) -> Iterator[Tensor]:
    """Tensors that a function reaches through what it names and what that holds, each once."""
    return (value for value in _reached_from(fn) if isinstance(value, Tensor))


def _without_results(fn: Callable[..., Any], found: list[Tensor]) -> tuple[Tensor, ...]:
    """Tensors without those that were computed and that a score does not depend on: a module may keep its last output,
    and the graph behind it is not this call's."""
    read = {id(tensor) for tensor in _read_by(fn, tuple(tensor for tensor in found if tensor.grad_fn is not None))}
    return tuple(tensor for tensor in found if tensor.grad_fn is None or id(tensor) in read)


def _held_in(objects: list[object], reached: tuple[Tensor, ...]) -> Iterator[Held]:
    """Where objects keep tensors that a later call may find others in place of, and which these are."""
    learned = {id(tensor) for tensor in reached if tensor.requires_grad}
    for one in objects:
        for module in one.modules() if isinstance(one, torch.nn.Module) else ():
            for holder in tensors_of(module):
                yield from ((holder, name, tensor) for name, tensor in holder.items())
        of_object = vars(one) if _is_plain(one) and hasattr(one, "__dict__") and not isinstance(one, type) else {}
        own = one if isinstance(one, dict) else of_object
        yield from ((own, name, tensor) for name, tensor in own.items() if id(tensor) in learned)


def _reached_from(fn: Callable[..., Any]) -> Iterator[object]:
    """What a function reaches through what it names and what that holds, each once; of modules the parameters, of
    plain objects and classes what functions name."""
    waiting: list[object] = [fn]
    # The objects themselves are kept, so that no later one can have the same address.
    seen: dict[int, object] = {}
    functions: list[FunctionType] = []
    plain: list[object] = []
    while waiting:
        value = waiting.pop(0)
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        # Only the rule's own file is asked what it names: a library's functions and objects lead anywhere.
        if isinstance(value, FunctionType) and (not functions or _is_of(functions[0], value)):
            functions.append(value)
            waiting += [part for one in plain for part in _named_in(one, [value])]
        elif _is_plain(value):
            plain.append(value)
            waiting += _named_in(value, functions)
        if not isinstance(value, Tensor):
            waiting += value.parameters() if isinstance(value, torch.nn.Module) else _held_by(value)


def _is_plain(value: object) -> bool:
    """Whether a value is an object of a class written in Python, or such a class, and none of torch's."""
    kind = value if isinstance(value, type) else type(value)
    written = kind is SimpleNamespace or bool(kind.__flags__ & _WRITTEN_IN_PYTHON)
    library = kind.__module__.partition(".")[0] == "torch"
    return written and not library and not issubclass(kind, (Tensor, torch.nn.Module, *_COLLECTIONS))


def _named_in(value: object, functions: list[FunctionType]) -> Iterator[object]:
    """What functions may read of an object by its name: what it or its class holds, and properties and methods of the
    functions' files."""
    for fn in functions:
        for name in _names(fn.__code__):
            found = inspect.getattr_static(value, name, None)
            if isinstance(found, MemberDescriptorType):
                found = getattr(value, name, None)
            if isinstance(found, property):
                found = found.fget
            if isinstance(found, (staticmethod, classmethod)):
                found = found.__func__
            if _file_of(found) is None or _is_of(fn, found):
                yield found


def _held_by(value: object) -> list[object]:
    """What a collection, a function, a method or an object that can be called holds on to."""
    if isinstance(value, _COLLECTIONS):
        members = list(value.values() if isinstance(value, dict) else value)
        return members if len(members) <= _MOST_MEMBERS else []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, getattr(value.__self__, "__dict__", None), value.__func__]
    if isinstance(value, FunctionType):
        # An empty cell belongs to a name that is not bound yet.
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        named = (value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__)
        # Functions of other files are libraries, which hold nothing learned but could lead anywhere.
        return held + [one for one in named if _file_of(one) is None or _is_of(value, one)]
    call = next((vars(kind)["__call__"] for kind in type(value).__mro__ if "__call__" in vars(kind)), None)
    return [getattr(value, "__dict__", None), call] if isinstance(call, FunctionType) else []


def _names(code: CodeType) -> list[str]:
    """Names that a function and the functions written inside it look up."""
    inner = (name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part))
    return [*code.co_names, *inner]
