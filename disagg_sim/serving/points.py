"""The one table of all serving modes: one row a point, SI units, the same columns in the same order.

In the co-located modes (``colocated``, ``piggyback``) ONE instance does both phases: the degrees of
its mapping stand in the prefill and in the decode columns alike, and so do its GPUs and its memory.
It is counted as a decode instance: ``decode_instances`` is 1, ``prefill_instances`` and
``ctx_gen_gpu_ratio`` are 0, no cache is sent or taken in. ``prefill_batch`` is the prompts of a pass,
or those that share a mixed step; the two full rates are those of the instance if it did nothing else
(p: of passes, or of mixed steps only), and ``1/X = 1/p + 1/r`` without piggyback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.errors import InputError, nearest
from disagg_sim.search import pareto

INTERACTIVITY = "tokens_per_s_per_user"
THROUGHPUT = "tokens_per_s_per_gpu"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table of points."""

    name: str
    dtype: str
    unit: str
    meaning: str


def _instance_columns(phase: str) -> tuple[Column, ...]:
    degrees = {
        "tp_attn": "tensor parallel degree of attention",
        "dp_attn": "data parallel degree of attention",
        "tp_ffn": "tensor parallel degree of the feed-forward part",
        "ep": "expert parallel degree",
        "pp": "pipeline stages",
    }
    own = (
        Column("prefill_chunk_tokens", "int64", "token", "chunk of a chunked pipelined prefill; 0 = whole prompt")
        if phase == "prefill"
        else Column("decode_microbatches", "int64", "1", "micro-batches in the pipeline")
    )
    return (
        *(Column(f"{phase}_{name}", "int64", "1", f"{meaning}, {phase}") for name, meaning in degrees.items()),
        own,
        Column(f"{phase}_batch", "int64", "request", f"requests of one {phase} instance, over all DP ranks"),
        Column(f"{phase}_instances", "int64", "1", f"{phase} instances"),
        Column(f"{phase}_gpus", "int64", "1", f"GPUs of ONE {phase} instance"),
    )


#: Every column of a table of points, in order. ``case`` is put in front where tables of several cases meet.
COLUMNS: tuple[Column, ...] = (
    Column("model", "category", "", "name of the model"),
    Column("system", "category", "", "name of the system; that of decode where prefill runs on another"),
    Column("precision", "category", "", "name of the precision recipe, of decode"),
    Column("profile", "category", "", "efficiency profile, of decode"),
    Column("mode", "category", "", "serving mode"),
    Column("isl", "int64", "token", "prompt tokens"),
    Column("osl", "int64", "token", "output tokens"),
    Column(INTERACTIVITY, "float64", "token/s", "1/TTL"),
    Column(THROUGHPUT, "float64", "token/s", "output tokens per second over ALL GPUs of the deployment"),
    Column("ftl_s", "float64", "s", "first-token latency, no queue"),
    Column("ttl_s", "float64", "s", "token-to-token latency"),
    *_instance_columns("prefill"),
    *_instance_columns("decode"),
    Column("total_gpus", "int64", "1", "GPUs of the whole deployment"),
    Column("ctx_gen_gpu_ratio", "float64", "1", "prefill GPUs over decode GPUs"),
    Column("request_rate_per_s", "float64", "request/s", "matched rate X of the deployment: the slower pool's"),
    Column("kv_egress_bytes_per_s_per_gpu", "float64", "B/s", "cache sent by each distinct prefill GPU at full rate"),
    Column(
        "kv_ingress_bytes_per_s_per_gpu", "float64", "B/s", "cache taken in by each distinct decode GPU at full rate"
    ),
    Column("prefill_memory_bytes", "float64", "B", "on the fullest prefill GPU"),
    Column("decode_memory_bytes", "float64", "B", "on the fullest decode GPU"),
    Column("decode_bound", "category", "", "what limits the decode step: compute, memory, communication or latency"),
    Column("engine", "category", "", "engine whose fits were used, in decode; empty = the profile's own"),
    Column("matching", "category", "", "how instances were counted: exact or paper"),
    Column("prefill_system", "category", "", "system of the prefill GPUs"),
    Column("prefill_precision", "category", "", "precision recipe of prefill"),
    Column("prefill_profile", "category", "", "efficiency profile of prefill"),
    Column("prefill_engine", "category", "", "engine whose fits were used for prefill"),
    Column("prefill_request_rate_per_s", "float64", "request/s", "full rate p of ONE prefill instance"),
    Column("decode_request_rate_per_s", "float64", "request/s", "full rate r of ONE decode instance"),
    Column("prefill_unique_gpus", "int64", "1", "GPUs of one prefill instance that hold distinct cache"),
    Column("decode_unique_gpus", "int64", "1", "GPUs of one decode instance that hold distinct cache"),
    Column("kv_bytes_per_request", "float64", "B", "cache of one prompt, each element once"),
    Column("ftl_with_slot_wait_s", "float64", "s", "ftl_s and the mean wait for a slot, see slot_wait"),
    Column("ttl_mean_s", "float64", "s", "mean token-to-token latency, stalls by prefill included"),
    Column("ttl_largest_gap_s", "float64", "s", "longest time between two tokens"),
    Column("mixed_chunk_tokens", "float64", "token", "prefill tokens of a mixed step, over all DP ranks; 0 = none"),
    Column("mixed_step_share", "float64", "1", "share of the steps that are mixed"),
)

