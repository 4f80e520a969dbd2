"""Format a table of points for people: engineers' units, mappings in words, rounded numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from disagg_sim.errors import InputError
from disagg_sim.report.words import MODE_TEXT, drafts_text, mapping_text, prefill_text, ratio_text, records
from disagg_sim.serving.points import CASE_COLUMNS, INTERACTIVITY, THROUGHPUT
from disagg_sim.units import GB, MS

DIGITS = 3  # significant, of every measured figure
NO_MATCHING = "none"  # matching of a co-located point; tells no case from another
COST_TEXT = {
    "usd_per_hour": "USD/h",
    "tokens_per_usd": "tokens/USD",
    "tdp_watts": "TDP [W]",
    "tokens_per_joule": "tokens/J",
    "drawn_watts": "drawn [W]",
    "joules_per_request": "J/request",
    "facility_watts": "facility [W]",
    "tokens_per_drawn_joule": "tokens/J drawn",
}


def readable(points: pd.DataFrame, *, at: Sequence[float] | None = None) -> pd.DataFrame:
    """Points of any mode in ms, GB/s and words, to be read and not computed with.

    Parameters
    ----------
    points : DataFrame
        A frontier or another table of points (``serving.points.COLUMNS``); of many cases, too.
    at : sequence of float, optional
        Keep, of each case, the point of highest throughput with at least these interactivities; one that
        a case does not reach has no row. [token/s]

    Returns
    -------
    DataFrame
        One row a point, figures rounded to three digits. What tells cases apart stands in front, and
        "at least [tokens/s/user]" where ``at`` is given. In the co-located modes "decode" is the mapping of
        the whole instance and "prefill" says how prompts share it.

    Raises
    ------
    InputError
        When the table is none of points.
    """
    for column in (INTERACTIVITY, THROUGHPUT, "mode", "prefill_tp_attn"):
        if column not in points:
            raise InputError(f"table of points: missing column {column!r}")
    names = [name for name in ("case", *CASE_COLUMNS) if name in points]
    case = [name for name in names if len({*points[name].unique()} - {NO_MATCHING}) > 1]
    if at is None:
        return pd.DataFrame([_row(point, case) for point in records(points)])
    rows = []
    groups = points.groupby(case, sort=False, observed=True, dropna=False) if case else [((), points)]
    for _, group in groups:
        for least in at:
            enough = group[group[INTERACTIVITY] >= least]
            if len(enough):
                best = enough.loc[[enough[THROUGHPUT].idxmax()]]
                rows.append({"at least [tokens/s/user]": least} | _row(records(best)[0], case))
    return pd.DataFrame(rows)


def _row(point: Mapping[str, Any], case: Sequence[str]) -> dict[str, Any]:
    split = point["mode"] == "disaggregated"
    told = {name: MODE_TEXT.get(str(point[name]), str(point[name])) for name in case}
    chunk = f", chunk {int(point['prefill_chunk_tokens'])}" if point["prefill_chunk_tokens"] else ""
    row: dict[str, Any] = {
        "tokens/s/user": _rounded(point[INTERACTIVITY]),
        "tokens/s/GPU": _rounded(point[THROUGHPUT]),
        "FTL [s]": _rounded(point["ftl_s"]),
        "TTL [ms]": _rounded(point["ttl_s"] / MS),
        "decode": mapping_text(point, "decode") + drafts_text(point),
        "decode batch": int(point["decode_batch"]),
        "prefill": mapping_text(point, "prefill") + chunk if split else prefill_text(point),
        "prefill batch": int(point["prefill_batch"]),
        "prefill : decode instances×GPUs": ratio_text(point) if split else "shared",
        "GPUs": int(point["total_gpus"]),
        "KV out [GB/s/GPU]": _rounded(point["kv_egress_bytes_per_s_per_gpu"] / GB),
        "KV in [GB/s/GPU]": _rounded(point["kv_ingress_bytes_per_s_per_gpu"] / GB),
        "decode limited by": str(point["decode_bound"]),
    }
    return told | row | {text: _rounded(point[name]) for name, text in COST_TEXT.items() if name in point}


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
