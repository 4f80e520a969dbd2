"""Read design points of a grid of one phase as designs, to time or to take them apart again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from disagg_sim.arrays import Ints
from disagg_sim.certainty.designs import Designs, timed_prompts
from disagg_sim.certainty.rows import rows_alike
from disagg_sim.physics.blocks import forms_of
from disagg_sim.search.axes import undrafted
from disagg_sim.search.phase_grid import CHOSEN_FORMS, PhaseGrid


def design_of(grid: PhaseGrid, row: int, column: int) -> Designs:
    """Read one design point of a grid of one phase."""
    (one,) = designs_at_points(grid, np.array([row]), np.array([column]))
    return one


def designs_at_points(grid: PhaseGrid, rows: Ints, columns: Ints) -> Iterator[Designs]:
    """Read design points of a grid of one phase, those together that share form, drafter and kind of chunks.

    >>> import disagg_sim as ds
    >>> at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    >>> grid = ds.decode_grid(at, ds.Sharding(), ds.lengths(1024, 128), batch=[8, 16])
    >>> next(designs_at_points(grid, np.array([0, 0]), np.array([1, 0]))).batch.tolist()
    [16.0, 8.0]
    """
    mapping, chunks = grid.chosen(rows, columns), grid.mappings.chunk_tokens[rows]
    free = len(forms_of(grid.setup.model)) > 1
    forms = grid.mla_form[rows, columns] if free else np.zeros(len(rows), dtype=np.int8)
    drafted = (mapping.draft_tokens > 0) | (grid.phase == "prefill")
    batches = grid.batch[columns].astype(np.float64)
    kinds = [forms, drafted, chunks > 0 if grid.lengths.constant else chunks]
    for some in rows_alike(kinds, np.arange(len(rows))):
        at = grid.setup if drafted[some[0]] else undrafted(grid.setup)
        one, none, own, batch = np.ones(len(some)), np.zeros(len(some)), mapping[some], batches[some]
        designs = Designs(
            mode=grid.phase,
            lengths=grid.lengths,
            at=at,
            prefill_at=at,
            rows=some,
            mapping=own,
            prefill_mapping=own,
            batch=batch,
            prefill_batch=batch,
            chunk_tokens=chunks[some].astype(float),
            instances=one,
            prefill_instances=one,
            total_gpus=own.gpus,
            mixed_chunk=none,
            mixed_share=none,
            hold_steps=none,
            rounding=one,
            by_gap=np.zeros(len(some), dtype=bool),
            by_tpot=np.zeros(len(some), dtype=bool),
            form=CHOSEN_FORMS[forms[some[0]]] if free else "auto",
        )
        yield designs.of_prompts(*timed_prompts(designs, grid.ftl_quantile)) if grid.phase == "prefill" else designs
