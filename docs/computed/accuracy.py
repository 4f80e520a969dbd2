"""The first screen of the accuracy page and the errors that README states, taken from the tables of that page."""

from __future__ import annotations

import csv
import re

from docs.computed import on_site, quick, table
from docs.computed.served import PAGE, written


def rows(name: str) -> list[list[str]]:
    """The lines of a table of the page below its header, as cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in written(name).strip().splitlines()[2:]]


def held_out(bar: str) -> tuple[str, str]:
    """Error and number of operating points of a limit on the held-out part."""
    (cell,) = [cells[3] for cells in rows("served-bars") if cells[0] == bar]
    error, points = re.search(r"([\d.]+ %)\** \((\d+),", cell).groups()
    return error, points


def line_of_page(start: str) -> list[str]:
    """The cells of the line of the page that begins so."""
    (line,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(start)]
    return [cell.strip() for cell in line.strip("|").split("|")]


@quick
def accuracy_decisions() -> str:
    """One number for each decision that a user takes."""
    dense, r1, moe = (held_out(f"TPOT, {family}")[0] for family in ("dense", "DeepSeek-R1", "other MoE"))
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
            ["Which TPOT will users see?", f"[TPOT]({served})", f"{dense} dense, {r1} DeepSeek-R1, {moe} other MoE"],
            [
                "Which TTFT?",
                f"[TTFT]({served})",
                f"{held_out('TTFT, all')[0]}; "
                f"[p99](#ttft-played-request-by-request) {tails[0]} to {tails[-1]} % too short",
            ],
            [
                "How much does a layout that I know serve?",
                f"[throughput]({served})",
                f"{held_out('throughput')[0]}; {held_out('throughput, R1 disaggregated')[0]} for R1 disaggregated",
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
    families = [held_out(f"TPOT, {family}") for family in ("dense", "DeepSeek-R1", "other MoE")]
    few, every = held_out("TTFT at 4 and fewer an instance"), held_out("TTFT, all")
    lines = [
        ("TPOT of dense models / DeepSeek-R1 / other MoE", families),
        ("throughput", [held_out("throughput")]),
        ("TTFT at up to 4 requests per instance / in all", [few, every]),
        ("throughput of disaggregated DeepSeek-R1", [held_out("throughput, R1 disaggregated")]),
    ]
    return table(
        ["served closed loops", "median error", "operating points"],
        [
            [what, " / ".join(error for error, _ in told), " / ".join(points for _, points in told)]
            for what, told in lines
        ],
    )


@on_site
def set_by_data() -> str:
    """Constants that were set with data in view."""
    with (PAGE.parent / "set_by_data.csv").open(encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    return table(header, lines)
