"""Size instances that stop decode for passes of whole prompts or chunks, once for all columns that hold as much."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from disagg_sim.arrays import Floats
from disagg_sim.physics.residents import prefilling_in_passes
from disagg_sim.serving.colocation import ColocatedCase, Group
from disagg_sim.serving.pass_columns import PassColumns


def pass_bytes(case: ColocatedCase, group: Group, passes: PassColumns, cuts: Sequence[tuple[str, int]]) -> list[Floats]:
    """Find the bytes on the fullest GPU under each cut; residents and prompts are the same under all.

    Takes ``cuts`` (0 = whole prompts). The result is of each cut (rows, sizes); ``passes.sized`` says which size a
    column has [B].
    """
    mapping, first = group.mapping.narrowed(), np.unique(passes.sized, return_index=True)[1]
    batch, prompts = (each[first].astype(float)[None, :] for each in (group.batch[passes.batch_index], passes.together))
    prompt, deviations = case.lengths.prompt, case.at.profile.resident_deviations
    chunks = list(dict.fromkeys(chunk for _, chunk in cuts))
    forms = list(dict.fromkeys(form for form, _ in cuts))
    # an axis in front holds the chunks
    prefilling = prefilling_in_passes(mapping, prompts, prompt, np.array(chunks)[:, None, None], deviations)
    shape = len(chunks), len(group.table), first.size
    found = {
        form: np.broadcast_to(each, shape)
        for form, each in zip(forms, case.memory_bytes(mapping, batch, prefilling, forms), strict=True)
    }
    return [found[form][chunks.index(chunk)] for form, chunk in cuts]
