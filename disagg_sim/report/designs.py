"""Write ``designs.md``: of every case of a sweep the designs of each mode at three speeds, and what they rest on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from disagg_sim.certainty.extrapolation import tally_of
from disagg_sim.certainty.trust import COLUMN as TRUST_COLUMN
from disagg_sim.certainty.trust import MEANING, Trust
from disagg_sim.domain import ServingMode
from disagg_sim.report.words import (
    MODE_TEXT,
    case_title,
    decode_parts_text,
    drafts_text,
    mapping_text,
    markdown_table,
    pools_text,
    prefill_text,
    ratio_text,
    records,
    tags_text,
    throughput_text,
)
from disagg_sim.search.layouts import EVIDENCE, SERVED
from disagg_sim.serving.evidence import COLUMN as EVIDENCE_COLUMN
from disagg_sim.serving.evidence import level
from disagg_sim.serving.pool_frontier import GPUS
from disagg_sim.sweep.cases import Case
from disagg_sim.sweep.fidelity import SPEEDS, CaseFidelity
from disagg_sim.sweep.results import CaseResult, ModeResult, SweepResult
from disagg_sim.sweep.spec import PointLimits
from disagg_sim.sweep.tally import ABOVE_NIC
from disagg_sim.units import GB, MS

if TYPE_CHECKING:
    import pandas as pd

X = "tokens_per_s_per_user"
#: Kinds of extrapolation that a case names.
MOST_KINDS = 6
#: What a table of throughput counts in.
UNITS = {"gpu": "tokens/s/GPU", "usd": "tokens/USD", "watt": "tokens/J", "joule": "tokens/J drawn"}
POOL_COLUMNS = (
    "decode mapping",
    "decode batch",
    "prefill mapping",
    "prefill batch",
    "prefill : decode instances×GPUs",
    "GPU ratio",
    "GPUs",
    "requests/s",
    "FTL [s]",
    "with slot wait [s]",
    "TTL [ms]",
    "egress [GB/s]",
    "ingress [GB/s]",
    "bound",
    "layouts",
    "rests on",
)
SHARED_COLUMNS = (
    "mapping",
    "batch",
    "prefill",
    "GPUs",
    "requests/s",
    "FTL [s]",
    "with slot wait [s]",
    "TTL [ms]",
    "largest gap [ms]",
    "bound",
    "layouts",
    "rests on",
)


def designs_text(result: SweepResult, *, figures: bool, fidelity: Sequence[CaseFidelity] = ()) -> str:
    """Write of every case the designs of each mode at three speeds, and what they rest on.

    Returns markdown: throughput in tokens/s/GPU, latencies in s and ms.
    """
    parts = [
        f"# Designs of the sweep `{result.plan.spec.name}`",
        "Throughput is output tokens per second over all GPUs, without queues. A row at an interactivity "
        "shows the frontier point of highest throughput that gives every user at least that many tokens per second.",
        "`rests on` shares out the throughput of a row by what the times behind it rest on: "
        + "; ".join(f"**{label}**: {meaning}" for label, meaning in MEANING.items() if label != Trust.MEASURED)
        + ".",
        _overview(result),
    ]
    if any(case.inherited_fits for case in result.cases):
        parts.append("\\* some efficiencies are inherited from another system's fits; the case's section names them.")
    known = {each.case: each for each in fidelity}
    parts += [_section(case, known.get(case.plan.case.name), figures=figures) for case in result.cases]
    return "\n\n".join(parts) + "\n"


def _overview(result: SweepResult) -> str:
    per = result.plan.spec.per
    tagged = any(case.plan.case.tags for case in result.cases)
    head = ["model", "systems and precision", "ISL/OSL", *["case"] * tagged, "mode", "best"]
    head += [f"at {x:g}" for x in SPEEDS]
    rows = []
    for item in result.cases:
        case = item.plan.case
        systems = pools_text(case.pools) + (" \\*" if item.inherited_fits else "")
        first = [case.model, systems, str(case.traffic), *[tags_text(case)] * tagged]
        for mode in item.modes:
            best = (mode.at(0.0), *(mode.at(x) for x in SPEEDS))
            rows.append([*first, MODE_TEXT[mode.mode], *(throughput_text(point, case.throughput) for point in best)])
    spares = ", spares among the GPUs" * any(each.columns_of_spares for each in result.plan.spec.served)
    title = f"Throughput [{UNITS[per]}{spares}], best and at 20, 50 and 100 tokens/s/user:"
    return f"{title}\n\n{markdown_table(head, rows, numbers=4)}"


def _section(item: CaseResult, fidelity: CaseFidelity | None, *, figures: bool) -> str:
    case = item.plan.case
    parts = [f"## {case_title(case)}"]
    if case.speculation:
        tried = f", {' or '.join(map(str, case.draft_tokens))} drafts a step" if case.draft_tokens else ""
        parts.append(f"Decode speculates: `{case.speculation}`{tried}.")
    if item.inherited_fits:
        parts.append("Inherited fits: " + "; ".join(item.inherited_fits) + ".")
    parts += [f"No result{f' {MODE_TEXT[mode]}' if mode else ''}: {verdict}." for mode, verdict in item.verdicts]
    if math.isfinite(case.limits.nic_limit):
        parts += [_removed_by_nic(mode, case.limits) for mode in item.modes if mode.mode == ServingMode.DISAGGREGATED]
    if gain := _gain(item):
        parts.append(gain)
    if item.found:
        parts.append(_checked(item))
    if fidelity is not None:
        parts += [text for text in (_sure(fidelity), _extrapolated(fidelity)) if text]
    parts += [_mode_table(mode, case) for mode in item.found]
    if len(item.pools):
        parts.append(_pools_table(item.pools, item.plan.case))
    if figures and item.found:
        names = ("pareto", *("kv_bandwidth", "ctx_gen_ratio") * (item.found[0].mode == ServingMode.DISAGGREGATED))
        parts.append("\n".join(f"![{name} of {case.name}](figures/{case.name}/{name}.png)" for name in names))
    return "\n\n".join(parts)


def _removed_by_nic(item: ModeResult, limits: PointLimits) -> str:
    prefill, decode = (item.removed.get(phase, {}).get(ABOVE_NIC, 0) for phase in ("prefill", "decode"))
    return (
        f"The NIC limit of {limits.nic_limit / GB:g} GB/s per GPU removed {prefill:,} prefill and {decode:,} decode "
        "design points that fit in memory and meet the latency limits."
    )


def _gain(item: CaseResult) -> str:
    """Throughput of disaggregated serving over the best co-located one, at the interactivities that both reach."""
    pools = [mode for mode in item.found if mode.mode == ServingMode.DISAGGREGATED]
    shared = [mode for mode in item.found if mode.mode != ServingMode.DISAGGREGATED]
    if not pools or not shared:
        return ""
    column, told = item.plan.case.throughput, []
    for x in (0.0, *SPEEDS):
        ours, others = pools[0].at(x), [point for mode in shared if (point := mode.at(x)) is not None]
        if ours is not None and others:
            gain = ours[column] / max(point[column] for point in others)
            told.append(f"{f'at {x:g} tokens/s/user' if x else 'at best'} {gain:.2f}")
    return f"Disaggregated over the best co-located throughput: {', '.join(told)}." if told else ""


def _checked(item: CaseResult) -> str:
    """How many frontier points have layouts that served runs have checked, or that an engine can start."""
    words = [str(text) for mode in item.found for text in mode.frontier[EVIDENCE_COLUMN]]
    levels = Counter(map(level, words))
    told = ", ".join(f"{levels[name]} {name}" for name in EVIDENCE if levels[name])
    why = Counter(text.partition(": ")[2] for text in words if text != SERVED).most_common(MOST_KINDS)
    kinds = f" ({'; '.join(f'{text}: {count}' for text, count in why)})" if why else ""
    return f"Layouts of the {len(words)} frontier points: {told}{kinds}."


def _sure(fidelity: CaseFidelity) -> str:
    """How probable it is that disaggregation gains at all."""
    told = [
        f"at {row[X]:g} tokens/s/user {row['gain_p10']:.2f}-{row['gain_p90']:.2f}, above 1 in {row['probability']:.0%}"
        for row in records(fidelity.gain)
        if row[X] in SPEEDS
    ]
    return f"With its error bars, 80 % of all samples: {'; '.join(told)} of them (`gain.csv`)." if told else ""


def _extrapolated(fidelity: CaseFidelity) -> str:
    """How many frontier points rest on operators that nobody measured as they are used."""
    if not len(fidelity.outside):
        return ""
    words = fidelity.outside["outside_calibration"]
    some = int((words != "").sum())
    if not some:
        return "Every operator of every frontier point lies inside its calibrated range."
    kinds = "; ".join(f"{kind} ({count})" for kind, count in tally_of(words)[:MOST_KINDS])
    return (
        f"{some} of {len(words)} frontier points rest on extrapolated operators: {kinds} (`outside_calibration.csv`)."
    )


def _mode_table(item: ModeResult, case: Case) -> str:
    points = [("best throughput", item.at(0.0)), *((f"≥ {x:g} tokens/s/user", item.at(x)) for x in SPEEDS)]
    points.append(("best interactivity", item.at(math.inf)))
    own, cells = (
        (POOL_COLUMNS, _pool_cells) if item.mode == ServingMode.DISAGGREGATED else (SHARED_COLUMNS, _shared_cells)
    )
    rows = [
        [name, "not reached", *[""] * (len(own) + 1)]
        if point is None
        else [name, f"{point[X]:.1f}", throughput_text(point, case.throughput), *cells(point)]
        for name, point in points
    ]
    counted = f"{len(item.frontier)} points on the frontier, {item.points.rows:,} matched"
    if item.mode != ServingMode.DISAGGREGATED:
        counted = f"{len(item.frontier)} points on the frontier, {item.points.rows:,} within the limits"
    text = MODE_TEXT[item.mode]
    table = markdown_table([text, "tokens/s/user", UNITS[case.per], *own], rows)
    return f"{table}\n\n{counted}."


def _pools_table(front: pd.DataFrame, case: Case) -> str:
    """The frontier over further pools at the same interactivities, GPUs of every pool that some design has."""
    rows = records(front.sort_values(case.throughput, ascending=False))
    used = [name for name in GPUS if front[name].any()]
    points = [("best throughput", 0.0), *((f"≥ {x:g} tokens/s/user", x) for x in SPEEDS)]
    head = ["all pools", "tokens/s/user", UNITS[case.per], *(f"{name.removesuffix('_gpus')} GPUs" for name in used)]
    head += ["prefill", "decode", "decode batch", "FTL [s]", "TTL [ms]"]
    cells = []
    for name, least in points:
        point = next((row for row in rows if row[X] >= least), None)
        if point is None:
            cells.append([name, "not reached", *[""] * (len(head) - 2)])
            continue
        gpus = [f"{int(point[each])}" for each in used]
        cells.append(
            [name, f"{point[X]:.1f}", throughput_text(point, case.throughput), *gpus, mapping_text(point, "prefill")]
        )
        cells[-1] += [decode_parts_text(point), f"{int(point['decode_batch'])}"]
        cells[-1] += [f"{point['ftl_s']:.2f}", f"{point['ttl_s'] / MS:.1f}"]
    return (
        f"{markdown_table(head, cells, numbers=0)}\n\n{len(front)} points on the frontier over all pools (`pools.csv`)."
    )


def _pool_cells(point: Mapping[str, Any]) -> list[str]:
    chunk = f", chunk {int(point['prefill_chunk_tokens'])}" if point["prefill_chunk_tokens"] else ""
    return [
        mapping_text(point, "decode") + drafts_text(point),
        f"{int(point['decode_batch'])}",
        mapping_text(point, "prefill") + chunk,
        f"{int(point['prefill_batch'])}",
        ratio_text(point),
        f"{point['ctx_gen_gpu_ratio']:.2f}",
        *_deployment_cells(point),
        f"{point['ftl_s']:.2f}",
        f"{point['ftl_with_slot_wait_s']:.2f}",
        f"{point['ttl_s'] / MS:.1f}",
        f"{point['kv_egress_bytes_per_s_per_gpu'] / GB:.2f}",
        f"{point['kv_ingress_bytes_per_s_per_gpu'] / GB:.2f}",
        str(point["decode_bound"]),
        str(point[EVIDENCE_COLUMN]),
        str(point[TRUST_COLUMN]),
    ]


def _shared_cells(point: Mapping[str, Any]) -> list[str]:
    return [
        mapping_text(point, "decode") + drafts_text(point),
        f"{int(point['decode_batch'])}",
        prefill_text(point),
        *_deployment_cells(point),
        f"{point['ftl_s']:.2f}",
        f"{point['ftl_with_slot_wait_s']:.2f}",
        f"{point['ttl_s'] / MS:.1f}",
        f"{point['ttl_largest_gap_s'] / MS:.1f}",
        str(point["decode_bound"]),
        str(point[EVIDENCE_COLUMN]),
        str(point[TRUST_COLUMN]),
    ]


def _deployment_cells(point: Mapping[str, Any]) -> tuple[str, str]:
    """GPUs of the deployment, both pools together, and the requests that it serves a second."""
    return f"{int(point['total_gpus'])}", f"{point['request_rate_per_s']:.3g}"
