"""Write the page of a directory of results: of a sweep, a plan, a simulation or a study.

A plan shows ``plan.json`` and the screen as it was printed; a simulation every run over time, its latencies, and the
summary of all; a study its claims with their verdicts, and its pictures.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.arrays import Floats
from disagg_sim.atomic import write_text
from disagg_sim.domain import SHARDING
from disagg_sim.errors import InputError
from disagg_sim.reading import read_json
from disagg_sim.report.page.assemble import Content, as_content_faults, page_html, read_block, read_table
from disagg_sim.report.page.sweep import BESIDE, sweep_content
from disagg_sim.report.schemas import PLAN
from disagg_sim.report.words import MODE_TEXT, beside_text, degrees_text
from disagg_sim.sweep.manifest import MANIFEST

#: Folders of the blocks that a page reads, named as ``scenario.plan`` names them; to read them needs no simulator.
REQUESTS, SAMPLES = "requests", "samples"
#: Bins of the time axis; samples and decisions that a page shows of all runs together. [1]
BINS, MOST_SAMPLES, MOST_DECISIONS = 90, 40_000, 5_000
#: Shares of the requests at which the spread of a latency is told. [1]
SHARES = np.concatenate([np.arange(0.01, 0.99, 0.01), [0.99, 0.995, 0.999]])
#: Percentiles over time.
OVER_TIME = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LATENCIES = ("ttft_s", "tpot_s")


def simulation_content(root: Path) -> Content:
    """Read the directory of a simulation for its page."""
    summary = read_table(root / "summary.csv", numbers=["rate_scale"], texts=["policy", "deployment", "trace"])
    if not len(summary):
        raise InputError(f"{root}: no run ended well, so there is nothing to show")
    found: dict[str, list[pd.DataFrame]] = {"over_time": [], "samples": [], "spread": []}
    for number, row in enumerate(summary.to_dict("records")):
        name = f"{row['deployment']}/{row['policy']}-{row['trace']}-x{row['rate_scale']:g}.parquet"
        if not (root / REQUESTS / name).is_file():
            continue
        requests, samples = read_block(root / REQUESTS / name), read_block(root / SAMPLES / name)
        with as_content_faults(root / REQUESTS / name, "a run"):
            done = _latencies(requests)
            step = max(1, -(-len(samples) // max(MOST_SAMPLES // len(summary), 1)))
            tables = {
                "over_time": _over_time(done, requests, samples),
                "samples": samples.iloc[::step].reset_index(drop=True),
                "spread": _spread(done),
            }
        for kind, table in tables.items():
            found[kind].append(table.assign(run=number))
    tables = {name: pd.concat(parts, ignore_index=True) for name, parts in found.items() if parts}
    tables["summary"] = summary
    for name in ("decisions", "capacity", "classes"):
        tables[name] = read_table(root / f"{name}.csv").head(MOST_DECISIONS)
    notes = root / "notes.txt"
    facts: dict[str, Any] = {"name": root.resolve().name, "notes": []}
    with as_content_faults(notes, "a text"):
        facts["notes"] = notes.read_text(encoding="utf-8").splitlines() if notes.is_file() else []
    return Content(kind="simulation", title=f"Simulation {facts['name']}", facts=facts, tables=tables)


def _latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Arrival, TTFT and TPOT of the completed requests. [s]"""
    done = requests[requests["status"] == "completed"]
    tokens = np.maximum(done["output_tokens"] - 1, 1)
    return pd.DataFrame(
        {
            "arrival_s": done["arrival_s"],
            "ttft_s": done["first_token_s"] - done["arrival_s"],
            "tpot_s": ((done["finish_s"] - done["first_token_s"]) / tokens).where(done["output_tokens"] > 1),
        }
    ).reset_index(drop=True)


