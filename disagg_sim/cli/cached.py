"""Read ``--cached`` and ``--tiers``: what caches hold of prompts, and where."""

from __future__ import annotations

from dataclasses import replace

from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.traffic import Reuse
from disagg_sim.units import asked_quantity
from disagg_sim.workload.lengths import reuse_of

SHARES_ROUNDING = 1e-9  # of their sum


def asked_reuse(share: float, tiers: str, *, others: str = "") -> Reuse | None:
    """Read a share of the prompts that is cached, and in which tiers.

    Takes ``share`` (0 = nothing is cached) and ``tiers`` (``dram``, or ``hbm=0.5,dram=0.5``; "" = in HBM). Returns None
    where nothing is cached.

    >>> asked_reuse(0.9, "hbm=0.25,dram=0.75").tiers, asked_reuse(0.0, "")
    ((('dram', 0.75), ('hbm', 0.25)), None)
    """
    if tiers and not share:
        raise InputError(f"--tiers says where prompts are cached; give --cached, too{others}")
    return replace(reuse_of(share), tiers=_tiers(tiers)) if share else None


def _tiers(text: str) -> tuple[tuple[str, float], ...]:
    """Tiers with their shares of the cached prompts, from ``dram`` or ``hbm=0.5,dram=0.5``."""
    found: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.strip().partition("=")
        try:
            found[name] = asked_quantity(number or 1.0, "share", "--tiers")
        except InputError:
            raise InputError(f"--tiers {quoted(part)}; allowed: TIER or TIER=SHARE, such as hbm=50%,dram=0.5") from None
        if not 0.0 <= found[name] <= 1.0:
            raise InputError(f"--tiers {quoted(part)} is out of range; allowed: shares from 0 to 1")
    if found and not abs(sum(found.values()) - 1.0) <= SHARES_ROUNDING:
        raise InputError(f"--tiers {quoted(text)}: shares add up to {sum(found.values()):g}; allowed: 1")
    return tuple(sorted(found.items()))
