"""Compile the kernel and store its machine code.

Only the entry points are kept on disk, each with everything that it calls inside. Numba looks at the file of the
entry point alone when it decides whether that is still valid, so the directory is named after the content of all the
kernel's sources.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from disagg_sim.extras import extra

with extra("simulate"):
    import numba
    from numba.core import config as compiler_config
    from numba.core import event
    from numba.core import types as compiled_types

cast(Any, compiler_config)._config_fname = ""  # every compilation would read it in the working directory


def _load_array_functions() -> None:
    """Import numba's array functions without its probe for BLAS.

    The probe would import ``scipy.linalg``, a sixth of the start-up time of a first run. The kernel has no linear
    algebra; that of others compiles all the same, because numba probes again where it is used.
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
_types: Any = compiled_types
#: Whether anything is compiled; else all runs, and steps in a debugger, as plain Python (``NUMBA_DISABLE_JIT=1``).
COMPILES = not _numba.config.DISABLE_JIT
Function = TypeVar("Function", bound=Callable[..., object])

#: Files whose code or constants end up in the machine code.
SOURCES = (
    "compiled",
    "layout",
    "addresses",
    "entry",
    "handover",
    "links",
    "lockstep",
    "pipelines",
    "preemption",
    "queue",
    "ranks",
    "runs",
    "sharing",
    "shared_blocks",
    "steps",
    "submission",
    "times",
    "ranking",
)
#: Files of policies whose functions are inlined into entry points of other files.
OF_POLICIES = ("arrow/account", "arrow/ledger", "dynaserve/book", "dynaserve/predictor")


#: What a process is told that compiles.
COMPILING = "compiling the kernel (once, about a minute)"


@dataclass(frozen=True, slots=True)
class CodeHome:
    """Where machine code is kept."""

    directory: Path | None  # None = nowhere: every process compiles anew
    note: str  # one line for the user where it is no place that keeps it for good; else empty


@cache
def code_home() -> CodeHome:
    """Find the first writable place: ``NUMBA_CACHE_DIR``, next to the sources, in the home, a temporary directory.

    All but that next to the sources only where nobody else can write: what lies there is executed.
    """
    here = Path(__file__).parent
    files = [here / name for name in SOURCES] + [here.parent / "policies" / name for name in OF_POLICIES]
    content = hashlib.sha256(b"".join(file.with_suffix(".py").read_bytes() for file in files)).hexdigest()
    name, wanted = f"kernel-{content[:16]}", _numba.config.CACHE_DIR
    lasting = [Path(wanted)] if wanted else []
    lasting.append(beside := here / "__pycache__")  # who else can write there could change the package, too
    with suppress(RuntimeError):  # a user without one
        lasting.append(Path.home() / ".cache" / "disagg_sim")
    refused: list[str] = []
    for base in lasting:
        if (base == beside or _is_own(base / name)) and _can_be_written(base / name):
            note = f"cannot write NUMBA_CACHE_DIR {', '.join(refused)}: the kernel's machine code is kept in {base}"
            return CodeHome(base / name, note if wanted and refused else "")
        refused.append(f"{base} (others can)" if _can_be_written(base / name) else str(base))
    tried = ", ".join(refused)
    passing = Path(tempfile.gettempdir()) / f"disagg_sim-{os.getuid()}"
    if _is_own(passing) and _can_be_written(passing / name):
        return CodeHome(passing / name, f"the kernel's machine code is kept in {passing}: cannot write {tried}")
    advice = "give a directory that can be written in NUMBA_CACHE_DIR"
    return CodeHome(None, f"every process compiles the kernel anew, about a minute: cannot write {tried}; {advice}")


def _can_be_written(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False


def _is_own(directory: Path) -> bool:
    """Whether a directory, made if missing, is of this account, and nobody else can write it."""
    try:
        directory.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & others


@contextmanager
def on_compilation(tell: Callable[[], None]) -> Iterator[None]:
    """Call a function once when something is compiled inside the block, not where machine code is loaded."""

    class CompileListener(event.Listener):
        """Hears of every compilation."""

        told = False

        def on_start(self, event: object) -> None:  # noqa: ARG002 - numba's signature
            """The first one."""
            if not self.told:
                self.told = True
                tell()

        def on_end(self, event: object) -> None:
            """Nothing to tell."""

    with event.install_listener("numba:compile", CompileListener()):
        yield


def inner(function: Function, *, into_callers: bool = False) -> Function:
    """Compile a function that only compiled code calls: nothing is made for calls from Python.

    It is compiled once for all values of an argument that are written out in its calls, such as ``0``.
    """
    options = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    made: Any = _numba.njit(forceinline=into_callers, **options)(function)
    if COMPILES:
        template = made.get_call_template
        made.get_call_template = lambda args, kws: template(
            tuple(map(_any_value, args)), {name: _any_value(each) for name, each in kws.items()}
        )
    return cast(Function, made)


def inlined(function: Function) -> Function:
    """The same into each caller: a call that hands on all arrays of a fleet costs as much as what a small one does."""
    return inner(function, into_callers=True)


def called_by_address(function: Callable[..., int]) -> Any:
    """Compile a C function of five whole numbers and a time, which has an ``address``; its machine code is kept."""
    home, before = code_home().directory, _numba.config.CACHE_DIR
    takes = _types.int64(*[_types.int64] * 5, _types.float64)
    _numba.config.CACHE_DIR = before if home is None else str(home)
    try:
        return _numba.cfunc(takes, cache=home is not None, error_model="numpy")(function)
    finally:
        _numba.config.CACHE_DIR = before


def _any_value(kind: Any) -> Any:
    """A type of the compiler without values written out."""
    if isinstance(kind, _types.BaseTuple) and not isinstance(kind, _types.BaseNamedTuple):
        return _types.BaseTuple.from_types([_types.unliteral(each) for each in kind])
    return _types.unliteral(kind)


def entry(function: Function) -> Function:
    """Compile a function that Python calls, and keep its machine code where there is a place for it."""
    home = code_home().directory
    if home is None:
        return cast(Function, _numba.njit(error_model="numpy", no_cfunc_wrapper=True)(function))
    before = _numba.config.CACHE_DIR
    _numba.config.CACHE_DIR = str(home)
    try:
        return cast(Function, _numba.njit(cache=True, error_model="numpy", no_cfunc_wrapper=True)(function))
    finally:
        _numba.config.CACHE_DIR = before
