"""How the kernel is compiled, and where the machine code is kept.

Only the entry points are kept on disk, each with everything that it calls inside. Numba looks at the file of the
entry point alone when it decides whether that is still valid, so the directory is named after the content of all the
kernel's sources.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba


def _load_array_functions() -> None:
    """Load numba's functions of arrays, which it needs before any compiled code, as where there is no BLAS.

    Looking for one would import ``scipy.linalg``, a sixth of the time that a first run takes to start. The kernel has
    no linear algebra; that of others compiles all the same, because numba looks again where it is used.
    """
    name, modules = "scipy.linalg.cython_blas", cast(dict[str, Any], sys.modules)
    if name in modules:
        return
    modules[name] = None  # an import of it fails
    try:
        import numba.np.arraymath  # noqa: F401
    finally:
        del modules[name]


_load_array_functions()
_numba: Any = numba  # its stubs know neither the wrapper flags nor the directory
Function = TypeVar("Function", bound=Callable[..., object])

#: Files whose code or constants end up in the machine code.
SOURCES = ("compiled", "state", "kernel", "kernel_queue", "kernel_runs", "kernel_steps", "kernel_times")


@cache
def code_directory() -> Path:
    """Where the machine code of these sources is kept: beside them if that is writable, else in the home directory."""
    here = Path(__file__).parent
    content = hashlib.sha256(b"".join((here / f"{name}.py").read_bytes() for name in SOURCES)).hexdigest()
    if _numba.config.CACHE_DIR:
        base = Path(_numba.config.CACHE_DIR)
    else:
        base = here / "__pycache__" if os.access(here, os.W_OK) else Path.home() / ".cache" / "disagg_sim"
    return base / f"kernel-{content[:16]}"


def inner(function: Function) -> Function:
    """Compile a function that only compiled code calls: nothing is made for calls from Python."""
    return cast(Function, _numba.njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def entry(function: Function) -> Function:
    """Compile a function that Python calls, and keep its machine code."""
    before = _numba.config.CACHE_DIR
    _numba.config.CACHE_DIR = str(code_directory())
    try:
        return cast(Function, _numba.njit(cache=True, error_model="numpy", no_cfunc_wrapper=True)(function))
    finally:
        _numba.config.CACHE_DIR = before
