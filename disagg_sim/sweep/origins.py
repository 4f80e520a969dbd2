"""Say of frontiers what their cases assume, whose fits they inherit, and how far their layouts have been checked."""

from __future__ import annotations

import numpy as np
import pandas as pd

from disagg_sim.serving.evidence import COLUMN, READ, layout_evidence
from disagg_sim.sweep.cases import Case, axis_columns, kin
from disagg_sim.sweep.labels import joint
from disagg_sim.sweep.used_fits import fits_used, inherited

#: Cases and their frontiers, by digest and mode.
Fronts = dict[tuple[str, str], tuple[Case, pd.DataFrame]]


def with_origins(fronts: Fronts, *, nothing: str) -> Fronts:
    """Add the columns that say where frontiers come from; cases with the same setups are looked at together.

    Parameters
    ----------
    fronts
        Cases and frontiers with points.
    nothing
        Word for no inherited fit.

    Returns
    -------
    dict
        The same with ``cases.axis_columns``, ``inherited_fits`` and the evidence of each layout.

    Examples
    --------
    >>> with_origins({}, nothing="-")
    {}
    """
    alike: dict[Case, list[tuple[str, str]]] = {}
    for key, (case, _) in fronts.items():
        alike.setdefault(kin(case), []).append(key)
    found: Fronts = {}
    for keys in alike.values():
        case, tables = fronts[keys[0]][0], [fronts[key][1] for key in keys]  # whose setups are those of all
        fits = "; ".join(inherited(fits_used(case))) or nothing
        words = layout_evidence(joint(tables, READ), case.decode_setup, case.prefill_setup)
        stops = np.cumsum([len(table) for table in tables])
        for key, table, said in zip(keys, tables, np.split(words, stops[:-1]), strict=True):
            own = fronts[key][0]
            beside = pd.DataFrame({**axis_columns(own), "inherited_fits": fits, COLUMN: said}, table.index)
            found[key] = own, pd.concat([table, beside], axis=1)
    return {key: found[key] for key in fronts}
