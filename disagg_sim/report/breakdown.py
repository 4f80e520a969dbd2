"""Format the breakdown of a design as tables: time, energy, which GPUs are too full, and what the parts rest on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from disagg_sim.certainty.breakdown import Breakdown
from disagg_sim.certainty.contributions import LABELS
from disagg_sim.certainty.passes import RESOURCES
from disagg_sim.certainty.trust import Trust, added, trust_of_entry
from disagg_sim.report.words import MODE_TEXT, mapping_text, prefill_text, ratio_text, records
from disagg_sim.units import GB, MS, US
from disagg_sim.workload.named import constant_named, parted, ranks_parted, reuse_text

#: Resources as people read them.
RESOURCE_TEXT = {
    "compute": "compute",
    "hbm": "HBM",
    "nvlink": "NVLink",
    "nic": "NIC",
    "latency": "latency",
    "host": "host",
    "waiting": "waiting",
}
#: Okabe and Ito's palette; greys for what no hardware speeds up.
RESOURCE_COLOURS = {
    "compute": "#D55E00",
    "hbm": "#0072B2",
    "nvlink": "#009E73",
    "nic": "#CC79A7",
    "latency": "#E69F00",
    "host": "#777777",
    "waiting": "#CFCFCF",
}
#: Latencies as people read them.
LATENCY_TEXT = {"ttl": "TTL", "ftl": "FTL"}
#: Parts of memory as people read them.
PART_TEXT = {
    "weights": "weights",
    "cache": "KV cache",
    "state": "states of sequences",
    "activations": "activations, logits",
    "communication": "communication buffers",
    "runtime": "runtime, libraries",
}
#: Parameters of elasticities as people read them, and whether one percent more or less of them is meant.
PARAMETER_TEXT = {
    "flops": "1 % more compute",
    "hbm_bandwidth": "1 % more HBM bandwidth",
    "nvlink_bandwidth": "1 % more NVLink bandwidth",
    "nic_bandwidth": "1 % more NIC bandwidth",
    "nvlink_latency": "1 % less NVLink latency",
    "nic_latency": "1 % less NIC latency",
}
#: Parts below this share of a latency are told together. [1]
WORTH_TELLING = 0.005
OTHER, OTHERS = "other", "others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One part of a latency."""

    operator: str
    step: str  # the kind of pass that it belongs to; "" where all of the latency are of one kind
    seconds: float
    share: float  # of the latency [1]
    by: Mapping[str, float]  # resource -> seconds
    trust: str  # label of what it rests on; "" of waiting
    light: float  # time at the speed of light over the own [1]
    outside: str  # sizes beyond the range of the fit
    source: str  # file, line and entry


def heading(point: Mapping[str, Any]) -> str:
    """Name a design in one line: model, systems, mode, lengths, mappings, batches."""
    mode = str(point["mode"])
    where = f"{point['model']} on {point['system']}, {point['precision']} ({point['profile']})"
    chunk = f" in chunks of {int(point['prefill_chunk_tokens'])}" if point["prefill_chunk_tokens"] else ""
    of = {
        phase: f"{mapping_text(point, phase)}, batch {int(point[f'{phase}_batch'])}{chunk * (phase == 'prefill')}"
        for phase in ("decode", "prefill")
        if f"{phase}_batch" in point
    }
    if drafts := point.get("decode_draft_tokens", 0):
        of["decode"] += f", draft tokens {int(drafts)}"
    if mode in of:
        how = of[mode]
    elif mode == "disaggregated":
        how = f"decode {of['decode']}; prefill {of['prefill']}; {ratio_text(point)} instances×GPUs"
    else:
        how = f"{of['decode']}, {prefill_text(point)}"
    lengths = f"{point['isl']:,.0f} tokens in, {point['osl']:,.0f} out"
    if isinstance(named := point.get("traffic"), str):
        plain, rank_imbalance = ranks_parted(named)
        law, reuse = parted(plain)
        if not constant_named(law):
            lengths = f"{law} ({lengths} on average)"
        lengths += "" if reuse is None else f", {reuse_text(reuse)}"
        lengths += "" if plain == named else f", DP ranks by {rank_imbalance}"
    return f"{where}: {MODE_TEXT.get(mode, mode)}, {lengths}; {how}"


def point_of(found: Breakdown, row: Any) -> dict[str, Any]:
    """Take the design of a row by column name."""
    return records(found.points.loc[[row]])[0]


