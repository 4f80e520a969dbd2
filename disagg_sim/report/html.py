"""Render specs, mappings, grids and plans as HTML for notebooks: ``html_of`` is behind every ``_repr_html_``.

Plain tables without colours, so that they follow the notebook's own theme, light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache, singledispatch
from html import escape

import numpy as np

from disagg_sim.certainty.breakdown import Breakdown
from disagg_sim.certainty.passes import LATENCIES
from disagg_sim.domain import BOUNDS, Sharding
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.precision_recipe import PrecisionRecipe
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.facts.traffic import TrafficSpec
from disagg_sim.physics.setup import Setup
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.assurance import assurance
from disagg_sim.planning.flips import changes_of
from disagg_sim.report import breakdown
from disagg_sim.report.breakdown import heading, latency_title, lines_of, point_of, time_text
from disagg_sim.report.lines import (
    Line,
    deployment_rows,
    model_lines,
    precision_lines,
    profile_lines,
    resolved_lines,
    summary_lines,
    system_lines,
    traffic_lines,
)
from disagg_sim.report.plan import PlanExtras, ScreenPart, changes, screen
from disagg_sim.report.words import text_of
from disagg_sim.search.deployment import Deployment, Pool
from disagg_sim.search.phase_grid import PhaseGrid
from disagg_sim.serving.pools import PoolsPlan
from disagg_sim.simulation.capacity import Capacity
from disagg_sim.simulation.deployment import ServedDeployment
from disagg_sim.simulation.metrics import Summary
from disagg_sim.simulation.records import RunResult
from disagg_sim.units import GB, MS

LEFT = ' style="text-align:left"'
POOL_HEAD = ("pool", "instances", "mapping", "GPUs each", "batch", "latency", "requests/s each", "memory", "system")
#: Designs of a breakdown that are shown. [1]
MOST_DESIGNS = 3
LATENCY = {"prefill": "FTL", "decode": "TTL"}


@singledispatch
def html_of(value: object) -> str:
    """Render a value as an HTML table, with text from files escaped; other values show their ``repr``."""
    return f"<pre>{escape(repr(value))}</pre>"


for _kind, _of_kind in (
    (SystemSpec, system_lines),
    (ModelSpec, model_lines),
    (TrafficSpec, traffic_lines),
    (PrecisionRecipe, precision_lines),
    (ProfileSpec, profile_lines),
):
    html_of.register(_kind, lambda spec, lines=_of_kind: _table(spec.title, lines(spec)))


@html_of.register
def _(spec: Precision) -> str:
    return _table(f"{spec.name}, as one model uses it", resolved_lines(spec))


@html_of.register
def _(at: Setup) -> str:
    lines = [
        ("precision", at.precision.name),
        ("profile", at.profile.title),
        ("kernels", at.engine or "in the order of the system's fits"),
        ("engine overheads", at.overheads.title if at.overheads else "none"),
        ("memory that an engine may fill", f"{at.memory_limit / GB:.1f} GB a GPU"),
        *(("fit", taken.text) for taken in at.rates.used),
    ]
    return _table(f"{at.model.title} on {at.system.title}", lines)


@html_of.register
def _(mapping: Sharding) -> str:
    if np.ndim(mapping.pp):
        sizes, counts = np.unique(mapping.gpus, return_counts=True)
        head = ("GPUs of an instance", *(f"{size}" for size in sizes))
        shown = _table(f"{_counted(len(mapping), 'mapping')}", [("mappings", *(f"{count}" for count in counts))], head)
        refused = "; ".join(f"{reason}: {count:,}" for reason, count in sorted(mapping.refused, key=lambda r: -r[1]))
        return shown + (f"<p>Rejected: {escape(refused)}</p>" if refused else "")
    copies = f", {mapping.redundant_slots} redundant slots" if mapping.redundant_slots else ""
    shared = {"cached tokens": mapping.dcp, "new tokens": mapping.pcp}
    context = "".join(f", {what} shared by {degree}" for what, degree in shared.items() if degree > 1)
    lines = [
        ("attention", f"tensor parallel over {mapping.tp_attn}, data parallel over {mapping.dp_attn}{context}"),
        ("feed-forward part", f"tensor parallel over {mapping.tp_ffn}, expert parallel over {mapping.ep}{copies}"),
        ("pipeline", f"{mapping.pp} stages" if mapping.pp > 1 else "none"),
        ("prefill", f"chunks of {mapping.chunk_tokens:,} tokens" if mapping.chunk_tokens else "whole prompts"),
    ]
    return _table(f"{_mapping_text(mapping)}: {_counted(mapping.gpus, 'GPU')}", lines)


@html_of.register
def _(pool: Pool) -> str:
    return _table(_pool_text(pool), _pool_rows(pool), POOL_HEAD)


@html_of.register
def _(deployment: Deployment) -> str:
    pools = (deployment.prefill, deployment.decode)
    caption = "; ".join(_pool_text(pool) for pool in pools)
    return _table(caption, [row for pool in pools for row in _pool_rows(pool)], POOL_HEAD)


@html_of.register
def _(plan: PoolsPlan) -> str:
    lines: list[Line] = [("status", plan.status), ("", plan.message)]
    lines += [(f"{name} pool", _counted(gpus, "GPU")) for name, gpus in plan.gpus.items()]
    if plan.members:
        lines += [
            ("output", f"{plan.tokens_per_s_per_gpu:,.4g} tokens/s/GPU over {_counted(plan.total_gpus, 'GPU')}"),
            ("requests", f"{plan.request_rate:.4g} per second"),
            ("latency", f"FTL {plan.ftl_s:.4g} s, TTL {plan.ttl_s / MS:.4g} ms"),
        ]
    if not np.isnan(plan.cost):
        lines.append(("cost", f"{plan.cost:,.4g} USD/h, or W where it is per watt"))
    caption = "Deployment" if plan.members else "No deployment"
    return _table(caption, lines) + (html_of(plan.deployment) if plan.deployment else "")


@html_of.register
def _(found: Plan) -> str:
    told = _extras_of(found)
    parts = screen(found, told) + ([] if found.best is None else [changes(found, told)])
    return "".join(map(_part, parts))


@lru_cache(maxsize=2)
def _extras_of(plan: Plan) -> PlanExtras:
    """How sure a plan is and what would change it; kept for the plan that is shown again."""
    return PlanExtras() if plan.best is None else PlanExtras(sure=assurance(plan), changes=changes_of(plan))


def _part(part: ScreenPart) -> str:
    if len(part.rows[0]) == 1:
        return "".join(f"<p>{escape(line)}</p>" for (line,) in part.rows)
    return _table("", part.rows, part.header)


@html_of.register
def _(deployment: ServedDeployment) -> str:
    head = ("part", "instances", "mapping", "GPUs each")
    return _table(f"{deployment.name}: {_counted(deployment.all_gpus, 'GPU')}", deployment_rows(deployment), head)


@html_of.register
def _(row: Summary) -> str:
    return _table(f"{row.policy} on {row.deployment} under {row.trace} x {row.rate_scale:g}", summary_lines(row))


@html_of.register
def _(result: RunResult) -> str:
    caption = f"{result.policy} on {result.deployment} under {result.trace}: {result.duration_s:,.4g} s"
    ended = result.frame()["status"].value_counts()
    return _table(caption, [(str(status), _counted(count, "request")) for status, count in ended.items()])


@html_of.register
def _(capacity: Capacity) -> str:
    lines = [
        (
            f"{row.rate_scale:.4g} times the rate of the trace",
            f"{row.slo_attainment:.1%} inside the SLO, goodput {row.goodput_requests_per_s:.4g} requests/s",
        )
        for row in capacity.runs
    ]
    return _table(f"Capacity: {capacity.message}", lines)


@html_of.register
def _(grid: PhaseGrid) -> str:
    at, ok, name = grid.setup, grid.feasible, LATENCY[grid.phase]
    fits = np.count_nonzero(ok)
    lines = [
        ("lengths", f"{grid.lengths.mean_isl:,.0f} tokens in, {grid.lengths.mean_osl:,.0f} out"),
        ("mappings and chunk sizes", f"{len(grid.mappings):,}"),
        ("batches", f"{grid.batch.size:,}, up to {grid.batch[-1]:,}"),
        ("design points", f"{ok.size:,}, of which {fits:,} ({fits / max(ok.size, 1):.0%}) fit in memory"),
        ("a GPU may hold", f"{grid.memory_limit / GB:.1f} GB"),
        ("cache of a prompt", f"{grid.kv_bytes_per_request / GB:.3g} GB in {at.precision.cache.name}"),
    ]
    if fits:
        per_gpu = grid.request_rate / grid.gpus[:, None]
        fastest = _place(np.where(ok, grid.latency, np.inf).argmin(), grid)
        busiest = _place(np.where(ok, per_gpu, -np.inf).argmax(), grid)
        lines += [
            (f"lowest {name}", f"{_time_text(grid.latency[fastest])}: {_point_text(grid, fastest)}"),
            ("highest rate", f"{per_gpu[busiest]:.4g} requests/s/GPU: {_point_text(grid, busiest)}"),
        ]
    elif ok.size:
        lines.append(("closest", f"lacks {(grid.memory_bytes.min() - grid.memory_limit) / GB:.3g} GB on a GPU"))
    if at.rates.inherited:
        lines.append(("fits", "some are inherited from another system's measurements"))
    where = f"{at.model.title} on {at.system.title}, {at.precision.name} ({at.profile.name})"
    return _table(f"{grid.phase.capitalize()} grid: {where}", lines)


@html_of.register
def _(found: Breakdown) -> str:
    shown = []
    for row in found.points.index[:MOST_DESIGNS]:
        shown.append(f"<p>{escape(heading(point_of(found, row)))}</p>")
        for latency in LATENCIES:
            head = ("part", "time", "share", "speed of light", "spent on", "label", "rests on")
            if parts := [_breakdown_row(line) for line in lines_of(found, row, latency)]:
                shown.append(_table(latency_title(found, row, latency), parts, head))
    left = len(found.points) - MOST_DESIGNS
    return "".join(shown) + (f"<p>and {_counted(left, 'design')} more</p>" if left > 0 else "")


def _breakdown_row(line: breakdown.Line) -> Line:
    spent = sorted(((part / line.seconds, name) for name, part in line.by.items()), reverse=True)
    words = ", ".join(f"{breakdown.RESOURCE_TEXT[name]} {share:.0%}" for share, name in spent if share >= 0.005)
    name = f"{line.operator} ({line.step})" if line.step else line.operator
    rests = line.source + (f"; outside its range: {line.outside}" if line.outside else "")
    return name, time_text(line.seconds), f"{line.share:.1%}", f"{line.light:.0%}", words, line.trust, rests


def _place(flat: np.intp, grid: PhaseGrid) -> tuple[int, int]:
    row, column = np.unravel_index(flat, grid.latency.shape)
    return int(row), int(column)


def _point_text(grid: PhaseGrid, place: tuple[int, int]) -> str:
    mapping = _mapping_text(grid.mappings[place[0]])
    return f"{mapping}, batch {grid.batch[place[1]]:,}, limited by {BOUNDS[grid.bound[place]]}"


def _mapping_text(mapping: Sharding) -> str:
    text = text_of(mapping)
    return f"{text}, chunk {mapping.chunk_tokens:,}" if mapping.chunk_tokens else text


def _pool_text(pool: Pool) -> str:
    phases = dict.fromkeys(instance.phase for instance, _ in pool.members)
    return f"{' and '.join(phases)}: {_counted(pool.gpus, 'GPU')}, {pool.request_rate_per_s:.4g} requests/s"


def _pool_rows(pool: Pool) -> list[Line]:
    return [
        (
            each.phase,
            f"{count:,}",
            _mapping_text(each.mapping),
            f"{each.mapping.gpus:,}",
            f"{each.batch:,}",
            f"{LATENCY[each.phase]} {_time_text(each.latency_s)}",
            f"{each.request_rate_per_s:.4g}",
            f"{each.memory_bytes / GB:.1f} GB/GPU",
            each.system,
        )
        for each, count in pool.members
    ]


def _time_text(seconds: float) -> str:
    return f"{seconds:,.3g} s" if seconds >= 1 else f"{seconds / MS:.4g} ms"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _table(caption: str, rows: Iterable[Line], head: Sequence[str] = ()) -> str:
    body = "".join(f"<tr>{''.join(f'<td{LEFT}>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    top = "".join(f"<th{LEFT}>{escape(cell)}</th>" for cell in head)
    top = f"<thead><tr>{top}</tr></thead>" if head else ""
    title = f"<caption{LEFT}>{escape(caption)}</caption>" if caption else ""
    return f"<table>{title}{top}<tbody>{body}</tbody></table>"