#: Columns that tell one study case from another where a table has no ``case`` column.
CASE_COLUMNS = (
    *("model", "system", "precision", "profile", "engine", "mode", "matching", "isl", "osl"),
    *("prefill_system", "prefill_precision", "prefill_profile", "prefill_engine"),
)

#: Columns that a table has beside ``COLUMNS`` where throughput per USD or per W was asked for.
COST_COLUMNS: dict[str, tuple[Column, ...]] = {
    "gpu": (),
    "usd": (
        Column("usd_per_hour", "float64", "USD/h", "price of all GPUs of the deployment"),
        Column("tokens_per_usd", "float64", "token/USD", "output tokens over the price of ALL GPUs"),
    ),
    "watt": (
        Column("tdp_watts", "float64", "W", "TDP of all GPUs of the deployment: neither hosts nor the actual draw"),
        Column("tokens_per_joule", "float64", "token/J", "output tokens per second over the TDP of ALL GPUs"),
    ),
}


def slot_wait(group: Any, request_rate: Any) -> Any:
    """Mean wait for a place in prefill of a request that finds everything taken and nobody ahead of it. [s]

    At the rate X of a full deployment prompts start in groups of b every b/X seconds: a prefill pool
    starts passes of b prompts, a co-located instance waits until b of its residents have left. A
    request that comes at a random moment meets half of such an interval, ``b/(2*X)``. A queue, which
    any load near X brings, comes on top.

    Parameters
    ----------
    group : array_like
        Prompts that start together, b. [request]
    request_rate : array_like
        Rate X of the deployment. [request/s]
    """
    return group / (2.0 * request_rate)


def table_of_points(values: dict[str, Any], rows: int) -> pd.DataFrame:
    """The table of ``COLUMNS``: arrays of shape (rows,), numbers, or words, which become categories.

    Prefill's system, precision, profile and engine are those of decode where they are left out.
    """
    values = {f"prefill_{name}": values[name] for name in ("system", "precision", "profile", "engine")} | values
    codes = np.zeros(rows, dtype=np.int8)
    words = {
        name: pd.Categorical.from_codes(codes, categories=pd.Index([str(value)]))
        for name, value in values.items()
        if isinstance(value, str)
    }
    return pd.DataFrame({c.name: words.get(c.name, values[c.name]) for c in COLUMNS}, index=pd.RangeIndex(rows))


def pareto_front(
    points: pd.DataFrame, by: Sequence[str] | None = None, *, throughput: str = THROUGHPUT
) -> pd.DataFrame:
    """The points that no other beats in both interactivity (1/TTL) and throughput.

    Parameters
    ----------
    points : DataFrame
        A table of points (``COLUMNS``), of one or of many cases.
    by : sequence of str, optional
        Columns that part the table into cases. By default ``case`` where present, else those of
        ``CASE_COLUMNS`` that are present. To let systems compete in one front, leave them out:
        ``by=("model", "isl", "osl")``.
    throughput : str
        Column of the throughput: per GPU, or ``"tokens_per_usd"`` or ``"tokens_per_joule"`` where the
        table has it (``serving.costs``).

    Returns
    -------
    DataFrame
        One front per case, in order of first appearance; interactivity [token/s/user] rises inside a case,
        throughput [token/s/GPU, token/USD or token/J] falls.

    Raises
    ------
    InputError
        A column that the table lacks.
    """
    if by is None:
        names = ("case",) if "case" in points else tuple(name for name in CASE_COLUMNS if name in points)
        by = [name for name in names if len(points[name].unique()) > 1]
    for name in (INTERACTIVITY, throughput, *by):
        if name not in points:
            raise InputError(f"the table has no column {name!r}{nearest(name, map(str, points))}")
    return pareto.pareto_front(points, x=INTERACTIVITY, y=throughput, by=by)