def lines_of(found: Breakdown, row: Any, latency: str) -> list[Line]:
    """List the parts of a latency ("ttl" or "ftl"), the longest first, small ones added up in the last line. [s]"""
    parts = found.latency(row, latency)
    several = len(parts["step"].unique()) > 1
    told = parts[parts["share"] >= WORTH_TELLING]
    rest = parts[parts["share"] < WORTH_TELLING]
    lines = [_line(part, several=several) for part in records(told)]
    if len(rest):
        total = {str(name): value for name, value in rest.select_dtypes("number").sum().items()}
        words = {
            "operator": f"{len(rest)} {OTHERS if len(rest) > 1 else OTHER}",
            "step": "",
            "trust": "",
            "outside": "",
            "source": "",
        }
        lines.append(_line(total | words, several=several))
    return lines


def _line(part: Mapping[str, Any], *, several: bool) -> Line:
    return Line(
        operator=part["operator"],
        step=part["step"] if several else "",
        seconds=part["seconds"],
        share=part["share"],
        by={name: part[f"{name}_s"] for name in RESOURCES},
        trust=part["trust"],
        light=part["ideal_s"] / part["seconds"],
        outside=part["outside"],
        source=part["source"],
    )


def time_text(seconds: float) -> str:
    """Write a time in the unit that suits it."""
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    return f"{seconds / MS:.3g} ms" if seconds >= MS / 10 else f"{seconds / US:.3g} us"


def latency_title(found: Breakdown, row: Any, latency: str) -> str:
    """Title a latency: its value, its meaning for users, and its distance from the speed of light."""
    parts = found.latency(row, latency)
    seconds, ideal = parts["seconds"].sum(), parts["ideal_s"].sum()
    rate = f" = {1.0 / seconds:,.4g} tokens/s/user" if latency == "ttl" else ""
    far = f"; {ideal / seconds:.0%} of the speed of light ({time_text(ideal)})"
    return f"{LATENCY_TEXT[latency]} {time_text(seconds)}{rate}{far}"


def trust_shares(found: Breakdown, row: Any, latency: str) -> dict[Trust, float]:
    """Share out a latency by what its parts rest on, best label first; waiting is left out. [1]"""
    parts = found.latency(row, latency)
    told = parts[parts["trust"] != ""]
    return added([(part["seconds"], {Trust(part["trust"]): 1.0}) for part in records(told)])


def resource_shares(found: Breakdown, row: Any, latency: str) -> dict[str, float]:
    """Compute the share of each of ``RESOURCES`` in a latency, the largest first. [1]"""
    parts = found.latency(row, latency)
    shares = {name: float(parts[f"{name}_s"].sum() / parts["seconds"].sum()) for name in RESOURCES}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def memory_lines(found: Breakdown, row: Any) -> Iterator[tuple[str, float, list[tuple[str, float]]]]:
    """List by pool what fills its fullest GPU: title, limit [B], and the parts with their bytes, largest first [B]."""
    mine = found.memory[found.memory["row"] == row]
    for phase, parts in mine.groupby("phase", sort=False):
        held, (limit, graphs, context) = (
            parts["bytes"].sum(),
            parts[["limit_bytes", "graphs_bytes", "context_bytes"]].iloc[0],
        )
        pool, share = "GPU" if phase == "both" else f"{phase} GPU", held / limit
        title = f"memory of a {pool}: {held / GB:.1f} of {limit / GB:.1f} GB that an engine may fill ({share:.0%})"
        if graphs or context:
            title += f"; outside of it CUDA graphs {graphs / GB:.1f} and in use before {context / GB:.1f} GB"
        ranked = parts[parts["bytes"] > 0].sort_values("bytes", ascending=False, kind="stable")
        named = [(PART_TEXT[part], size) for part, size in zip(ranked["part"], ranked["bytes"], strict=True)]
        yield title, limit, named


def elasticity_rows(found: Breakdown, row: Any) -> Iterator[tuple[str, str, str, str]]:
    """Tell by number of the hardware what one percent of it brings of TTL, FTL and throughput, in words."""
    mine = found.elasticities[found.elasticities["row"] == row]
    for line in records(mine):
        sign = -1.0 if line["parameter"].endswith("_latency") else 1.0
        values = [sign * line[name] for name in ("ttl", "ftl", "throughput")]
        if np.nanmax(np.abs(values)) >= 0.0005:
            texts = ["" if np.isnan(value) else f"{value:+.2f} %" for value in values]
            yield PARAMETER_TEXT[line["parameter"]], texts[0], texts[1], texts[2]


