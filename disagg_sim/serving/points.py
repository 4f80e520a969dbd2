"""The one table of all serving modes: one row a point, SI units, the same columns in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg_sim.search import pareto

if TYPE_CHECKING:
    import pandas as pd

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
    Column("system", "category", "", "name of the system"),
    Column("precision", "category", "", "name of the precision recipe"),
    Column("profile", "category", "", "efficiency profile"),
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
    Column("engine", "category", "", "engine whose fits were used; empty = the profile's own choice"),
    Column("matching", "category", "", "how instances were counted: exact or paper"),
    Column("prefill_request_rate_per_s", "float64", "request/s", "full rate p of ONE prefill instance"),
    Column("decode_request_rate_per_s", "float64", "request/s", "full rate r of ONE decode instance"),
    Column("prefill_unique_gpus", "int64", "1", "GPUs of one prefill instance that hold distinct cache"),
    Column("decode_unique_gpus", "int64", "1", "GPUs of one decode instance that hold distinct cache"),
    Column("kv_bytes_per_request", "float64", "B", "cache of one prompt, each element once"),
)

#: Columns that tell one study case from another where a table has no ``case`` column.
CASE_COLUMNS = ("model", "system", "precision", "profile", "engine", "mode", "matching", "isl", "osl")


def pareto_front(points: pd.DataFrame, by: Sequence[str] | None = None) -> pd.DataFrame:
    """The points that no other beats in both interactivity (1/TTL) and throughput per GPU.

    Parameters
    ----------
    points : DataFrame
        A table of points (``COLUMNS``), of one or of many cases.
    by : sequence of str, optional
        Columns that part the table into cases. By default ``case`` where present, else those of
        ``CASE_COLUMNS`` that are present.

    Returns
    -------
    DataFrame
        One front per case, in order of first appearance; interactivity rises inside a case.
    """
    if by is None:
        by = ("case",) if "case" in points else tuple(name for name in CASE_COLUMNS if name in points)
    return pareto.pareto_front(points, x=INTERACTIVITY, y=THROUGHPUT, by=by)
