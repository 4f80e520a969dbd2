"""Designs as a page shows them: a row a point, with its pools in words, its error bars and its breakdown."""

from __future__ import annotations

import numpy as np
import pandas as pd

from disagg_sim.certainty.breakdown import parts_of
from disagg_sim.certainty.passes import RESOURCES
from disagg_sim.certainty.trust import COLUMN as TRUST_COLUMN
from disagg_sim.domain import SHARDING, UNSAID
from disagg_sim.report.breakdown import entries_of
from disagg_sim.report.words import MODE_TEXT, decode_parts_text, degrees_text, mapping_text, records
from disagg_sim.serving.evidence import COLUMN as EVIDENCE_COLUMN
from disagg_sim.serving.evidence import level
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT, with_unsaid
from disagg_sim.serving.pool_frontier import GPUS
from disagg_sim.sweep.backends.run import run_tasks

#: Columns of points that a page shows as they are. SI units.
AS_THEY_ARE = (
    "case",
    "model",
    "precision",
    "engine",
    INTERACTIVITY,
    THROUGHPUT,
    "ftl_s",
    "ttl_s",
    "ftl_with_slot_wait_s",
    "ttl_largest_gap_s",
    "prefill_batch",
    "prefill_instances",
    "prefill_gpus",
    "prefill_chunk_tokens",
    "prefill_memory_bytes",
    "decode_batch",
    "decode_instances",
    "decode_gpus",
    "decode_memory_bytes",
    "decode_bound",
    "mixed_chunk_tokens",
    "mixed_step_share",
    "total_gpus",
    "ctx_gen_gpu_ratio",
    "request_rate_per_s",
    "kv_egress_bytes_per_s_per_gpu",
    "kv_ingress_bytes_per_s_per_gpu",
)
#: Of a throughput per USD or joule, where a table has it.
COSTS: tuple[str, ...] = ("usd_per_hour", "tokens_per_usd", "tdp_watts", "tokens_per_joule")
COSTS += ("drawn_watts", "joules_per_request", "facility_watts", "tokens_per_drawn_joule")
#: Of speculative decoding, shown where some design has drafts.
DRAFTS = ("decode_draft_tokens", "accepted_tokens_per_step")
#: Columns of a point that its page needs, of a table of points.
NEEDED: tuple[str, ...] = (
    *AS_THEY_ARE,
    "mode",
    "system",
    "prefill_system",
    "prefill_precision",
    "profile",
    "isl",
    "osl",
)
NEEDED += tuple(f"{phase}_{name}" for phase in ("prefill", "decode") for name in SHARDING if name not in UNSAID)
THROUGHPUTS = (THROUGHPUT, "tokens_per_usd", "tokens_per_joule", "tokens_per_drawn_joule")
#: Error bars of a point: columns of ``uncertainty.csv``.
BANDS = tuple(f"{name}_{end}{unit}" for name, unit in (("ttl", "_s"), ("ftl", "_s")) for end in ("p10", "p90"))
BANDS += tuple(f"{name}_{end}" for name in (*THROUGHPUTS, "frontier") for end in ("p10", "p90"))
#: Parts of a latency below this share are added up. [1]
LEAST_SHARE = 0.02
OTHERS = "others"
#: Columns of ``Breakdown.operators`` that are told of a part that is not added up with others.
WORDS = ["trust", "outside", "source"]


