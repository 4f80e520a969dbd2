"""Say where tasks run, and what came of one: values that every backend shares."""

from __future__ import annotations

import platform
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from disagg_sim.errors import DisaggSimError, InputError, UnknownNameError, nearest, quoted
from disagg_sim.sweep.digests import code_digest

#: This process; processes of joblib on this machine; workers of Dask; workers of Ray.
BACKENDS = ("serial", "loky", "dask", "ray")
#: Backends that a cluster may stand behind.
CLUSTERS = ("dask", "ray")
#: How often a task may fail before it is given up. [1]
ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """What came of one attempt at a task."""

    value: Any = None
    error: Exception | None = None  # that the function raised
    lost: str = ""  # why there is neither: the process that ran it died
    final: bool = False  # the backend has tried it often enough

    def __getstate__(self) -> tuple[Any, Exception | None, str, bool]:
        """Take the traceback of an error along as a note: it does not travel by itself."""
        if self.error is not None:
            self.error.add_note("".join(traceback.format_exception(self.error)))
        return self.value, self.error, self.lost, self.final

    def __setstate__(self, state: tuple[Any, Exception | None, str, bool]) -> None:
        """Take what was sent."""
        for name, value in zip(("value", "error", "lost", "final"), state, strict=True):
            object.__setattr__(self, name, value)


#: One attempt at a task.
Call = Callable[[Any], TaskOutcome]
#: Attempts at tasks by number, each once, in any order. A task that it gives no outcome of is left.
Engine = Callable[[Call, Mapping[int, Any]], Iterator[tuple[int, TaskOutcome]]]


@dataclass(frozen=True, slots=True)
class Workers:
    """Where tasks run."""

    jobs: int = 1  # worker processes on this machine; a cluster at an address has its own [1]
    backend: str = ""  # of ``BACKENDS``
    #: Of the scheduler of a running cluster (``tcp://host:8786`` of Dask, ``host:6379`` of Ray), which these backends
    #: need: one that they start themselves opens ports without a password.
    address: str = ""
    engine: Engine | None = field(default=None, compare=False, repr=False)  # of a cluster that stays; None = not yet

    def __post_init__(self) -> None:  # noqa: D105
        if not self.backend:
            object.__setattr__(self, "backend", "loky" if self.jobs > 1 else "serial")
        if self.backend not in BACKENDS:
            close, known = nearest(self.backend, BACKENDS), ", ".join(BACKENDS)
            raise UnknownNameError(f"unknown backend {quoted(self.backend)}{close}; known: {known}")
        if self.address and self.backend not in CLUSTERS:
            raise InputError(f"address {quoted(self.address)}: needs the backend dask or ray, not {self.backend}")
        if self.backend in CLUSTERS and not self.address and self.engine is None:
            here = "on this machine leave it out: the workers of --jobs are processes that open no port"
            raise InputError(f"backend {self.backend}: needs the --address of a cluster that runs; {here}")


def attempt(function: Callable[[Any], Any], task: Any, code: str = "") -> TaskOutcome:
    """Call a function in a worker, and bring back what it returns or raises."""
    try:
        if code and code != own_code():
            return TaskOutcome(error=unlike())
        return TaskOutcome(value=function(task))
    except Exception as error:
        return TaskOutcome(error=error)


def unlike() -> DisaggSimError:
    """Say that this machine runs other code than the process that started the run; one line."""
    there = f"{platform.node()}: its disagg-sim is another than that of the process that started the run"
    return DisaggSimError(f"{there}; install the same on all machines")


@cache
def own_code() -> str:
    """Compute the digest of all sources of the package that this process runs."""
    return code_digest(tuple(sorted(item.name for item in files("disagg_sim").iterdir() if item.is_dir())))
