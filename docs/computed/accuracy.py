"""The first screen of the accuracy page and the errors that README states, taken from the tables of that page."""

from __future__ import annotations

import csv
import re
from typing import NamedTuple

import pandas as pd

from docs.computed import on_site, quick, table
from docs.computed.served import PAGE, written
from lab.calibration.served.boards import met
from lab.calibration.served.simulated import COLD


def rows(name: str) -> list[list[str]]:
    """The lines of a table of the page below its header, as cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in written(name).strip().splitlines()[2:]]


#: Columns of the parts of the data in the table of limits.
HELD_OUT, NEW = 3, 4


class Reached(NamedTuple):
    """What a part of the data reaches of a limit."""

    error: str  # median
    p90: str
    points: str


def reached(bar: str, part: int = HELD_OUT) -> Reached:
    """Error, its 90 % quantile and number of operating points of a limit."""
    (cell,) = [cells[part] for cells in rows("served-bars") if cells[0] == bar]
    return Reached(*re.search(r"([\d.]+ %)\**, p90 (\d+ %) \((\d+),", cell).groups())


def line_of_page(start: str) -> list[str]:
    """The cells of the line of the page that begins so."""
    (line,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


def power(cells: list[str]) -> str:
    """The median error of a line of the power of serving GPUs."""
    return cells[2].split(", ")[0].strip("*")


def single_boards() -> str:
    """Boards of one result that are not set aside: how many are met; of all boards, how many plans exceed the run."""
    boards = [(cells[3], cells[9]) for cells in rows("optimum-boards")]
    alone = pd.Series([float(ratio) for results, ratio in boards if results == "1" and "†" not in ratio])
    known = [float(ratio.strip(" †")) for _, ratio in boards if ratio.strip(" †–")]
    return (
        f"{met(pd.DataFrame({'plan_over_run': alone}))}; "
        f"{sum(ratio > 1.0 for ratio in known)} of {len(known)} plans exceed the best run (too few GPUs)"
    )


@quick
def accuracy_decisions() -> str:
    """One number for each decision that a user takes."""
    families = [reached(f"TPOT, {family}") for family in ("dense", "DeepSeek-R1", "other MoE")]
    dense, r1, moe = (each.error for each in families)
    bars = ("TPOT, other MoE", "TPOT, DeepSeek-R1", "TTFT, all", "throughput")
    tpot_new, tpot_amd, ttft_new, rate_amd = (reached(bar, NEW) for bar in bars)
    ttft, rate, split = (reached(bar) for bar in ("TTFT, all", "throughput", "throughput, R1 disaggregated"))
    tails = {
        cells[1]: abs(int(re.search(r"(-\d+) %", cells[2])[1]))
        for cells in rows("served-simulated-statistics")
        if cells[0] == "TTFT, p99"
    }
    low, high = sorted(tails[mode] for mode in ("aggregated", "disaggregated"))
    every, unseen, *_, fewest, chance = rows("ranking-picks")
    heights = rows("optimum-heights")[-1]
    plans, tokens = (
        line_of_page("| the best of each question |"),
        line_of_page("| tokens of the KV cache (12 servers) |"),
    )
    amd, a100 = (
        line_of_page("| InferenceX, DeepSeek-R1 in fp8 and fp4 on MI355X"),
        line_of_page("| Splitwise, Llama-2-70B"),
    )
    served = "#served-runs-errors-on-configurations-that-no-fit-saw"
    return table(
        ["your decision", "the number", "error"],
        [
            [
                "Which TPOT will users see?",
                f"[TPOT]({served})",
                f"{dense} dense, {r1} DeepSeek-R1, {moe} other MoE (p90 {', '.join(each.p90 for each in families)}); "
                f"files no fit saw: MoE of 2026 {tpot_new.error} (p90 {tpot_new.p90}), R1 on AMD {tpot_amd.error} "
                f"(p90 {tpot_amd.p90})",
            ],
            [
                "Which TTFT?",
                f"[TTFT]({served})",
                f"{ttft.error} (p90 {ttft.p90}); files no fit saw {ttft_new.error} (p90 {ttft_new.p90}); "
                f"[p99](#ttft-played-request-by-request) {low} to {high} % too short, "
                f"{tails[COLD]} % without a warm-up",
            ],
            [
                "How much does a layout that I know serve?",
                f"[throughput]({served})",
                f"{rate.error} (p90 {rate.p90}); R1 disaggregated {split.error} (p90 {split.p90}); "
                f"on AMD {rate_amd.error}",
            ],
            [
                "Which layout is best?",
                "[best published configuration picked](#does-it-rank)",
                f"{unseen[3]} of {unseen[2]} picks that no fit saw, throughput {unseen[4]} of the best; all "
                f"{every[3]} of {every[2]}, {every[4]} (fewest GPUs {fewest[3]}, {fewest[4]}; at random {chance[3]})",
            ],
            ["Co-located or disaggregated?", "[same winner as measured](#does-it-rank), R1", written("ranking-modes")],
            [
                "How many GPUs do I buy?",
                "[plan within 15 % of the best MLPerf result](#is-the-optimum-right)",
                f"{written('optimum-boards-met')}; with one, not set aside, {single_boards()}",
            ],
            [
                "May I trust a layout that nobody has run?",
                "[best free layout over the published frontier](#is-the-optimum-right), R1 disaggregated",
                f"{heights[-1]} times it; {heights[4]} times for the layouts as run",
            ],
            [
                "Will the plan meet its limits?",
                "[best designs that do when simulated](#plans-simulated)",
                f"{plans[2]} at the planned rate, {plans[3]} at 0.8 of it, {plans[4]} at 1.2",
            ],
            [
                "Does it fit?",
                "[tokens of the KV cache](#memory-of-servers), vLLM 0.19",
                f"{tokens[2]}, worst {tokens[3]}",
            ],
            [
                "What does it draw?",
                "[power of a serving GPU](#energy-of-served-runs)",
                f"{power(amd)} MI355X ({amd[2].split(', ')[-1]} the measurement), {power(a100)} A100",
            ],
        ],
    )


@quick
def accuracy_served() -> str:
    """What README states of served runs."""
    families = [reached(f"TPOT, {family}") for family in ("dense", "DeepSeek-R1", "other MoE")]
    few, every = reached("TTFT at 4 and fewer an instance"), reached("TTFT, all")
    lines = [
        ("TPOT of dense models / DeepSeek-R1 / other MoE", families),
        ("throughput", [reached("throughput")]),
        ("TTFT at up to 4 requests per instance / in all", [few, every]),
        ("throughput of disaggregated DeepSeek-R1", [reached("throughput, R1 disaggregated")]),
        (
            "files no fit saw: TPOT of MoE of 2026 / TTFT in all",
            [reached("TPOT, other MoE", NEW), reached("TTFT, all", NEW)],
        ),
    ]
    return table(
        ["served closed loops", "median error", "operating points"],
        [
            [what, " / ".join(each.error for each in told), " / ".join(each.points for each in told)]
            for what, told in lines
        ],
    )


@on_site
def set_by_data() -> str:
    """Constants that were set with data in view."""
    with (PAGE.parent / "set_by_data.csv").open(encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    return table(header, lines)
