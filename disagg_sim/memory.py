"""Refuse what needs more memory than there is, before it is made: one estimate, one limit.

The limit is that of ``disagg-sim --memory``, kept in the environment so that worker processes have it, too; else what
the machine, its container or the shell allows.
"""

from __future__ import annotations

import math
import os
import resource
from contextlib import suppress
from functools import cache
from pathlib import Path

from disagg_sim.errors import InputError, quoted
from disagg_sim.units import GB, parse_quantity

#: Environment variable with the limit, such as ``8 GB``.
VARIABLE = "DISAGG_SIM_MEMORY"
#: Least limit: libraries and specs alone take a fifth of it. [B]
LEAST = 1.0 * GB
#: Where a container says what it may have.
_CONTAINER = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_limit(text: str) -> float:
    """Read a limit of memory. [B]"""
    try:
        limit = float(text)
    except ValueError:
        try:
            limit = parse_quantity(text, "B")
        except ValueError as error:
            raise InputError(f"memory {error}; allowed: from {LEAST / GB:g} GB, such as 16 GB") from None
    if not LEAST <= limit < math.inf:
        raise InputError(f"memory {quoted(text)} is out of range; allowed: from {LEAST / GB:g} GB, such as 16 GB")
    return limit


def allowed_memory() -> float:
    """Look up how much memory a run may take: as ``--memory`` says, else what the machine has. [B]"""
    said = os.environ.get(VARIABLE, "")
    return memory_limit(said) if said else _machine()


def require_memory(what: str, needed: float) -> None:
    """Refuse what needs more than the allowed memory."""
    if needed > (allowed := allowed_memory()):
        amounts = f"needs about {_shown(needed)} GB of memory; allowed: up to {_shown(allowed)} GB"
        raise InputError(f"{what} {amounts} (--memory)")


def _shown(amount: float) -> str:
    return f"{amount / GB:,.0f}" if amount >= 10 * GB else f"{amount / GB:.1f}"


@cache
def _machine() -> float:
    """What the machine, its container and the shell allow. [B]"""
    limits = [float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
    for place in _CONTAINER:
        with suppress(OSError, ValueError):
            limits.append(float(place.read_text(encoding="ascii")))
    of_shell = resource.getrlimit(resource.RLIMIT_AS)[0]
    return min(limits if of_shell == resource.RLIM_INFINITY else [*limits, float(of_shell)])
