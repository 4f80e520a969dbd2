"""Designs of several modes are timed together as they are one by one."""

from __future__ import annotations

import numpy as np
import pandas as pd

import disagg_sim as ds
from disagg_sim.certainty.designs import times_of
from disagg_sim.certainty.rows import designs_of
from disagg_sim.certainty.together import times_together, together


def test_passes_of_one_kind_are_one_evaluation_with_the_same_times() -> None:
    """Two pools and co-located instances, with and without a pipeline: one evaluation of decode steps for all."""
    at, lengths = ds.setup("llama_3_1_8b", "h100_sxm", "fp8"), ds.lengths(2048, 256)
    mappings = [ds.Mapping(), ds.Mapping(pp=2)]
    modes = [
        serve(at, mappings, lengths, options=ds.Colocation(batch=(4, 16))) for serve in (ds.colocated, ds.piggyback)
    ]
    pools = ds.disaggregated(ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths, batch=[8]))
    designs = list(designs_of(pd.concat([pools, *modes], ignore_index=True)))
    assert len({one.mode for one in designs}) == 3
    units = together(designs)
    assert sum(unit.phase == "decode" for unit in units) == 1
    assert len(units) < sum(1 + len(one.prompts) for one in designs)
    for one, found in zip(designs, times_together(designs, lambda at: at), strict=True):
        for part, alone in zip(found, times_of(one), strict=True):
            np.testing.assert_array_equal(np.broadcast_to(part, one.rows.shape), alone)
