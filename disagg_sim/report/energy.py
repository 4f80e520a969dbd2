"""Format the energy of a design as tables."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from disagg_sim.certainty.contributions import LABELS
from disagg_sim.report.breakdown import time_text


def energy_lines(parts: pd.DataFrame) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Write the energy of every kind of pass of a design, by class of operator, the dearest first.

    >>> step = {"step": "decode step", "kind": ["gemm", "gemm", "waiting"], "seconds": [1e-3, 1e-3, 2e-3]}
    >>> parts = pd.DataFrame({**step, "joules": [0.6, 0.5, 0.3]})
    >>> title, lines = next(energy_lines(parts))
    >>> title, lines[0]
    ('energy of a decode step: 1.4 J a GPU, 350 W', ('GEMM', '2 ms', '50.0%', '550 W', '1.1 J', '78.6%'))
    """
    for step, mine in parts.groupby("step", sort=False):
        seconds, joules = mine["seconds"].sum(), mine["joules"].sum()
        by = mine.groupby(mine["kind"].map(lambda kind: LABELS.get(kind, str(kind))), sort=False)
        classes = by[["seconds", "joules"]].sum().sort_values("joules", ascending=False)
        lines: list[tuple[str, ...]] = [
            (
                *(str(name), time_text(time), f"{time / seconds:.1%}", f"{energy / time:.0f} W"),
                *(f"{energy:.3g} J", f"{energy / joules:.1%}"),
            )
            for name, time, energy in classes.itertuples()
        ]
        yield f"energy of a {step}: {joules:.3g} J a GPU, {joules / seconds:.0f} W", lines
