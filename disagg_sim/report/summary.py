"""``summary.md``: what a person reads first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from disagg_sim.report.words import case_title, mapping_text, overview_name, ratio_text, records
from disagg_sim.sweep.results import CaseResult, SweepResult, write_text
from disagg_sim.units import GB, MS

INTERACTIVITIES = (20.0, 50.0, 100.0)  # [token/s]
X, Y = "tokens_per_s_per_user", "tokens_per_s_per_gpu"


def write_summary(result: SweepResult, root: Path, *, figures: bool) -> None:
    """Write ``summary.md`` into ``root``.

    Parameters
    ----------
    figures : bool
        Whether pictures are drawn beside it, to be linked.
    """
    write_text(root / "summary.md", summary(result, figures=figures))


def summary(result: SweepResult, *, figures: bool) -> str:
    """The text of ``summary.md``: best throughput, throughput at three interactivities, and how it is reached."""
    spec, total = result.plan.spec, result.total
    parts = [
        f"# Sweep `{spec.name}`",
        f"{len(result.cases)} cases, {total.computed:,} design points computed, {total.feasible:,} fit in memory. "
        f"Profile `{spec.profile}`, matching `{spec.matching}`; FTL at most {spec.limits.ftl_s:g} s, "
        f"{_ttl(spec.limits.ttl_s)}at most {spec.limits.gpu_cap} GPUs a deployment.",
        "Throughput is output tokens per second and GPU over both pools, without queues. A row at an interactivity "
        "shows the frontier point of highest throughput that gives every user at least that many tokens per second.",
        _overview(result),
    ]
    if any(case.inherited_fits for case in result.cases):
        parts.append("\\* some efficiencies are inherited from another system's fits; the case's section names them.")
    if figures:
        shown = Counter(overview_name(case.plan.case) for case in result.cases if not case.verdict)
        parts += [f"![{name}](figures/{name})" for name, count in shown.items() if count > 1]
    parts += [_section(case, figures=figures) for case in result.cases]
    return "\n\n".join(parts) + "\n"


def _ttl(limit: float) -> str:
    return "" if math.isinf(limit) else f"TTL at most {limit / MS:g} ms, "


def _overview(result: SweepResult) -> str:
    head = ["model", "system", "precision", "ISL/OSL", "best", *(f"at {x:g}" for x in INTERACTIVITIES)]
    rows = []
    for item in result.cases:
        case = item.plan.case
        best = [_throughput(point) for point in (_best(item), *(_at(item, x) for x in INTERACTIVITIES))]
        system = case.system + (" \\*" if item.inherited_fits else "")
        rows.append([case.model, system, case.precision, f"{case.isl}/{case.osl}", *best])
    return "Throughput [tokens/s/GPU], best and at 20, 50 and 100 tokens/s/user:\n\n" + _table(head, rows, numbers=4)


def _section(item: CaseResult, *, figures: bool) -> str:
    case = item.plan.case
    parts = [f"## {case_title(case)}"]
    if item.inherited_fits:
        parts.append("Inherited fits: " + "; ".join(item.inherited_fits) + ".")
    if item.verdict:
        return "\n\n".join([*parts, f"No result: {item.verdict}."])
    points = [("best throughput", _best(item)), *((f"≥ {x:g} tokens/s/user", _at(item, x)) for x in INTERACTIVITIES)]
    points.append(("best interactivity", records(item.frontier.tail(1))[0]))
    head = [
        "", "tokens/s/user", "tokens/s/GPU", "decode mapping", "decode batch", "prefill mapping", "prefill batch",
        "prefill : decode instances×GPUs", "GPU ratio", "FTL [s]", "TTL [ms]",
        "egress [GB/s]", "ingress [GB/s]", "bound",
    ]  # fmt: skip
    parts.append(_table(head, [[name, *_cells(point)] for name, point in points], numbers=0))
    parts.append(f"{len(item.frontier)} points on the frontier, {item.decode.rows:,} matched.")
    if figures:
        names = ("pareto", "kv_bandwidth", "ctx_gen_ratio")
        parts.append("\n".join(f"![{name} of {case.name}](figures/{case.name}/{name}.png)" for name in names))
    return "\n\n".join(parts)


def _cells(point: Mapping[str, Any] | None) -> list[str]:
    if point is None:
        return ["not reached", *[""] * 12]
    chunk = f", chunk {int(point['prefill_chunk_tokens'])}" if point["prefill_chunk_tokens"] else ""
    return [
        f"{point[X]:.1f}",
        _throughput(point),
        mapping_text(point, "decode"),
        f"{int(point['decode_batch'])}",
        mapping_text(point, "prefill") + chunk,
        f"{int(point['prefill_batch'])}",
        ratio_text(point),
        f"{point['ctx_gen_gpu_ratio']:.2f}",
        f"{point['ftl_s']:.2f}",
        f"{point['ttl_s'] / MS:.1f}",
        f"{point['kv_egress_bytes_per_s_per_gpu'] / GB:.2f}",
        f"{point['kv_ingress_bytes_per_s_per_gpu'] / GB:.2f}",
        str(point["decode_bound"]),
    ]


def _best(item: CaseResult) -> dict[str, Any] | None:
    return _at(item, 0.0)


def _at(item: CaseResult, interactivity: float) -> dict[str, Any] | None:
    """The frontier point of highest throughput with at least this interactivity [token/s]; None if none has."""
    if not len(item.frontier):
        return None
    front = item.frontier[item.frontier[X] >= interactivity]
    return records(front.head(1))[0] if len(front) else None


def _throughput(point: Mapping[str, Any] | None) -> str:
    if point is None:
        return "–"
    value = float(point[Y])
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(head: list[str], rows: list[list[str]], *, numbers: int) -> str:
    """A Markdown table; the last ``numbers`` columns are set flush right."""
    rule = ["---"] * (len(head) - numbers) + ["--:"] * numbers
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))