def energy_lines(parts: pd.DataFrame) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Write the energy of every kind of pass of a design, by class of operator, the dearest first."""
    for step, mine in parts.groupby("step", sort=False):
        seconds, joules = mine["seconds"].sum(), mine["joules"].sum()
        by = mine.groupby(mine["kind"].map(lambda kind: LABELS.get(kind, str(kind))), sort=False)
        classes = by[["seconds", "joules"]].sum().sort_values("joules", ascending=False)
        lines: list[tuple[str, ...]] = [
            (
                *(str(name), time_text(time), f"{time / seconds:.1%}", f"{energy / time:.0f} W"),
                *(f"{energy:.3g} J", f"{energy / joules:.1%}"),
            )
            for name, time, energy in classes.itertuples()
        ]
        yield f"energy of a {step}: {joules:.3g} J a GPU, {joules / seconds:.0f} W", lines


#: Bytes above a limit that rounding makes, over the limit. [1]
ROUNDING = 1e-9


def too_full(pools: Mapping[str, tuple[float, float]]) -> str:
    """Say what does not fit, in one line; empty where all fits."""
    said = [
        f"one {'' if name in ('', 'both') else f'{name} '}GPU would hold {held / GB:.1f} of {limit / GB:.1f} GB "
        f"({held / limit:.0%}), {(held - limit) / GB:.1f} GB too much"
        for name, (held, limit) in pools.items()
        if held > limit * (1.0 + ROUNDING)
    ]
    return f"does not fit: {'; '.join(said)}" if said else ""


def memory_of_pools(found: Breakdown, row: Any) -> dict[str, tuple[float, float]]:
    """Sum up what the fullest GPU of each pool holds, as ``too_full`` takes it. [B]"""
    mine = found.memory[found.memory["row"] == row]
    return {
        str(phase): (float(parts["bytes"].sum()), float(parts["limit_bytes"].iloc[0]))
        for phase, parts in mine.groupby("phase", sort=False)
    }


def source_rows(found: Breakdown, row: Any) -> Iterator[tuple[str, ...]]:
    """List what the parts of a design rest on, each once: entry, equation, label, rows, errors, place, range."""
    parts = found.operators[found.operators["row"] == row]
    equations = parts.assign(equation=parts["equation"].str.removeprefix("disagg_sim."))
    of_operator = dict(zip(equations["operator"], equations["equation"], strict=True))
    mine = found.fits[found.fits["row"] == row].drop_duplicates(["file", "entry"])
    known = set()
    for fit in records(mine):
        place = f"{fit['file']}:{fit['line']}"
        known.add(f"{place} {fit['entry']}")
        origin = f" of {fit['inherited_from']}" if fit["inherited_from"] else ""
        errors = f"{fit['median_error']:.1%}", f"{fit['p90_error']:.1%}"
        equation = of_operator.get(fit["operator"], "")
        engine = f"{fit['trust']}: {fit['engine']} {fit['version']}{origin}"
        yield fit["entry"], equation, engine, f"{fit['points']:,}", *errors, place, fit["range"]
    for sources, equation in dict(zip(equations["source"], equations["equation"], strict=True)).items():
        for source in filter(None, sources.split("; ")):
            place, _, entry = source.partition(" ")
            if source not in known:
                known.add(source)
                label = str(trust_of_entry(place, entry))
                yield entry, _ENGINE_EQUATIONS.get(entry) or equation, label, "", "", "", place, ""


#: Number of an engine profile -> function that takes it.
_ENGINE_EQUATIONS = {
    "step_host": "physics.passes.engine_time.host_time",
    "rank_host": "physics.passes.engine_time.host_time",
    "sequence_host": "physics.passes.engine_time.host_time",
    "kernel_launch": "physics.passes.engine_time.launch_time",
    "prefill_stretch": "physics.passes.engine_time.prefill_stretch",
    "exchange_stretch": "physics.cost.exchange_cost",
    "exchange_wait": "physics.cost.exchange_cost",
}


def entries_of(source: str) -> str:
    """Name the entries behind a part, without their places."""
    return ", ".join(each.partition(" ")[2] for each in source.split("; ") if each)
