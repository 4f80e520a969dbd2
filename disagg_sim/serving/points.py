"""Define the table of all serving modes: one row per point, SI units, the same columns in the same order.

In the co-located modes (``colocated``, ``piggyback``) ONE instance does both phases: the degrees of
its mapping stand in the prefill and in the decode columns alike, and so do its GPUs and its memory.
It is counted as a decode instance: ``decode_instances`` is 1, ``prefill_instances`` and
``ctx_gen_gpu_ratio`` are 0, no cache is sent or taken in. ``prefill_batch`` is the prompts that a pass may take,
or those that share a mixed step; the two full rates are those of the instance if it did nothing else
(p: of passes, or of mixed steps only), and ``1/X = 1/p + 1/r`` without piggyback.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.domain import BOUNDS, MAPPING_COLUMNS, UNSAID, ServingMode, Sharding
from disagg_sim.errors import InputError, nearest
from disagg_sim.facts.speculation import Speculation
from disagg_sim.physics.setup import Setup, accepted_length
from disagg_sim.question import TECHNIQUES
from disagg_sim.search import pareto
from disagg_sim.search.phase_grid import CHOSEN_FORMS
from disagg_sim.techniques.registry import Chosen, words_of
from disagg_sim.workload.lengths import Lengths

#: In the column ``speculation``: no speculative decoding.
NO_SPECULATION = "none"
INTERACTIVITY = "tokens_per_s_per_user"
THROUGHPUT = "tokens_per_s_per_gpu"
#: Behind the name of a column of throughput: the same with spares in what it is divided by.
WITH_SPARES = "_with_spares"


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
    Column("kv_egress_bytes_per_s_per_gpu", "float64", "B/s", "cache that leaves a distinct prefill GPU at full rate"),
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
    Column(
        "prefill_mla_form",
        "category",
        "",
        "form of MLA that prefill runs; auto = each chunk takes the faster of naive and absorbed; none = no MLA",
    ),
    Column("kv_bytes_per_request", "float64", "B", "cache of one prompt, each element once"),
    Column("ftl_with_slot_wait_s", "float64", "s", "ftl_s and the mean wait for a slot, see slot_wait"),
    Column("ttl_mean_s", "float64", "s", "mean token-to-token latency, stalls by prefill included"),
    Column("ttl_largest_gap_s", "float64", "s", "longest time between two tokens"),
    Column("mixed_chunk_tokens", "float64", "token", "prefill tokens of a mixed step, over all DP ranks; 0 = none"),
    Column("mixed_step_share", "float64", "1", "share of the steps that are mixed"),
    Column("prefill_redundant_slots", "int64", "1", "places for copies of experts beside one for each, prefill"),
    Column("decode_redundant_slots", "int64", "1", "places for copies of experts beside one for each, decode"),
    Column("prefill_dcp", "int64", "1", "context parallel degree of the cache, prefill"),
    Column("decode_dcp", "int64", "1", "context parallel degree of the cache, decode"),
    Column("prefill_pcp", "int64", "1", "context parallel degree of prompts, prefill"),
    Column("decode_pcp", "int64", "1", "context parallel degree of prompts, decode"),
    Column("speculation", "category", "", "drafter and acceptance of speculative decoding, or none"),
    Column("decode_draft_tokens", "int64", "token", "draft tokens of a decode step; 0 = none"),
    Column("accepted_tokens_per_step", "float64", "token", "mean tokens that a decode step emits for a sequence"),
    Column("hold_steps", "int64", "1", "most decode steps that prompts wait for seats on all ranks; 0 = they do not"),
)

#: Columns that tell one study case from another where a table has no ``case`` column.
CASE_COLUMNS = (
    *("model", "system", "precision", "profile", "engine", "speculation", "mode", "matching", "isl", "osl"),
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

    At the rate X of a full deployment prompts start in groups of b every b/X seconds: a prefill pool starts passes of b
    prompts, those of a co-located instance have the mean b. A request that comes at a random moment meets half of such
    an interval, ``b/(2*X)``. A queue, which any load near X brings, comes on top.
    """
    return group / (2.0 * request_rate)


