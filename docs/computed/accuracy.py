"""The first screen of the accuracy page and the errors that README states, taken from the tables of that page."""

from __future__ import annotations

import csv
import re
from typing import NamedTuple

from docs.computed import on_site, quick, table
from docs.computed.served import PAGE, written


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


@quick
def accuracy_decisions() -> str:
    """One number for each decision that a user takes."""
    families = [reached(f"TPOT, {family}") for family in ("dense", "DeepSeek-R1", "other MoE")]
    dense, r1, moe = (each.error for each in families)
    tpot_new, ttft_new = (reached(bar, NEW) for bar in ("TPOT, other MoE", "TTFT, all"))
    ttft, rate, split = (reached(bar) for bar in ("TTFT, all", "throughput", "throughput, R1 disaggregated"))
    tails = sorted(
        abs(int(re.search(r"(-\d+) %", cells[2])[1]))
        for cells in rows("served-simulated-statistics")
        if cells[0] == "TTFT, p99"
    )
    picks = rows("ranking-picks")[0]
    heights = rows("optimum-heights")[-1]
    plans, tokens = (
        line_of_page("| the best of each question |"),
        line_of_page("| tokens of the KV cache (12 servers) |"),
    )
    served = "#served-runs-errors-on-configurations-that-no-fit-saw"
    return table(
        ["your decision", "the number", "error"],
        [
            [
                "Which TPOT will users see?",
                f"[TPOT]({served})",
                f"{dense} dense, {r1} DeepSeek-R1, {moe} other MoE (p90 {', '.join(each.p90 for each in families)}); "
                f"files no fit saw: MoE of 2026 {tpot_new.error} (p90 {tpot_new.p90})",
            ],
            [
                "Which TTFT?",
                f"[TTFT]({served})",
                f"{ttft.error} (p90 {ttft.p90}); files no fit saw {ttft_new.error} (p90 {ttft_new.p90}); "
                f"[p99](#ttft-played-request-by-request) {tails[0]} to {tails[-1]} % too short",
            ],
            [
                "How much does a layout that I know serve?",
                f"[throughput]({served})",
                f"{rate.error} (p90 {rate.p90}); R1 disaggregated {split.error} (p90 {split.p90})",
            ],
            [
                "Which layout is best?",
                "[best published configuration picked](#does-it-rank)",
                f"{picks[3]} of {picks[2]} picks; throughput of the pick {picks[4]} of the best",
            ],
            ["Co-located or disaggregated?", "[same winner as measured](#does-it-rank), R1", written("ranking-modes")],
            [
                "How many GPUs do I buy?",
                "[plan within 15 % of the best MLPerf result](#is-the-optimum-right)",
                written("optimum-boards-met"),
            ],
            [
                "May I trust a layout that nobody has run?",
                "[best free layout over the published frontier](#is-the-optimum-right), R1 disaggregated",
                f"{heights[-1]}; {heights[4]} for the layouts as run",
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
                "13 % MI355X (always too high), 4 % A100",
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
