"""Tables of served runs on the page of fidelity, made from the measurements beside the checkout; without, they stay."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import date
from functools import cache, wraps
from pathlib import Path

import pandas as pd

from docs.computed import slow, table
from lab.calibration.served.bands import with_bands
from lab.calibration.served.drafts import drafts_summed, judged_drafts
from lab.calibration.served.evaluate import evaluate
from lab.calibration.served.groups import BARS, PARTS, coverage, groups, judged, points
from lab.calibration.served.ranking import GROUP, SLOW, heights, modes, ranked, served_points, summed
from lab.calibration.served.read import read_files

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "fidelity.md"
DATA = ROOT.parent / "shared" / "data"
#: Files of served runs, by folder.
FILES = {
    "measured": (
        "argonne_llm_inference_bench",
        "inferencex_dsr1_runs",
        "inferencex_llama70b_gptoss120b_runs",
        "mlperf_inference",
        "nvidia_gap_runs",
        "published_points",
        "splitwise_perf_model",
        "trtllm_docs_throughput",
    ),
    "measured_2026": ("inferencex_dsr1_amd_runs", "inferencex_newmodels_runs"),
    "measured_3/recipes": ("joined", "joined_flags.parquet"),  # launch flags of them
}
#: Cells that state drafts and the acceptance of each.
DRAFTED = DATA / "measured_3" / "served_cells" / "gptoss_h200_speculation.csv"
#: Form of a file -> its name on the page.
FORMS = {
    "inferencex_dense": "InferenceX, Llama 70B and gpt-oss, aggregated",
    "inferencex_dsr1": "InferenceX, DeepSeek-R1",
    "inferencex_amd": "InferenceX, DeepSeek-R1 on MI300X, MI325X and MI355X (no fit saw them)",
    "inferencex_models": "InferenceX, models of 2026 (no fit saw them)",
    "nvidia_gap": "NVIDIA's gap analysis",
    "splitwise": "Splitwise, Llama 2 70B and BLOOM, vLLM of 2023",
    "argonne": "Argonne, many models, static batches",
    "trtllm_docs": "TensorRT-LLM pages, v0.5 to v1",
    "mlperf": "MLPerf (no fit saw it)",
}
#: Its file whose systems no profile was fitted to.
AMD = "inferencex_dsr1_amd_runs.csv"
#: Forms whose modes have lines of their own.
BOTH_MODES = ("inferencex_dsr1", "inferencex_amd", "inferencex_models")
#: Dimensions of the table of layouts, and the fewest points of a line.
APART = ("family and layout", "mode", "engine", "system")
LEAST = 10


def paths() -> list[Path]:
    """The files of served runs."""
    whole = [(folder, name if "." in name else f"{name}.csv") for folder, names in FILES.items() for name in names]
    return [DATA / folder / name for folder, name in whole]


def from_files(needed: Callable[[], Sequence[Path]]) -> Callable[[Callable[[], str]], Callable[[], str]]:
    """Make a text from measurements; what the page says stays where their files are not beside the checkout."""

    def decorated(make: Callable[[], str]) -> Callable[[], str]:
        @wraps(make)
        def within() -> str:
            if all(path.is_file() for path in needed()):
                return make()
            return written(make.__name__.replace("_", "-"))

        return within

    return decorated


from_data = from_files(paths)


def written(name: str) -> str:
    """What the page says at a mark."""
    kinds = "number|table"
    found = re.search(rf"<!-- (?:{kinds}): {name} -->(.*?)<!-- /(?:{kinds}) -->", PAGE.read_text(), re.DOTALL)
    return found[1] if found else ""


@cache
def lines() -> pd.DataFrame:
    """Every line of the served runs with its forecast and its band."""
    rows, _ = read_files(paths())
    return with_bands(evaluate(rows), rows)


@cache
def cells() -> tuple[pd.DataFrame, pd.DataFrame]:
    """Operating points of closed loops, and what a forecast picks among them."""
    runs = served_points(lines())
    return runs, ranked(runs)


def cell(found: pd.DataFrame) -> str:
    """Points, median error and bias [%] of the one line of a table of groups, if there is one."""
    if not len(found):
        return ""
    line = found.iloc[0]
    return f"{line['points']}: {100 * line['median_error']:.1f}, {100 * line['bias']:+.0f}"


@slow
@from_data
def served_bars() -> str:
    """Limits, and what is reached on each part of the data."""
    found = judged(lines())
    rows = []
    for bar in BARS:
        number = "{:.3f}" if bar.what == "spearman" else "{:+.1f} %" if bar.what == "bias" else "{:.1f} %"
        scale = 1.0 if bar.what == "spearman" else 100.0
        told = [bar.name, number.replace("+", "").format(scale * bar.limit)]
        for part in PARTS:
            mine = found[(found["bar"] == bar.name) & (found["part"] == part)]
            if not len(mine):
                told.append("")
                continue
            line = mine.iloc[0]
            text = number.format(scale * line["reached"])
            text = text if line["met"] else f"**{text}**"
            tail = f", p90 {100 * line['p90_error']:.0f} %" if bar.what == "median_error" else ""
            inside = "" if bar.what == "spearman" else f", {100 * line['coverage']:.0f} %"
            told.append(f"{text}{tail} ({line['points']}{inside})")
        rows.append(told)
    return table(["closed loop, below saturation", "limit", "fitted part", "held out", "files no fit saw"], rows)


@slow
@from_data
def served_date() -> str:
    """Day on which the limits on the page were last found to be others than before."""
    today = date.today()
    return written("served-date") if written("served-bars") == served_bars() else f"{today.day} {today:%B %Y}"


@slow
@from_files(lambda: [*paths(), DRAFTED])
def served_drafts() -> str:
    """Runs with drafts: TPOT and its gain over equal runs without, by model and part."""
    rows, _ = read_files([DRAFTED, *(path for path in paths() if path.name != AMD)])
    found = drafts_summed(judged_drafts(rows)).fillna(0.0)
    lines = [
        [f"{each.model}, acceptance {each.acceptance}", each.part]
        + [f"{100 * error:.1f} % ({runs})" * bool(runs) for error, runs in each_of]
        for each in found.itertuples()
        for each_of in [((each.error_tpot, each.runs), (each.error_gain, each.pairs))]
    ]
    return table(["runs with drafts", "part", "TPOT", "its gain over equal runs without"], lines)


def _by(found: pd.DataFrame, dimension: str, value: str) -> list[str]:
    mine = found[(found["dimension"] == dimension) & (found["value"] == value)]
    return [cell(mine[mine["quantity"] == quantity]) for quantity in ("tpot", "ttft", "throughput")]


@slow
@from_data
def served_layouts() -> str:
    """Errors by layout, family, engine and system of closed loops, all parts."""
    table_ = lines()
    found = groups(table_[table_["load"] == "closed_loop"], APART)
    found = found[(found["part"] == "all") & (found["points"] >= LEAST)]
    rows = []
    for dimension in APART:
        values = sorted(set(found.loc[found["dimension"] == dimension, "value"]))
        rows += [["" if at else dimension, value, *_by(found, dimension, value)] for at, value in enumerate(values)]
    return table(["by", "", "TPOT", "TTFT", "throughput"], rows)


@slow
@from_data
def served_sources() -> str:
    """Errors by source on what no profile was fitted to: held-out configurations, and whole files."""
    done = lines()
    done = done[done["evaluated"] & ~done["saturated"] & (done["part"] != "fitted")]
    done = done.assign(form=done["form"].mask(done["file"] == AMD, "inferencex_amd"))
    rows = []
    for form, name in FORMS.items():
        for mode in ("aggregated", "disaggregated"):
            mine = done[(done["form"] == form) & (done["mode"] == mode)]
            if len(mine):
                shown = f"{name}, {mode}" if form in BOTH_MODES else name
                rows.append([shown, *(_errors(mine[mine["quantity"] == q]) for q in ("tpot", "ttft", "throughput"))])
    return table(["unseen, below saturation", "TPOT", "TTFT", "throughput"], rows)


def _errors(mine: pd.DataFrame) -> str:
    if not len(mine):
        return ""
    error = points(mine)["relative_error"].abs()
    return f"{100 * error.median():.1f}, {100 * error.quantile(0.9):.0f} % ({len(error)})"


@slow
@from_data
def served_answered() -> str:
    """Share of the rows of the models of 2026 that are judged, and why the others are not."""
    mine = lines()[lines()["form"] == "inferencex_models"]
    runs = mine.groupby("row").agg(judged=("evaluated", "any"), reason=("reason", "first"))
    refused = runs.loc[~runs["judged"], "reason"].value_counts(sort=False).sort_index()
    told = "; ".join(f"{count} not: {reason}" for reason, count in refused.items())
    return f"{100 * runs['judged'].mean():.1f} % of {len(runs)} are judged ({told})"


@slow
@from_data
def served_decode_ranks() -> str:
    """TPOT of decode with attention DP and EP on the held-out part: median, p90, points."""
    done = lines()
    done = done[done["evaluated"] & ~done["saturated"] & (done["part"] == "held-out") & (done["load"] == "closed_loop")]
    return _errors(done[(done["layout"] == "DP-EP") & (done["quantity"] == "tpot")])


@slow
@from_data
def served_coverage() -> str:
    """Groups whose bands are too narrow or too wide."""
    found = coverage(lines())
    missed = found[~found["met"]]
    missed = missed.assign(
        told=[f"{line.quantity} {100 * line.coverage:.0f} % ({line.points})" for line in missed.itertuples()]
    )
    grouped = missed.groupby(["dimension", "value"], sort=False)["told"].agg(", ".join).reset_index()
    again = grouped["dimension"].duplicated()
    rows = [
        ["" if repeats else line.dimension, line.value, line.told]
        for repeats, line in zip(again, grouped.itertuples(), strict=True)
    ]
    return table(["by", "group", "inside (points)"], rows)


@slow
@from_data
def served_coverage_count() -> str:
    """How many groups have a coverage of 70 to 90 %."""
    found = coverage(lines())
    return f"{int(found['met'].sum())} of {len(found)}"


@slow
@from_data
def ranking_picks() -> str:
    """What the forecast picks: in all, of what no fit saw, by family and engine; and what simple rules pick."""
    runs, told = cells()
    unseen = ranked(served_points(lines()[lines()["part"] != "fitted"]))
    fewest = ranked(
        runs.assign(throughput_forecast=1.0 / runs["gpus"], interactivity_forecast=runs["interactivity_measured"])
    )
    whole = {"all": told, "that no fit saw": unseen}
    parts = [summed(of).assign(group=name) for name, of in whole.items()]
    parts += [summed(told, by) for by in ("family", "engine")]
    rows = [
        [
            line.group,
            str(line.groups),
            str(line.cells),
            f"{100 * line.best_picked:.1f} %",
            f"{line.relative_throughput:.3f}",
            f"{100 * line.pairs_right:.1f} % of {line.pairs:,}",
            f"{line.height:.2f} ({line.height_p10:.2f}-{line.height_p90:.2f})",
        ]
        for line in pd.concat(parts).itertuples()
    ]
    (rule,) = summed(fewest).itertuples()
    rows += [
        [
            "all, by the fewest GPUs",
            "",
            "",
            f"{100 * rule.best_picked:.1f} %",
            f"{rule.relative_throughput:.3f}",
            "",
            "",
        ],
        ["all, at random", "", "", f"{100 * (1.0 / told['configurations']).mean():.1f} %", "", "", ""],
    ]
    head = ["", "groups", "picks", "best picked", "measured throughput over the best", "pairs in order", "height"]
    return table(head, rows)


@slow
@from_data
def ranking_modes() -> str:
    """Verdicts on disaggregation that agree with the measured ones, and those that one mode for all would get."""
    both = modes(cells()[0])
    alone, count = int((both["gain_measured"] <= 1.0).sum()), len(both.groupby(list(GROUP)))
    return f"{int(both['agree'].sum())} of {len(both)} ({count} groups; always co-located: {alone})"


def _heights(below: float) -> Sequence[float]:
    runs, _ = cells()
    high = heights(runs[(runs["mode"] == "disaggregated") & (runs["model"] == "deepseek_r1")])
    return list(high.loc[high["tokens_per_s_per_user"] < below, "height"])


@slow
@from_data
def ranking_height() -> str:
    """Height of the frontier of R1 disaggregated over the layouts that ran: median."""
    return f"{pd.Series(_heights(float('inf'))).median():.2f}"


@slow
@from_data
def ranking_height_slow() -> str:
    """The same at the slow end."""
    return f"{pd.Series(_heights(SLOW)).median():.2f}"
