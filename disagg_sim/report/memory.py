"""Say which GPUs of a design are too full, and by how much."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg_sim.certainty.breakdown import Breakdown
from disagg_sim.units import GB

#: Bytes above a limit that rounding makes, over the limit. [1]
ROUNDING = 1e-9


def too_full(pools: Mapping[str, tuple[float, float]]) -> str:
    """Say what does not fit, in one line.

    Takes ``pools`` ("both" and "" need no name [B]). The result is empty where all fits.

    >>> too_full({"decode": (208 * GB, 80 * GB)})
    'does not fit: one decode GPU would hold 208.0 of 80.0 GB (260%), 128.0 GB too much'
    >>> too_full({"decode": (60 * GB, 80 * GB)})
    ''
    """
    said = [
        f"one {'' if name in ('', 'both') else f'{name} '}GPU would hold {held / GB:.1f} of {limit / GB:.1f} GB "
        f"({held / limit:.0%}), {(held - limit) / GB:.1f} GB too much"
        for name, (held, limit) in pools.items()
        if held > limit * (1.0 + ROUNDING)
    ]
    return f"does not fit: {'; '.join(said)}" if said else ""


def memory_of_pools(found: Breakdown, row: Any) -> dict[str, tuple[float, float]]:
    """Sum up what the fullest GPU of each pool holds.

    The result is as ``too_full`` takes it [B].

    >>> import pandas as pd
    >>> from types import SimpleNamespace
    >>> memory = pd.DataFrame({"row": 0, "phase": "decode", "bytes": [16.0, 24.0], "limit_bytes": 80.0})
    >>> memory_of_pools(SimpleNamespace(memory=memory), 0)
    {'decode': (40.0, 80.0)}
    """
    mine = found.memory[found.memory["row"] == row]
    return {
        str(phase): (float(parts["bytes"].sum()), float(parts["limit_bytes"].iloc[0]))
        for phase, parts in mine.groupby("phase", sort=False)
    }
