"""Write ``summary.md``, the first file to read of a sweep: which mode is better where, by how much, and how sure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from disagg_sim.certainty.trust import COLUMN as TRUST_COLUMN
from disagg_sim.domain import ServingMode
from disagg_sim.report.verdicts import EITHER, LEAST_GAIN, LEAST_PROBABILITY, SHARED, SPLIT, ModeVerdict, verdict_of
from disagg_sim.report.words import (
    MODE_TEXT,
    drafts_text,
    mapping_text,
    markdown_table,
    pools_text,
    prefill_text,
    throughput_text,
)
from disagg_sim.serving.evidence import COLUMN as EVIDENCE_COLUMN
from disagg_sim.serving.evidence import level
from disagg_sim.sweep.fidelity import SPEEDS, CaseFidelity
from disagg_sim.sweep.results import SweepResult
from disagg_sim.sweep.spec import ENGINES_MODE, SweepSpec
from disagg_sim.units import GB, MS

#: What a table of throughput counts in.
UNITS = {"gpu": "tokens/s/GPU", "usd": "tokens/USD", "watt": "tokens/J", "joule": "tokens/J drawn"}
#: Columns of a table that name a case.
_CASE = ("model", "system, precision", "tokens in/out", "case")
_DEPLOYMENT = ("GPUs", "prefill", "decode", "TTFT [s]", "TPOT [ms]", "KV out/in [GB/s/GPU]", "layout", "evidence")


def summary(result: SweepResult, fidelity: Sequence[CaseFidelity] = ()) -> str:
    """The text of ``summary.md``: the better mode at three speeds, throughput, what to deploy."""
    known = {each.case: each for each in fidelity}
    verdicts = {
        item.plan.case.name: [verdict_of(item, known.get(item.plan.case.name), speed) for speed in SPEEDS]
        for item in result.cases
    }
    parts = [f"# Sweep `{result.plan.spec.name}`"]
    parts += [*_better(result, verdicts)] if _compared(result) else []
    parts += _stopped(result)
    parts += [_throughput(result), *_deployments(result, verdicts), _made(result)]
    return "\n\n".join(parts) + "\n"


def _compared(result: SweepResult) -> bool:
    """Whether some case has disaggregated and co-located designs."""
    return any(len({mode.mode == ServingMode.DISAGGREGATED for mode in item.found}) > 1 for item in result.cases)


def _better(result: SweepResult, verdicts: Mapping[str, Sequence[ModeVerdict]]) -> Iterable[str]:
    """The table that a reader decides by, and how it is read."""
    told = [each for item in result.cases for each in verdicts[item.plan.case.name] if each.leads]
    counts = Counter(each.better for each in told)
    yield (
        f"**Disaggregated or co-located?** Of {len(told)} comparisons disaggregated is better in {counts[SPLIT]}, "
        f"co-located in {counts[SHARED]}; in the other {counts[EITHER]} they are close, or the better one is not known."
    )
    sure = not all(math.isnan(each.probability) for each in told)
    unit, more = UNITS[result.plan.spec.per], "How sure this is was not computed: `--uncertainty` adds it."
    if sure:
        more = "in brackets its 80 % range; last the probability that this mode is better by any margin."
    yield (
        f"Computed, not measured. A cell: the better mode at so many tokens/s/user or more; its {unit} over the other's"
        f"{'; ' if sure else '. '}{more}"
    )
    rows = [[each.text for each in verdicts[item.plan.case.name]] for item in result.cases]
    yield _by_case(result, [f"{speed:g} tokens/s/user" for speed in SPEEDS], rows, numbers=0)
    apart = f"{100 * (LEAST_GAIN - 1):.0f} %"
    least = f"{100 * LEAST_PROBABILITY:.0f} %"
    doubt = f" **not sure**: {apart} or more apart, but the leader is better with a probability below {least}." * sure
    inherited = " \\*: its kernels were measured on another system." * any(item.inherited_fits for item in result.cases)
    yield (
        f"**either will do**: less than {apart} apart.{doubt} After the colon: the mode that leads. In both take "
        f"co-located, the simpler one, unless you measure otherwise. –: no mode reaches this speed.{inherited}"
    )


def _by_case(result: SweepResult, columns: Sequence[str], cells: Sequence[Sequence[str]], *, numbers: int) -> str:
    """A table with a row a case; cases that differ in an axis that changes no cell share a row."""
    tags = [item.plan.case.tags for item in result.cases]
    common = set(tags[0]).intersection(*tags[1:]) if tags else set()
    rows: dict[tuple[str, ...], list[str]] = {}
    for item, own in zip(result.cases, cells, strict=True):
        case = item.plan.case
        systems = pools_text(case.pools) + (" \\*" if item.inherited_fits else "")
        text = ", ".join(tag.replace("_", " ") for tag in case.tags if tag not in common)
        rows.setdefault((case.model, systems, str(case.traffic), *own), []).append(text)
    tagged = any(any(texts) for texts in rows.values())
    head = [*_CASE[:3], *_CASE[3:] * tagged, *columns]
    table = [[*key[:3], *[" or ".join(texts)] * tagged, *key[3:]] for key, texts in rows.items()]
    return markdown_table(head, table, numbers=numbers)


def _stopped(result: SweepResult) -> list[str]:
    """Cases and modes without a result, and why."""
    told = [
        f"* {item.plan.case.name}{f', {MODE_TEXT[mode]}' if mode else ''}: {verdict}."
        for item in result.cases
        for mode, verdict in item.verdicts
    ]
    return ["No result:\n\n" + "\n".join(told)] if told else []


def _throughput(result: SweepResult) -> str:
    """The best of the disaggregated and of the co-located modes, at any speed and at three."""
    both, cells = _compared(result), []
    for item in result.cases:
        found = [verdict_of(item, None, speed) for speed in (0.0, *SPEEDS)]
        column = item.plan.case.throughput
        kinds = (
            (SPLIT, SHARED)
            if both
            else (SPLIT,)
            if result.plan.spec.modes[0] == ServingMode.DISAGGREGATED
            else (SHARED,)
        )
        cells.append([" / ".join(throughput_text(each.points[kind], column) for kind in kinds) for each in found])
    spares = ", spares among the GPUs" * any(each.columns_of_spares for each in result.plan.spec.served)
    title = f"Throughput [{UNITS[result.plan.spec.per]}{spares}]"
    title += ", disaggregated / best co-located" * both + ", at the best and at a speed per user:"
    table = _by_case(result, ["best", *(f"at {speed:g}" for speed in SPEEDS)], cells, numbers=1 + len(SPEEDS))
    marked = any(item.inherited_fits for item in result.cases)
    note = "\n\n\\* some fits are inherited from another system; `frontier.csv` names them." if marked else ""
    return f"## Throughput\n\n{title}\n\n{table}{note}"


def _deployments(result: SweepResult, verdicts: Mapping[str, Sequence[ModeVerdict]]) -> Iterable[str]:
    """What to deploy for each case and speed: the design of the better mode."""
    rows: dict[tuple[str, ...], None] = {}
    for item in result.cases:
        case = item.plan.case
        for speed, verdict in zip(SPEEDS, verdicts[case.name], strict=True):
            point = verdict.take
            if point is not None:
                first = case.model, pools_text(case.pools), str(case.traffic), f"{speed:g}"
                rows[(*first, throughput_text(point, case.throughput), *_cells(point))] = None
    if rows:
        head = [*_CASE[:3], "at [tokens/s/user]", UNITS[result.plan.spec.per], *_DEPLOYMENT]
        yield "## What to deploy"
        yield (
            "The design of the better mode, where either will do the co-located one, with the fewest GPUs that balance "
            "its pools; N × is the number of instances. `frontier.csv` has every mode, with its bounds and ratios."
        )
        yield markdown_table(head, list(rows))


def _cells(point: Mapping[str, Any]) -> list[str]:
    """The deployment of a point."""
    decode = f"{int(point['decode_instances'])} × {mapping_text(point, 'decode')}{drafts_text(point)}"
    decode += f", batch {int(point['decode_batch'])}"
    prefill, wire = prefill_text(point), "–"
    if point["mode"] == ServingMode.DISAGGREGATED:
        chunk = f", chunk {int(point['prefill_chunk_tokens'])}" if point["prefill_chunk_tokens"] else ""
        prefill = f"{int(point['prefill_instances'])} × {mapping_text(point, 'prefill')}{chunk}"
        prefill += f", batch {int(point['prefill_batch'])}"
        wire = " / ".join(f"{point[f'kv_{side}_bytes_per_s_per_gpu'] / GB:.2g}" for side in ("egress", "ingress"))
    else:
        prefill = f"in the same instances: {prefill}"
    return [
        f"{int(point['total_gpus'])}",
        prefill,
        decode,
        f"{point['ftl_s']:.2f}",
        f"{point['ttl_s'] / MS:.1f}",
        wire,
        level(str(point[EVIDENCE_COLUMN])),
        str(point[TRUST_COLUMN]),
    ]


def _made(result: SweepResult) -> str:
    """What was computed, under which limits, and where the rest stands."""
    spec, total = result.plan.spec, result.total
    kind, word = ("as its engine serves", "or") if ENGINES_MODE in spec.modes else ("the better of two modes", "and")
    return (
        f"## What stands behind it\n\n{len(result.cases)} cases, {total.computed:,} design points, "
        f"{total.feasible:,} of them fit in memory; profile `{spec.profile}`, matching `{spec.matching}`; "
        f"{_limits(spec)}. Throughput is output tokens per second over all GPUs, without queues: of the designs that "
        "give every user at least so many tokens per second the one of highest throughput. Co-located is "
        f"{kind}: prompts between decode steps, {word} prompts in chunks inside them (piggybacked).\n\n"
        "* `frontier.csv`: every point of every frontier, with bounds, KV bandwidth, layouts, inherited fits\n"
        "* `points/`: all points; `infeasible.csv`: what was rejected\n"
        "* `disagg-sim report DIR`: one page to look around in; `disagg-sim explain DIR --best`: a design taken apart"
    )


def _limits(spec: SweepSpec) -> str:
    if len(spec.limits) > 1:
        return "limits as in the names of the cases"
    (limits,) = spec.limits
    ftl = " or ".join(f"{each:g}" for each in dict.fromkeys(limits.of(traffic).ftl_s for traffic in spec.traffic))
    ttl = "" if math.isinf(limits.ttl_s) else f"TTL at most {limits.ttl_s / MS:g} ms, "
    rules = {"all": ", all layouts", "served": ", layouts that were served alone"}.get(limits.layouts, "")
    rules += ", TP over NICs, too" if limits.tp_over_nics else ""
    rules += "" if limits.one_gpu_stages else ", no pipelines of one-GPU stages"
    nic = "" if math.isinf(limits.nic_limit) else f"KV transfer at most {limits.nic_limit / GB:g} GB/s per GPU, "
    return f"FTL at most {ftl} s, {ttl}{nic}at most {limits.gpu_cap} GPUs a deployment{rules}"
