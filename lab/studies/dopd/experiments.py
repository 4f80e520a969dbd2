"""Reproduce DOPD: the ratio of prefill to decode, batches by length, static and dynamic comparisons, its claims."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from disagg_sim.simulation.metrics import summary
from lab.studies.dopd import TEXT
from lab.studies.dopd.setup import AUTHORS_ENGINE, PROFILE, SLO, DopdBench
from lab.studies.papers import Paper


def runs(bench: DopdBench) -> pd.DataFrame:
    """Every run, in the columns of a simulation's summary."""
    return pd.DataFrame([{"experiment": name} | asdict(summary(result, SLO)) for name, result in bench.results()])


PAPER = Paper(
    bench=lambda traces, quick, engine: DopdBench(traces, quick=quick, engine=engine),
    profile=PROFILE,
    text=TEXT,
    engines=(AUTHORS_ENGINE,),
    tables={"runs": runs},
)