@dataclass(frozen=True, eq=False, kw_only=True)
class Side:
    """The instances of one phase in every row; arrays of shape (rows,), or a number for all rows."""

    names: tuple[str, str, str, str]  # of system, recipe, profile and engine
    mapping: Sharding  # columns of shape (rows,)
    batch: Any  # requests of an instance [request]
    instances: Any  # [1]
    memory_bytes: Any  # on the fullest GPU [B]
    request_rate: Any  # full rate of ONE instance [request/s]
    unique_gpus: Any  # GPUs of an instance that hold distinct cache [1]
    kv_rate: Any  # cache that each of these sends or takes in at full rate [B/s]


@dataclass(frozen=True, eq=False, kw_only=True)
class Delivered:
    """What the rows of a table deliver; arrays of shape (rows,), or a number for all rows."""

    mode: ServingMode
    model: str
    matching: str
    lengths: Lengths
    kv_bytes_per_request: float  # [B]
    prefill: Side
    decode: Side
    microbatches: Any  # of decode [1]
    bound: Any  # of decode, index into ``BOUNDS``
    mla_form: Any  # of prefill, index into ``CHOSEN_FORMS``
    ftl: Any  # [s]
    ttl: Any  # as the mode measures it [s]
    ttl_mean: Any  # [s]
    largest_gap: Any  # [s]
    request_rate: Any  # of the deployment [request/s]
    group: Any  # prompts that start together [request]
    mixed_chunk: Any = 0.0  # [token]
    mixed_share: Any = 0.0  # [1]
    hold_steps: Any = 0  # [1]
    speculation: Speculation | None
    techniques: Chosen


def with_unsaid(points: pd.DataFrame) -> pd.DataFrame:
    """Give a table the columns that tables of earlier versions lack.

    Returns the table itself where it lacks none.

    >>> with_unsaid(pd.DataFrame({"decode_tp_attn": [8]}))["decode_dcp"].tolist()
    [1]
    """
    said: dict[str, Any] = {
        f"{phase}_{name}": value for phase in ("prefill", "decode") for name, value in UNSAID.items()
    }
    said |= {"decode_draft_tokens": 0, "hold_steps": 0}
    lacking = {name: value for name, value in said.items() if name not in points}
    return points.assign(**lacking) if lacking else points


def names_of(at: Setup) -> tuple[str, str, str, str]:
    """Names of system, recipe, profile and engine."""
    return at.system.name, at.precision.name, at.profile.name, at.engine


def points_table(served: Delivered) -> pd.DataFrame:
    """The table of ``COLUMNS`` of any mode: one row a point, what follows from the parts included."""
    prefill, decode, lengths = served.prefill, served.decode, served.lengths
    gpus_p, gpus_d = prefill.mapping.gpus, decode.mapping.gpus
    total = prefill.instances * gpus_p + decode.instances * gpus_d
    sides = zip(("prefill_", ""), (prefill, decode), strict=True)
    values: dict[str, Any] = {
        f"{side}{name}": value
        for side, part in sides
        for name, value in zip(("system", "precision", "profile", "engine"), part.names, strict=True)
    }
    for side, part in (("prefill", prefill), ("decode", decode)):
        values |= {f"{side}_{name}": getattr(part.mapping, name) for name in MAPPING_COLUMNS}
        values |= {
            f"{side}_batch": part.batch,
            f"{side}_instances": part.instances,
            f"{side}_gpus": part.mapping.gpus,
            f"{side}_memory_bytes": part.memory_bytes,
            f"{side}_request_rate_per_s": part.request_rate,
            f"{side}_unique_gpus": part.unique_gpus,
        }
    values |= {
        "model": served.model,
        "mode": str(served.mode),
        "matching": served.matching,
        "isl": round(lengths.mean_isl),
        "osl": round(lengths.mean_osl),
        INTERACTIVITY: 1 / served.ttl,
        THROUGHPUT: served.request_rate * lengths.mean_osl / total,
        "ftl_s": served.ftl,
        "ttl_s": served.ttl,
        "decode_microbatches": served.microbatches,
        "total_gpus": total,
        "ctx_gen_gpu_ratio": prefill.instances * gpus_p / (decode.instances * gpus_d),
        "request_rate_per_s": served.request_rate,
        "kv_egress_bytes_per_s_per_gpu": prefill.kv_rate,
        "kv_ingress_bytes_per_s_per_gpu": decode.kv_rate,
        "decode_bound": pd.Categorical.from_codes(served.bound, dtype=category(BOUNDS), validate=False),
        "prefill_mla_form": pd.Categorical.from_codes(served.mla_form, dtype=category(CHOSEN_FORMS), validate=False),
        "kv_bytes_per_request": served.kv_bytes_per_request,
        "ftl_with_slot_wait_s": served.ftl + slot_wait(served.group, served.request_rate),
        "ttl_mean_s": served.ttl_mean,
        "ttl_largest_gap_s": served.largest_gap,
        "mixed_chunk_tokens": served.mixed_chunk,
        "mixed_step_share": served.mixed_share,
        "hold_steps": served.hold_steps,
        "decode_draft_tokens": decode.mapping.draft_tokens,
        "speculation": spec.name if (spec := served.speculation) else NO_SPECULATION,
        "accepted_tokens_per_step": accepted_length(spec, decode.mapping.draft_tokens),
    }
    rows = np.size(total)
    words = one_word({name: value for name, value in values.items() if isinstance(value, str)}, rows)
    table = pd.DataFrame({c.name: words.get(c.name, values[c.name]) for c in COLUMNS}, index=pd.RangeIndex(rows))
    return table.assign(**{TECHNIQUES: words_of(dict(served.techniques))}) if served.techniques else table


