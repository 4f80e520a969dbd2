"""Show a plan in a notebook: the answer, the deployment, latencies against their limits, bands, why, what changes it.

Bars and lines have the colour of the text, so that they follow the theme of the notebook, light or dark.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape

from disagg_sim.planning.answer import Plan
from disagg_sim.planning.assurance import Assurance, assurance
from disagg_sim.planning.flips import changes_of
from disagg_sim.report.plan import PlanExtras
from disagg_sim.report.plan_facts import checked_rows, drawn_rows, fact_rows, price_rows
from disagg_sim.report.plan_rows import (
    LATENCY_HEADER,
    POOL_HEADER,
    RUNNER_HEADER,
    change_lines,
    latency_rows,
    pool_rows,
    question_line,
    runner_rows,
    verdict,
    why_rows,
)

CELL = "text-align:left;padding:.15em 1em .15em 0"
SOFT = "opacity:.65"
#: Width and height of a bar, and the place of the limit on it. [px], [px], [1]
WIDTH, HEIGHT, AT_LIMIT = 150, 12, 0.75


@lru_cache(maxsize=2)
def extras_of(plan: Plan) -> PlanExtras:
    """How sure a plan is and what would change it; kept for the plan that is shown again."""
    return PlanExtras() if plan.best is None else PlanExtras(sure=assurance(plan), changes=changes_of(plan))


def plan_html(plan: Plan) -> str:
    """Write a plan as HTML: the screen of ``disagg-sim plan``, with bars.

    >>> import disagg_sim as ds
    >>> found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), tpot="1 ms", rate=40)
    >>> "INFEASIBLE: " in plan_html(found)
    True
    """
    told = extras_of(plan)
    head, *more = verdict(plan, told.sure)
    parts = [f'<p style="{SOFT};margin:.2em 0">{escape(question_line(plan))}</p>']
    parts.append(f'<p style="font-size:1.2em;font-weight:600;margin:.3em 0">{escape(head)}</p>')
    parts += [f'<p style="margin:.2em 0">{escape(line)}</p>' for line in more]
    best = plan.best
    if best is not None:
        parts.append(_table("Deployment", POOL_HEADER, pool_rows(best)))
        parts.append(_latencies(plan, told.sure))
        facts = (*fact_rows(plan, best, told.sure), *price_rows(told.prices), *drawn_rows(best, told.drawn))
        parts.append(_table("What it does", ("", "", "rests on"), facts))
        parts.append(_table("Why", (), why_rows(plan, best)))
        if told.sure is not None:
            parts.append(_table("How far it was checked", ("pool", "layout", "time rests on"), checked_rows(told.sure)))
        if told.changes is not None:
            lines = "".join(f"<li>{escape(line)}</li>" for line in change_lines(plan, told.changes))
            parts.append(f'{_title("What would change the answer")}<ul style="margin:.2em 0">{lines}</ul>')
        if plan.runners_up:
            table = _table("", ("", *RUNNER_HEADER[1:]), runner_rows(plan))
            parts.append(f"<details><summary>{len(plan.runners_up)} runners-up</summary>{table}</details>")
    parts += [f'<p style="{SOFT}">left out: {escape(line)}</p>' for line in plan.left_out]
    return f'<div style="line-height:1.4">{"".join(parts)}</div>'


def _latencies(plan: Plan, sure: Assurance | None) -> str:
    """Percentiles, limits and bands, with a bar of what the promised percentile takes of its limit."""
    assert plan.best is not None
    latencies = plan.best.ttft, plan.best.tpot
    limits = zip(latencies, (plan.work.ttft, plan.work.tpot), strict=True)
    bars = [_bar(values[limit.percentile] / limit.seconds) for values, limit in limits]
    told = latency_rows(plan.work, latencies, sure, simulated=plan.best.simulated is not None)
    rows = [f"{_row((*cells[:5],))}<td>{bar}</td>{_row(cells[5:])}" for cells, bar in zip(told, bars, strict=True)]
    header = (*LATENCY_HEADER[:5], "of the limit", *LATENCY_HEADER[5:])
    return _titled("What requests see", header, rows)


def _bar(share: float) -> str:
    """A bar as long as a share of its limit, where a line stands; what passes it is cut at the end. [1]"""
    limit, long = WIDTH * AT_LIMIT, min(max(share, 0.0) * AT_LIMIT, 1.0) * WIDTH
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{share:.0%} of the limit">'
        f'<rect width="{long:.1f}" y="2" height="{HEIGHT - 4}" fill="currentColor" opacity=".45"/>'
        f'<line x1="{limit:.1f}" x2="{limit:.1f}" y2="{HEIGHT}" stroke="currentColor" stroke-width="2"/></svg>'
    )


def _title(text: str) -> str:
    return f'<p style="font-weight:600;margin:.8em 0 .1em">{escape(text)}</p>' if text else ""


def _row(cells: Iterable[str], cell: str = "td") -> str:
    return "".join(f'<{cell} style="{CELL}">{escape(each)}</{cell}>' for each in cells)


def _titled(title: str, header: Sequence[str], rows: Iterable[str]) -> str:
    top = f"<thead><tr>{_row(header, 'th')}</tr></thead>" if any(header) else ""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'{_title(title)}<table style="margin:0;font-size:inherit">{top}<tbody>{body}</tbody></table>'


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return _titled(title, header, (_row(cells) for cells in rows))
