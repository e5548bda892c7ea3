"""Calls of C++ kernels, recorded once and replayed without the Python around them.

In: a library, and a piece of code that calls its kernels. Out: a `Tape`: which functions were
called with which numbers and addresses, and the buffers that they wrote to.

A layer that handles one token calls nine kernels, which take microseconds; checks, allocation and
nn.Module around them take as long again. With the same shapes and buffers all of that comes out the
same each time. It is what a CUDA graph is for a GPU, in a list of tuples.

Invariant: a replay computes what the code would compute. While it records, every operator of torch
goes through a dispatch mode: memory comes from the tape, views are let through, and anything that
computes is an error, since a replay would leave it out.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Tape:
    """Calls, and the buffers that they use: shared by layers, two sets in turn."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., int | None], tuple]] = []
        self._buffers: dict[tuple, Tensor] = {}
        self._set = self._count = 0

    def start_layer(self, index: int) -> None:
        """What follows may write where the layer before the last one wrote."""
        self._set, self._count = index % 2, 0

    def allocate(self, make: Callable[[], Tensor], *what: Any) -> Tensor:
        key = (self._set, self._count, *what)
        self._count += 1
        if key not in self._buffers:
            self._buffers[key] = make()
        return self._buffers[key]

    def replay(self) -> None:
        """RuntimeError where a kernel refuses its numbers."""
        for function, arguments in self.calls:
            code = function(*arguments)
            if code is not None and code >= 0:
                name = getattr(function, "__name__", function)
                raise RuntimeError(f"{name}: entry {code} of the batch is out of bounds")


class Recorder:
    """A library whose functions can be recorded; else they behave as before."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.tape: Tape | None = None

    def __getattr__(self, name: str) -> "_Function":
        function = _Function(self, getattr(self._library, name))
        setattr(self, name, function)
        return function

    @contextlib.contextmanager
    def record(self) -> Iterator[Tape]:
        """Record what is called inside. RuntimeError for an operator that computes."""
        self.tape = tape = Tape()
        try:
            with _OnlyMemoryAndViews(tape):
                yield tape
        finally:
            self.tape = None


class _Function:
    """A C function; `argtypes` and `restype` as ctypes has them."""

    def __init__(self, recorder: Recorder, function: Any) -> None:
        self._recorder = recorder
        self._function = function

    def __setattr__(self, name: str, value: Any) -> None:
        target = self._function if name in ("argtypes", "restype") else self
        object.__setattr__(target, name, value)

    def __call__(self, *arguments: Any) -> Any:
        if (tape := self._recorder.tape) is not None:
            # Converted once: addresses and numbers stay, arrays of ctypes pass as they are.
            kinds = zip(self._function.argtypes, arguments, strict=True)
            fixed = (a if isinstance(a, ctypes.Array) else kind(a) for kind, a in kinds)
            tape.calls.append((self._function, tuple(fixed)))
        return self._function(*arguments)


class _OnlyMemoryAndViews(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            size, dtype = tuple(args[0]), kwargs.get("dtype")
            return self._tape.allocate(lambda: func(*args, **kwargs), size, dtype)
        if func.is_view:
            return func(*args, **kwargs)
        raise RuntimeError(f"{func} computes, so that a replay would leave it out")
