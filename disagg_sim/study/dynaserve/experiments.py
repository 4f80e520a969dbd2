"""DynaServe (arXiv 2504.09285) reproduced: capacities on five workloads, the best split, its claims."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from disagg_sim.atomic import write_text
from disagg_sim.report.panels import Axes, Cells, Picture, draw_cells
from disagg_sim.study.dynaserve.claims import CLAIMS
from disagg_sim.study.dynaserve.claims_equal import EQUAL, scan, shape_name
from disagg_sim.study.dynaserve.setup import CASES, COLOCATED, LARGE, MIDDLE, MIX, PROFILE, WORKLOADS, Bench, workloads
from disagg_sim.study.papers import PaperResults, as_csv, evaluate, prepare, write_claims, write_picture
from disagg_sim.sweep.run import Listener

if TYPE_CHECKING:
    import pandas as pd

ALL = (*WORKLOADS, MIX)
#: Systems whose capacity is searched on every workload; the first is compared with the others.
EVERYWHERE = ("dynaserve", "disaggregated", *COLOCATED, "printed", "least_loaded")
#: Models beside the first whose capacity is searched on the mix.
OTHERS = (MIDDLE, LARGE)


def reproduce(out: Path, *, traces: Path | None, listener: Listener, quick: bool) -> PaperResults:
    """All experiments of the paper; see ``papers.Reproduction``."""
    prepare(out)
    bench = Bench(workloads=workloads(traces, quick=quick), quick=quick)
    searches = [(name, case) for name in ALL for case in EVERYWHERE]
    searches += [(MIX, f"{case}_{model}") for model in OTHERS for case in ("dynaserve", "disaggregated", *COLOCATED)]
    listener.start(len(searches) + len(CLAIMS))
    for search in searches:
        bench.rate(*search)
        listener.advance(1)
    claims = evaluate(CLAIMS, bench, PROFILE, listener)
    listener.finish()
    write_claims(out, claims)
    write_text(out / "runs.csv", as_csv(_runs(bench)))
    table = capacities(bench, searches)
    write_text(out / "capacities.csv", as_csv(table))
    pictures = (
        write_picture(out, "splits", splits(bench)),
        write_picture(out, "gaps", gaps(bench)),
        _draw_ratios(table, out / "ratios.png"),
    )
    return PaperResults(claims=claims, pictures=pictures, simulations=bench.runs)


def capacities(bench: Bench, searches: list[tuple[str, str]]) -> pd.DataFrame:
    """Serving capacity of each search and what the run there showed."""
    import pandas as pd

    rows = []
    for name, case in searches:
        rate = bench.rate(name, case)
        row = {
            "workload": name,
            "case": case,
            "system": CASES[case].label,
            "model": CASES[case].model,
            "tp": CASES[case].tp,
            "stand_in": bench.workloads[name][1],
            "requests_per_s": rate,
        }
        if rate:
            seen = bench.at_capacity(name, case)
            row |= {
                "goodput_tokens_per_s": seen.goodput,
                "inside": seen.inside,
                "itl_p99_s": seen.summary.itl_p99_s,
                "ttft_p90_s": seen.summary.ttft_p90_s,
                "exposed_transfer": seen.exposed,
            }
        rows.append(row)
    return pd.DataFrame(rows)


def _runs(bench: Bench) -> pd.DataFrame:
    """Every run at a request rate, in the columns of a simulation's summary."""
    import pandas as pd

    return pd.DataFrame(
        [
            {"workload": name, "case": case, "kept_up": seen.kept_up, "inside": seen.inside} | asdict(seen.summary)
            for name, case, seen in bench.runs_seen()
        ]
    )


def splits(bench: Bench) -> Picture:
    """Throughput and busy time of both instances over the token at which every request is cut."""
    import pandas as pd

    rows = []
    for split, seen in scan(bench).items():
        rows.append(("throughput", "both", split, seen.steady, "requests/s"))
        for which, busy in zip(("first instance", "second instance"), seen.busy, strict=True):
            rows.append(("time at work", which, split, busy, "share of the time"))
    table = pd.DataFrame(rows, columns=["panel", "curve", "x", "y", "y_label"]).assign(x_unit=1.0)
    table["panel"] = pd.Categorical(table["panel"], ["throughput", "time at work"], ordered=True)
    return Picture(
        title=f"Every request cut at the same token, {shape_name(EQUAL)}, Qwen2.5-32B on two A100",
        axes=Axes(x_label="tokens on the first instance", y_label=""),
        table=table,
    )


def gaps(bench: Bench) -> Picture:
    """Share of tokens within the limit over the request rate, a panel for each workload."""
    import pandas as pd

    shown = ("dynaserve", "disaggregated", "chunk_2048", "chunk_512")
    rows = [
        {"panel": name, "curve": CASES[case].label, "x": seen.rate, "y": 1e3 * seen.summary.itl_p99_s, "x_unit": 1.0}
        for name in ALL
        for case in shown
        for seen in sorted(
            (each for where, what, each in bench.runs_seen() if (where, what) == (name, case)),
            key=lambda each: each.rate,
        )
        if seen.rate <= 2 * max(bench.rate(name, other) for other in shown)
    ]
    return Picture(
        title="P99 of the gaps between tokens, Qwen2.5-14B on two A100",
        axes=Axes(x_label="request rate [requests/s]", y_label="P99 gap [ms]", x_scale="log"),
        table=pd.DataFrame(rows),
    )


def _draw_ratios(table: pd.DataFrame, path: Path) -> Path:
    """Capacity of DynaServe over that of the other systems, beside its data."""
    import pandas as pd

    others = EVERYWHERE[1:]
    rate = table.set_index(["case", "workload"])["requests_per_s"]
    values = [[rate["dynaserve", name] / rate[other, name] for name in ALL] for other in others]
    labels = tuple(CASES[other].label for other in others)
    write_text(
        path.with_suffix(".csv"),
        as_csv(pd.DataFrame(values, columns=list(ALL), index=labels).reset_index(names="system")),
    )
    cells = Cells(
        title="Serving capacity of DynaServe over that of",
        rows=labels,
        columns=ALL,
        values=tuple(map(tuple, values)),
        legend="capacity of DynaServe over it",
        limit=8.0,
        texts=tuple(tuple(f"{value:.2f}" for value in row) for row in values),
    )
    draw_cells(cells, path)
    return path
