"""Compiles kernels before they are needed, on all cores: within it they are asked for as ever,
but handed to a pool of threads, and none is launched.

NVRTC, the passes of Triton and ptxas run beside Python's lock, and so does the C compiler, which
makes what launches a kernel of Triton's, 0.15 s each. What is left under the lock, a tenth of
the time, is reading the kernels' own Python.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specengine.kernels.compilations import Tally, tally
from specengine.kernels.dispatch import has_triton

_MOST_THREADS = 32
_one_at_a_time = Lock()  # precompiling changes how Triton launches, and changes it back
_current: ContextVar[Precompilation | None] = ContextVar("precompilation", default=None)


class Precompilation:
    """What one has asked for. tally: what no cache had."""

    def __init__(self, pool: ThreadPoolExecutor, compiled: Tally) -> None:
        self.tally = compiled
        self._pool = pool
        self._jobs: list[Future[object]] = []
        self._asked: set[Hashable] = set()

    def submit(self, job: Callable[[], object]) -> Future[object]:
        future = self._pool.submit(job)
        self._jobs.append(future)
        return future

    def ask(self, key: Hashable, job: Callable[[], object]) -> None:
        """Submit a job once."""
        if self.is_new(key):
            self.submit(job)

    def is_new(self, key: Hashable) -> bool:
        """Whether it was not asked for before."""
        known = key in self._asked
        self._asked.add(key)
        return not known

    def compiles(self) -> bool:
        """Whether a kernel of those asked for so far was in no cache. Waits until that is known."""
        for _ in as_completed(list(self._jobs)):
            if self.tally.kernels:
                break
        return self.tally.kernels > 0


def current() -> Precompilation | None:
    """This thread's."""
    return _current.get()


@contextmanager
def precompile() -> Iterator[Precompilation]:
    """What this thread runs inside launches PyTorch's kernels and none of this project's, which are
    compiled instead; all of them have been when it ends. Tensors that were not written hold zeros:
    a row, a token and a slot that exist. Keep nothing that was computed inside.

    A kernel that does not compile says so when it is launched, not here.
    """
    threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
    pool = ThreadPoolExecutor(threads, initializer=_joins, initargs=(_device(),))
    with _one_at_a_time, tally() as compiled, pool:
        stage = Precompilation(pool, compiled)
        token = _current.set(stage)
        try:
            zeros = _Zeros()  # type: ignore[no-untyped-call]
            with zeros, _triton_compiles(stage):
                yield stage
        finally:
            _current.reset(token)


def _device() -> int | None:
    """This thread's."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _joins(device: int | None) -> None:
    """A thread of the pool loads kernels where the asking one does, not on the first device."""
    if device is not None:
        torch.cuda.set_device(device)


_UNWRITTEN = frozenset(
    [
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
    ]
)


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Unwritten tensors are zeros."""


def _dispatch(
    mode: TorchDispatchMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
) -> Any:
    made = func(*args, **(kwargs or {}))
    return made.zero_() if func.overloadpacket in _UNWRITTEN else made


# Not in the class: PyTorch wraps what it finds there, and with the first call imports its compiler,
# which takes longer than all kernels do.
_Zeros.__torch_dispatch__ = _dispatch  # type: ignore[method-assign]


class _Launchable:
    """A pool to which Triton hands kernels; they come back with what launches them."""

    def __init__(self, stage: Precompilation) -> None:
        self.stage = stage

    def submit(self, job: Callable[[], Any]) -> Future[object]:
        return self.stage.submit(partial(_with_launcher, job))


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    """Where that fails nothing is kept of the kernel in this process: half made, it would be taken
    for whole, and launched without a function."""
    kernel = compile_kernel()
    kernel.run  # noqa: B018 (made, and the kernel loaded, by looking at it)
    return kernel


@contextmanager
def _triton_compiles(stage: Precompilation) -> Iterator[None]:
    """A launch of this thread's is a warm-up, which Triton hands to `stage`."""
    if not has_triton():
        yield
        return
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch, asked = JITFunction.run, dict[int, Any]()

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        asking = current()
        if asking is None:
            return launch(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        form = id(kernel), *map(_trait, args), *((name, _trait(x)) for name, x in kwargs.items())
        if asking.is_new(form):
            asked[id(kernel)] = kernel
            launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        return None

    JITFunction.run = run
    try:
        with AsyncCompileMode(_Launchable(stage), ignore_errors=True):
            yield
    finally:
        JITFunction.run = launch
        _forget_failed(asked.values())


def _forget_failed(kernels: Iterable[Any]) -> None:
    """Triton 3.7 keeps what failed in place of a kernel, and would raise its error at each launch;
    another launch may compile it."""
    from triton.compiler import CompiledKernel

    for kernel in kernels:
        for forms, *_ in list(kernel.device_caches.values()):
            for key, form in list(forms.items()):  # a copy: another thread may launch
                if not isinstance(form, CompiledKernel):
                    forms.pop(key, None)


def _trait(argument: object) -> Hashable:
    """What Triton may look at when it chooses or makes a kernel's form, and more."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if hasattr(argument, "block_shape"):  # a tensor's descriptor
        return argument.base.dtype, tuple(argument.block_shape)  # type: ignore[attr-defined]
    return type(argument), argument