def _over_time(done: pd.DataFrame, requests: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """Rates and percentiles in bins of the time of arrival."""
    edges = np.linspace(0.0, max(float(samples["time_s"].max()), 1e-9), BINS + 1)
    place = np.clip(np.searchsorted(edges, done["arrival_s"], side="right") - 1, 0, BINS - 1)
    width = np.diff(edges)
    columns: dict[str, Floats] = {
        "time_s": (edges[1:] + edges[:-1]) / 2,
        "arrivals_per_s": np.histogram(requests["arrival_s"].dropna(), edges)[0] / width,
        "finished_per_s": np.histogram(requests["finish_s"].dropna(), edges)[0] / width,
    }
    for latency in LATENCIES:
        bins = done[latency].groupby(place)
        for name, share in OVER_TIME.items():
            told = bins.quantile(share).reindex(range(BINS))
            columns[f"{latency.removesuffix('_s')}_{name}_s"] = told.to_numpy(dtype=float)
    return pd.DataFrame(columns)


def _spread(done: pd.DataFrame) -> pd.DataFrame:
    """Latencies at ``SHARES`` of the completed requests."""
    told = done[[*LATENCIES]].quantile(SHARES)
    return told.rename_axis("share").reset_index()


def plan_content(root: Path) -> Content:
    """Read the directory of a plan for its page."""
    path, text = root / "plan.json", root / "plan.txt"
    with as_content_faults(path, f"a plan of schema {PLAN}"):
        plan = read_json(path)
        if plan["schema"] != PLAN:
            raise ValueError(plan["schema"])
        for design in filter(None, [plan["best"], *plan["runners_up"]]):
            design["mode_text"] = MODE_TEXT.get(design["mode"], design["mode"])
            for pool in design["pools"]:
                degrees = degrees_text(**{name: pool[name] for name in SHARDING if name in pool})
                pool["mapping"] = degrees + beside_text(pool.get("chunk_tokens", 0), pool.get("draft_tokens", 0))
        model = plan["question"]["model"]
        plan["said"] = {"question": model, "verdict": [plan["status"]], "why": [], "changes": None, **plan["said"]}
    with as_content_faults(text, "a text"):
        screen = text.read_text(encoding="utf-8") if text.is_file() else ""
    facts = {"name": root.resolve().name, "plan": plan, "screen": screen}
    return Content(kind="plan", title=f"Plan {model}", facts=facts)


def study_content(root: Path) -> Content:
    """Read the directory of a reproduced study for its page."""
    claims = read_table(root / "claims.csv", texts=["id", "statement", "profile", "verdict"])
    if not len(claims):
        raise InputError(f"{root}: no claims.csv with a claim, so there is nothing to show")
    with as_content_faults(root, "the pictures of a study"):
        pictures = [
            {
                "name": str(each.relative_to(root).with_suffix("")),
                "png": base64.b64encode(each.read_bytes()).decode("ascii"),
            }
            for each in sorted([*root.glob("*.png"), *root.glob("*/*.png")])
        ]
    facts = {"name": root.resolve().name, "pictures": pictures}
    return Content(kind="study", title=f"Study {facts['name']}", facts=facts, tables={"claims": claims})


#: Stands in every page, so that a file of somebody else is never replaced.
MARK = '<meta name="generator" content="disagg-sim">'
#: File that tells a directory of results, the command that writes it, and what reads it.
KINDS: dict[str, tuple[str, Callable[[Path], Content]]] = {
    MANIFEST: ("sweep", sweep_content),
    "plan.json": ("plan", plan_content),
    "summary.csv": ("simulate", simulation_content),
    "claims.csv": ("reproduce", study_content),
}


def content_of(root: Path, *, beside: int = BESIDE, jobs: int = 1, breakdowns: bool = True) -> Content:
    """Read a directory of results for its page."""
    if not root.is_dir():
        raise InputError(f"{root}: no such directory")
    for file, (_, read) in KINDS.items():
        if (root / file).is_file():
            if read is sweep_content:
                return sweep_content(root, beside=beside, jobs=jobs, breakdowns=breakdowns)
            return read(root)
    told = ", ".join(f"{file} of {command}" for file, (command, _) in KINDS.items())
    raise InputError(f"{root}: no results to report; allowed: a directory with {told}")


def write_page(content: Content, path: Path) -> int:
    """Write a page. [B]"""
    text = page_html(content)
    write_text(path, text)
    return len(text.encode())
