"""What the page of a sweep shows: frontiers with the points beside them, gains, rejected points, provenance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.certainty.breakdown import parts_of
from disagg_sim.certainty.passes import RESOURCES
from disagg_sim.certainty.trust import COLUMN as TRUST_COLUMN
from disagg_sim.certainty.trust import MEANING
from disagg_sim.domain import SHARDING, UNSAID, ServingMode
from disagg_sim.errors import InputError
from disagg_sim.reading import read_json
from disagg_sim.report.breakdown import PART_TEXT, RESOURCE_TEXT, entries_of
from disagg_sim.report.page.assemble import Content, as_content_faults, read_block, read_table
from disagg_sim.report.tables import COST_TEXT
from disagg_sim.report.words import MODE_TEXT, decode_parts_text, degrees_text, mapping_text, records
from disagg_sim.serving.evidence import COLUMN as EVIDENCE_COLUMN
from disagg_sim.serving.evidence import level
from disagg_sim.serving.gains import curve, pointwise_gain, where_it_pays
from disagg_sim.serving.points import INTERACTIVITY, THROUGHPUT, WITH_SPARES, with_unsaid
from disagg_sim.serving.pool_frontier import GPUS
from disagg_sim.sweep.backends.run import run_tasks
from disagg_sim.sweep.cases import throughput_column
from disagg_sim.sweep.compare import read_frontier
from disagg_sim.sweep.fidelity import GAIN_AT
from disagg_sim.sweep.manifest import FRONTIER_FILE, MANIFEST
from disagg_sim.sweep.written import POOLS_FILE

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
COSTS = tuple(COST_TEXT)
#: Of speculative decoding, shown where some design has drafts.
DRAFTS = ("decode_draft_tokens", "accepted_tokens_per_step")
#: Columns of a point that its page needs, of a table of points.
NEEDED: tuple[str, ...] = (*AS_THEY_ARE, "mode", "system", "prefill_system", "prefill_precision", "profile")
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
    evidence = points[EVIDENCE_COLUMN].astype(str) if EVIDENCE_COLUMN in points else pd.Series("", points.index)
    return table.assign(
        mode=[MODE_TEXT.get(mode, mode) for mode in words["mode"]],
        system=systems,
        traffic=points["traffic"].to_numpy(),
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


def _mappings(points: pd.DataFrame, phase: str) -> list[str]:
    degrees = with_unsaid(points)[[f"{phase}_{name}" for name in SHARDING]].astype(int)
    known = {cut: degrees_text(*cut) for cut in set(degrees.itertuples(index=False, name=None))}
    return [known[cut] for cut in degrees.itertuples(index=False, name=None)]


def parts_of_designs(points: pd.DataFrame, *, jobs: int) -> tuple[pd.DataFrame, pd.DataFrame]:
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


#: Points shown beside the frontiers unless asked otherwise. [1]
BESIDE = 20_000
#: Entries of the manifest that tell what numbers were made of.
PROVENANCE = ("source", "versions", "code", "options", "specs", "tables", "blocks", "run", "inputs")
#: Texts of ``infeasible.csv``.
REJECTED = ("case", "mode", "phase", "reason", "detail")
#: Error bars of a gain: columns of ``gain.csv``.
BARS = ("gain_p10", "gain_p90", "probability")
#: What stands where a case has nothing to tell it apart, and where a table has no text.
PLAIN = "-"


def sweep_content(root: Path, *, beside: int = BESIDE, jobs: int = 1, breakdowns: bool = True) -> Content:
    """Read the directory of a sweep for its page."""
    front = read_frontier(root).table.reset_index(drop=True)
    if not len(front):
        raise InputError(f"{root}: no case has a result, so there is nothing to show; infeasible.csv says why")
    held = _manifest_facts(root)
    with as_content_faults(root / FRONTIER_FILE, "a frontier"):
        variants = _variants(front)
        points = shown_points(front, front["case"].map(variants)).assign(row=front.index).join(_bands(root, front))
    beside_them = _cloud(root, front, held["rows"], beside)
    if len(beside_them):
        with as_content_faults(root / "points", "the points of a sweep"):
            others = shown_points(beside_them, beside_them["case"].map(variants)).assign(row=-1)
            points = pd.concat([points, others[[name for name in points if name in others]]], ignore_index=True)
    ranked = throughput_column(held["facts"]["unit"])
    ranked += WITH_SPARES * (ranked + WITH_SPARES in front)
    counted = front.assign(**{THROUGHPUT: front[ranked]})
    parts, memory = parts_of_designs(front, jobs=jobs) if breakdowns else (pd.DataFrame(), pd.DataFrame())
    facts = held["facts"] | {
        "directory": str(root),
        "frontier": len(front),
        "at": GAIN_AT,
        "pays": _pays(counted),
        "resources": RESOURCE_TEXT,
        "memory": PART_TEXT,
        "trust": {str(label): said for label, said in MEANING.items()},
    }
    with as_content_faults(root / POOLS_FILE, "a frontier over pools"):
        pools = shown_pools(read_table(root / POOLS_FILE, texts=["case"]))
    rejected = read_table(root / "infeasible.csv", numbers=["count"], texts=REJECTED)
    tables = {"points": points, "parts": parts, "memory": memory, "gains": _gains(root, counted), "pools": pools}
    tables["rejected"] = rejected[rejected["count"] > 0] if len(rejected) else rejected
    return Content(kind="sweep", title=f"Sweep {facts['name']}", facts=facts, tables=tables)


def _manifest_facts(root: Path) -> dict[str, Any]:
    """What the manifest tells a page: facts, and the rows that are stored of all points."""
    path = root / MANIFEST
    with as_content_faults(path, "the manifest of a sweep"):
        manifest = read_json(path)
        cases = manifest["cases"]
        made = {name: manifest[name] for name in PROVENANCE if name in manifest}
        fits = [{"case": each["case"], "digest": each["digest"], "fits": list(each["fits"])} for each in cases]
        facts = {
            "name": str(manifest["name"]),
            "unit": str(manifest["options"]["per"]),
            "counts": {name: int(manifest["points"][name]) for name in ("enumerated", "feasible")},
            "provenance": made | {"cases": fits},
        }
        return {"facts": facts, "rows": sum(int(mode["rows"]) for each in cases for mode in each["modes"].values())}


def _variants(front: pd.DataFrame) -> dict[str, str]:
    """What the name of each case says beside model, systems, recipe, profile and lengths."""
    found = {}
    for case in front.drop_duplicates("case").to_dict("records"):
        name = str(case["case"])
        _, _, rest = name.partition("-" + "-".join(str(case["traffic"]).split("/")) + "-")
        found[name] = rest.replace("-", ", ").replace("_", " ") or PLAIN
    return found


def _bands(root: Path, front: pd.DataFrame) -> pd.DataFrame:
    """Error bars of the frontier points and what lies outside the fits, row by row; NaN and ``PLAIN`` where unknown."""
    keys = ["case", "mode", INTERACTIVITY]
    places = pd.MultiIndex.from_frame(front[keys].astype({"case": str, "mode": str}))
    found = pd.DataFrame(np.nan, index=front.index, columns=[*BANDS]).assign(outside=PLAIN)
    own: dict[str, Any] = {"numbers": [INTERACTIVITY], "texts": ["case", "mode"]}
    outside, bands = (read_table(root / f"{name}.csv", **own) for name in ("outside_calibration", "uncertainty"))
    if len(outside):
        told = outside.drop_duplicates(keys).set_index(keys)["outside_calibration"].reindex(places)
        found["outside"] = told.fillna(PLAIN).to_numpy()
    if len(bands):
        known = bands.drop_duplicates(keys).set_index(keys).reindex(places)
        found = found.assign(**{name: pd.to_numeric(known[name]).to_numpy() for name in BANDS if name in known})
    return found


def _cloud(root: Path, front: pd.DataFrame, stored: int, most: int) -> pd.DataFrame:
    """Points of the cases with a frontier, evenly taken out of the stored ones."""
    if not most or not stored:
        return pd.DataFrame()
    step = max(1, math.ceil(stored / most))
    traffic = front.drop_duplicates("case").set_index("case")["traffic"]
    wanted = [name for name in (*NEEDED, *COSTS, *DRAFTS) if name in front and name not in ("case", "traffic")]
    parts: list[pd.DataFrame] = []
    before = 0
    for path in sorted(root.glob("points/*/*.parquet")):
        if path.parent.name not in traffic.index:
            continue
        if not parts:  # what a frontier tells beside its own columns, points have not
            held = read_block(path, rows=(0, 0)).columns
            wanted = [name for name in wanted if name in held]
        block, case = read_block(path, wanted), path.parent.name
        parts.append(block.iloc[(-before) % step :: step].assign(case=case, traffic=traffic[case]))
        before += len(block)
    return _beside(pd.concat(parts, ignore_index=True), front) if parts else pd.DataFrame()


def _beside(points: pd.DataFrame, front: pd.DataFrame) -> pd.DataFrame:
    """Points that are not on the frontiers themselves, whose table has ten digits of each number."""

    def keys(table: pd.DataFrame) -> pd.MultiIndex:
        numbers = table[[INTERACTIVITY, THROUGHPUT]].astype(np.float32)
        return pd.MultiIndex.from_frame(numbers.assign(case=table["case"].astype(str), mode=table["mode"].astype(str)))

    return points[~keys(points).isin(keys(front))].reset_index(drop=True)


def _gains(root: Path, front: pd.DataFrame) -> pd.DataFrame:
    """Disaggregation over the best co-located throughput of each case, at some interactivities."""
    told = read_table(root / "gain.csv", numbers=[INTERACTIVITY, *BARS], texts=["case"])
    bars = {(row["case"], row[INTERACTIVITY]): row for row in told.to_dict("records")}
    rows = []
    for case, points in front.groupby("case", sort=False, observed=True):
        split = points["mode"].astype(str) == ServingMode.DISAGGREGATED
        if split.all() or not split.any():
            continue
        found = pointwise_gain(curve(points[split]), curve(points[~split]), GAIN_AT)
        for at, gain in zip(GAIN_AT, found.tolist(), strict=True):
            bar = bars.get((str(case), at), {})
            rows.append({"case": str(case), "at": at, "gain": gain} | {name: bar.get(name, math.nan) for name in BARS})
    return pd.DataFrame(rows)


def _pays(front: pd.DataFrame) -> list[dict[str, Any]]:
    """Where disaggregation pays, a row a case that has both kinds of modes."""
    split = front["mode"].astype(str) == ServingMode.DISAGGREGATED
    both = set(front["case"][split]) & set(front["case"][~split])
    table = front[front["case"].isin(both)]
    if not len(table):
        return []
    told = where_it_pays(table)[["case", "pays", "largest", "largest_at", "area_ratio", "low", "high"]]
    return [{str(name): value for name, value in row.items()} for row in told.to_dict("records")]