def one_word(values: abc.Mapping[str, str], rows: int) -> dict[str, pd.Categorical]:
    """Make columns of a table that hold one word each, in every row.

    >>> one_word({"mode": "colocated"}, 2)["mode"].tolist()
    ['colocated', 'colocated']
    """
    codes = np.zeros(rows, dtype=np.int8)
    return {
        name: pd.Categorical.from_codes(codes, dtype=category((value,)), validate=False)
        for name, value in values.items()
    }


@lru_cache(maxsize=1024)
def category(words: tuple[str, ...]) -> pd.CategoricalDtype:
    """Make the type of a column of some words.

    >>> category(("compute", "memory")).categories.tolist()
    ['compute', 'memory']
    """
    return pd.CategoricalDtype(pd.Index(words))


def empty_table(columns: Sequence[Column] = COLUMNS) -> pd.DataFrame:
    """Make a table without rows, with the types of its columns.

    >>> table = empty_table()
    >>> len(table), str(table["isl"].dtype), str(table["ttl_s"].dtype)
    (0, 'int64', 'float64')
    """
    return pd.DataFrame({column.name: pd.Series(dtype=column.dtype) for column in columns})


def pareto_front(
    points: pd.DataFrame, by: Sequence[str] | None = None, *, throughput: str = THROUGHPUT
) -> pd.DataFrame:
    """The points that no other beats in both interactivity (1/TTL) and throughput.

    Parameters
    ----------
    points : DataFrame
        A table of points (``COLUMNS``), of one or of many cases.
    by : sequence of str, optional
        Columns that part the table into cases. By default ``case`` where present, else those of ``CASE_COLUMNS`` that
        are present. To let systems compete in one front, leave them out: ``by=("model", "isl", "osl")``.
    throughput : str
        Column of the throughput: per GPU, or ``"tokens_per_usd"`` or ``"tokens_per_joule"`` (``serving.costs``).

    Returns
    -------
    DataFrame
        One front per case, in order of first appearance; interactivity [token/s/user] rises inside a case,
        throughput [token/s/GPU, token/USD or token/J] falls.

    Raises
    ------
    InputError
        A column that the table lacks.

    Examples
    --------
    >>> points = pd.DataFrame({INTERACTIVITY: [10.0, 20.0, 20.0], THROUGHPUT: [800.0, 300.0, 200.0]})
    >>> pareto_front(points)[THROUGHPUT].tolist()
    [800.0, 300.0]
    """
    if by is None:
        names = ("case",) if "case" in points else tuple(name for name in CASE_COLUMNS if name in points)
        by = [name for name in names if len(points[name].unique()) > 1]
    for name in (INTERACTIVITY, throughput, *by):
        if name not in points:
            raise InputError(f"the table has no column {name!r}{nearest(name, map(str, points))}")
    return pareto.pareto_front(points, x=INTERACTIVITY, y=throughput, by=by)
