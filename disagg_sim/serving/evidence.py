"""Say of every design of a table how far its layouts have been checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from disagg_sim.domain import SHARDING, ServingMode, Sharding
from disagg_sim.physics.setup import Setup
from disagg_sim.search.layouts import EVIDENCE, evidence
from disagg_sim.serving.points import with_unsaid

#: Column of a frontier with the evidence of its designs.
COLUMN = "evidence"


#: Columns that ``layout_evidence`` looks at.
READ = frozenset(("mode", *(f"{phase}_{name}" for phase in ("prefill", "decode") for name in SHARDING)))


def layout_evidence(points: pd.DataFrame, at: Setup, prefill_at: Setup | None = None) -> NDArray[np.object_]:
    """Evidence of the layouts of a table of points; of two pools the weaker one counts.

    Parameters
    ----------
    points : DataFrame
        Points of one case (``serving.points.COLUMNS``), any modes.
    at : Setup
        Of decode, and of co-located instances.
    prefill_at : Setup, optional
        Of prefill, where its pool has another system or recipe.

    Returns
    -------
    ndarray of str, shape (points,)
        ``served`` where runs confirm both kinds of layout; ``launchable: ...`` where an engine of today can start both,
        with why none does; ``not launchable: ...`` with the rule that forbids it.

    Examples
    --------
    >>> import disagg_sim as ds
    >>> at, lengths = ds.setup("llama_3_1_8b", "h100_sxm", "fp8"), ds.lengths(2048, 256)
    >>> points = ds.colocated(at, ds.Sharding(tp_attn=2, tp_ffn=2), lengths)
    >>> set(layout_evidence(points, at).tolist())
    {'served'}
    """
    decode = evidence(at, _mapping(points, "decode"))
    prefill = evidence(prefill_at or at, _mapping(points, "prefill"), prefill=True)
    split = (points["mode"] == ServingMode.DISAGGREGATED).to_numpy()
    both = [_of_pools(*pair) for pair in zip(prefill, decode, strict=True)]
    return np.asarray(np.where(split, np.array(both, dtype=object), decode), dtype=object)


def level(text: str) -> str:
    """Return the first words of an evidence, one of ``EVIDENCE``."""
    return text.partition(":")[0]


def _mapping(points: pd.DataFrame, phase: str) -> Sharding:
    points = with_unsaid(points)
    columns: dict[str, Any] = {name: points[f"{phase}_{name}"].to_numpy(dtype=np.int64) for name in SHARDING}
    return Sharding(**columns, draft_tokens=points["decode_draft_tokens"].to_numpy(dtype=np.int64))


def _of_pools(prefill: str, decode: str) -> str:
    """Evidence of two pools: the weaker level, and what is said of the pools on it."""
    worst = max(level(prefill), level(decode), key=EVIDENCE.index)
    sides = (("prefill", prefill), ("decode", decode))
    told = [f"{side} {text.partition(': ')[2]}" for side, text in sides if level(text) == worst and ": " in text]
    return f"{worst}: {'; '.join(told)}" if told else worst