def shown_points(points: pd.DataFrame, variants: pd.Series) -> pd.DataFrame:
    """Make the table of points that a page shows."""
    drafts = DRAFTS if DRAFTS[0] in points and points[DRAFTS[0]].any() else ()
    table = points[[*AS_THEY_ARE, *(name for name in COSTS if name in points), *drafts]].reset_index(drop=True)
    words = {name: points[name].astype(str).to_numpy() for name in ("mode", "system", "prefill_system")}
    alike = words["system"] == words["prefill_system"]
    systems = np.where(alike, words["system"], words["prefill_system"] + " to " + words["system"])
    traffic = points["traffic"] if "traffic" in points else _lengths(points)
    evidence = points[EVIDENCE_COLUMN].astype(str) if EVIDENCE_COLUMN in points else pd.Series("", points.index)
    return table.assign(
        mode=[MODE_TEXT.get(mode, mode) for mode in words["mode"]],
        system=systems,
        traffic=traffic.to_numpy(),
        variant=variants.to_numpy(),
        prefill=_mappings(points, "prefill"),
        decode=_mappings(points, "decode"),
        rests_on=points[TRUST_COLUMN].astype(str).to_numpy() if TRUST_COLUMN in points else "",
        layouts=[level(each) or "not judged" for each in evidence],
        evidence=evidence.to_numpy(),
    )


def shown_pools(front: pd.DataFrame) -> pd.DataFrame:
    """Make the table of a frontier over further pools that a page shows."""
    if front.empty:
        return front
    rows = records(front)
    used = [name for name in GPUS if front[name].any()]
    words = {"prefill": [mapping_text(row, "prefill") for row in rows], "decode": [*map(decode_parts_text, rows)]}
    over = [name for name in COSTS if name in front]
    return front[["case", INTERACTIVITY, THROUGHPUT, *over, "ftl_s", "ttl_s", *used, "decode_batch"]].assign(**words)


def _lengths(points: pd.DataFrame) -> pd.Series:
    return points["isl"].astype(int).astype(str) + "/" + points["osl"].astype(int).astype(str)


def _mappings(points: pd.DataFrame, phase: str) -> list[str]:
    degrees = with_unsaid(points)[[f"{phase}_{name}" for name in SHARDING]].astype(int)
    known = {cut: degrees_text(*cut) for cut in set(degrees.itertuples(index=False, name=None))}
    return [known[cut] for cut in degrees.itertuples(index=False, name=None)]


def parts_of_designs(points: pd.DataFrame, *, jobs: int = 1) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Take designs apart for a page: the parts of their latencies, and what fills their memory.

    Returns parts: ``row``, ``latency``, ``part``, ``seconds``, ``ideal_s``, seconds by resource, ``trust``,
    ``outside``, ``source``; memory: ``row``, ``phase``, ``part``, ``bytes``, ``limit_bytes``.
    """
    keys = [points[name].astype(str) for name in ("model", "system")]  # whose passes are timed together
    groups = [group for _, group in points.groupby(keys, sort=False)] if len(points) else []
    found = run_tasks(_apart, groups, jobs=min(jobs, len(groups) or 1))
    both = [*zip(*found, strict=True)]
    if not both:
        return pd.DataFrame(), pd.DataFrame()
    parts, memory = (pd.concat(each).sort_values("row", kind="stable", ignore_index=True) for each in both)
    return parts, memory


def _apart(points: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    parts, memory = parts_of(points)
    several = parts.groupby(["row", "latency"])["step"].transform("nunique") > 1
    names = parts["operator"].where(~several, parts["operator"] + " (" + parts["step"] + ")")
    small = parts["share"] < LEAST_SHARE
    words = {name: parts[name].mask(small, "") for name in WORDS}
    parts = parts.assign(part=names.mask(small, OTHERS), **words)
    sums = ["seconds", "ideal_s", *(f"{name}_s" for name in RESOURCES)]
    grouped = parts.groupby(["row", "latency", "part"], sort=False)
    told = grouped[sums].sum().join(grouped[WORDS].first()).reset_index()
    entries = {source: entries_of(source) if source else "" for source in told["source"].unique()}
    told = told.assign(source=told["source"].map(entries), last=told["part"] == OTHERS)
    told = told.sort_values(["row", "latency", "last", "seconds"], ascending=[True, True, True, False])
    memory = memory[memory["bytes"] > 0]
    return told.drop(columns="last"), memory[["row", "phase", "part", "bytes", "limit_bytes"]]
