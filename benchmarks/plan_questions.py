"""Ask ``ds.plan`` twenty questions, simulate its answers, and search by simulation for something better.

    python benchmarks/plan_questions.py [--traces DIR] [--only 1,2] [--csv FILE]

Prints a row a question for docs/plan.md: seconds of the plan, its answer, whether the deployment as planned holds its
limits at the planned rate in simulation, and the GPUs (or, for a number of GPUs, the rate) over the best that a search
by simulation finds. The search adapts the counts of the cheapest designs of both modes until the limits hold with
as few instances as possible; for a number of GPUs it also moves GPUs between the pools. DIR has ``azure2023/`` with the
conversation trace of Azure (Patel et al., ISCA 2024, Azure/AzurePublicDataset).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

import disagg_sim as ds
from disagg_sim.domain import Mode
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.design import Design
from disagg_sim.planning.prove import Proof, prove, resized
from disagg_sim.planning.sizing import designs_at
from disagg_sim.report.plan_rows import mapping_words

#: GPUs [1] and rate [request/s] from which only the best design of each mode is searched: a simulation takes a minute.
LARGE, FAST = 500, 1000.0
#: Relative distance of GPUs, or of rates, that counts as equal.
NEAR = 0.05
#: Designs of a question that are searched.
SEARCHED = 6
TRACE = "azure2023/AzureLLMInferenceTrace_conv.csv"


class Question(NamedTuple):
    """One question; ``lengths`` are a pair, the name of a traffic, or a trace's file."""

    model: str
    system: str
    lengths: tuple[int, int] | str
    ttft: str
    tpot: str
    size: dict[str, Any]


QUESTIONS = (
    Question("llama_3_1_8b", "h100_sxm", (1024, 256), "500 ms", "20 ms", {"rate": 60}),
    Question("llama_3_1_8b", "h100_sxm", (8192, 512), "2 s", "50 ms", {"gpus": 8}),
    Question("llama_3_1_70b", "h200_sxm", (4096, 512), "2 s", "30 ms", {"rate": 20}),
    Question("llama_3_1_70b", "h200_sxm", (4096, 512), "5 s@p99", "100 ms@p99", {"rate": 20}),
    Question("llama_3_1_70b", "h100_sxm", (2048, 256), "1 s@p99", "25 ms@p99", {"gpus": 64}),
    Question("llama_3_1_70b", "b200_sxm", (16384, 1024), "5 s", "40 ms", {"gpus": 256}),
    Question("qwen3_32b", "h100_sxm", "azure_2023_conversation", "2 s", "40 ms", {"rate": 50}),
    Question("qwen3_32b", "a100_sxm_80gb", (1024, 512), "1 s", "50 ms", {"rate": 15}),
    Question("qwen2_5_72b", "h20_sxm", (3000, 300), "4 s", "60 ms", {"rate": 5}),
    Question("llama_3_1_405b", "h200_sxm", (4096, 512), "3 s", "50 ms", {"gpus": 128}),
    Question("qwen3_30b_a3b", "h100_sxm", (2048, 512), "1 s", "15 ms", {"rate": 100}),
    Question("qwen3_235b_a22b", "h200_sxm", (2000, 500), "1 s", "40 ms", {"rate": 30}),
    Question("gpt_oss_120b", "b200_sxm", (4096, 1024), "1 s", "10 ms", {"rate": 30}),
    Question("deepseek_r1", "gb200_nvl72", (8192, 1024), "2 s", "30 ms", {"rate": 40}),
    Question("deepseek_r1", "gb200_nvl72", (2048, 256), "1 s@p99", "50 ms@p99", {"gpus": 144}),
    Question("deepseek_r1", "h200_sxm", (4096, 512), "5 s", "50 ms", {"gpus": 64}),
    Question("kimi_k2", "gb200_nvl72", (16384, 512), "10 s", "40 ms", {"rate": 20}),
    Question("llama_3_1_405b", "h200_sxm", (4096, 256), "3 s", "40 ms", {"gpus": 5000}),
    Question("llama_3_1_8b", "h200_sxm", TRACE, "1 s", "30 ms", {"rate": 100}),
    Question("llama_3_3_70b", "h200_sxm", "log_normal_4096_512", "4 s", "40 ms", {"rate": 10}),
)


def lengths_of(question: Question, traces: Path) -> Any:
    """What ``ds.plan`` takes as lengths."""
    given = question.lengths
    if isinstance(given, tuple):
        return ds.lengths(*given)
    return ds.load_trace(traces / given) if "/" in given else ds.load_traffic(given).cases[0]


def others(plan: Plan) -> Iterator[Design]:
    """Designs that a search starts from, beside the best."""
    best, gpus = plan.best, plan.size.gpus
    assert best is not None
    if plan.other is not None:
        yield plan.other
    if best.gpus > LARGE or best.rate > FAST:
        return
    if gpus is None:
        found = [each for case in plan.cases for each in designs_at(case, best.rate)]
        yield from sorted((each for each in found if each != best), key=lambda each: each.cost)[:SEARCHED]
    elif best.mode == Mode.DISAGGREGATED:
        prefill, decode = best.pools
        for more in (-2, -1, 1, 2):
            count = prefill.instances + more
            left = (gpus - count * int(prefill.mapping.gpus)) // int(decode.mapping.gpus)
            if count > 0 and left > 0:
                yield resized(plan, best, (count, left), best.rate)


def asked(number: int, question: Question, traces: Path) -> dict[str, Any]:
    """A row of the table."""
    lengths = lengths_of(question, traces)
    begun = time.process_time()
    plan = ds.plan(question.model, question.system, lengths, ttft=question.ttft, tpot=question.tpot, **question.size)
    seconds = time.process_time() - begun
    best = plan.best
    assert best is not None, plan.infeasible
    first = prove(plan, best)
    proofs = [first, *(each for design in others(plan) if (each := prove(plan, design)).proven)]
    proven = [each for each in proofs if each.proven]
    of_rate = plan.size.gpus is None

    def over_least(design: Design) -> float:
        """GPUs over the fewest found; for a number of GPUs the rate over the highest."""
        if of_rate:
            return design.cost / min(each.design.cost for each in proven)
        return design.rate / max(each.design.rate for each in proven)

    size = question.size.get("rate")
    words = question.lengths if isinstance(question.lengths, str) else "{} + {}".format(*question.lengths)
    return {
        "": number,
        "question": f"{question.model}, {question.system}, {words.rpartition('/')[2]}, "
        f"{f'{size} requests/s' if size else '{} GPUs'.format(question.size['gpus'])}",
        "TTFT, TPOT": f"{question.ttft}, {question.tpot}",
        "CPU [s]": f"{seconds:.2f}",
        "answer": " + ".join(f"{pool.instances} x {mapping_words(pool)}" for pool in best.pools),
        "GPUs": best.gpus,
        "requests/s": f"{best.rate:.4g}",
        "simulated as planned": told(plan, first),
        "over the best found": f"{over_least(best):.3f}",
        "with --simulate": f"{over_least(first.design):.3f}",
        "proven": f"{first.design.gpus} GPUs, {first.design.rate:.4g}/s",
        "simulations": sum(each.runs for each in proofs),
    }


def told(plan: Plan, proof: Proof) -> str:
    """Whether the planned run holds, and by how much of the limit."""
    run, work = proof.planned, plan.work
    parts = [
        f"{name.upper()} {getattr(run, name)[limit.percentile] / limit.seconds:.0%}"
        for name, limit in (("ttft", work.ttft), ("tpot", work.tpot))
    ]
    return f"{'holds' if run.holds else 'misses'}: {', '.join(parts)} of the limits"


def main() -> None:
    """Ask, print, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"))
    parser.add_argument("--only", default="")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(1024, 256), rate=1)  # loads what every question needs
    which = [int(each) for each in given.only.split(",")] if given.only else range(1, len(QUESTIONS) + 1)
    rows = []
    for number in which:
        rows.append(asked(number, QUESTIONS[number - 1], given.traces))
        line = " | ".join(str(value) for value in rows[-1].values())
        print(f"| {line} |", flush=True)
        if given.csv:
            pd.DataFrame(rows).to_csv(given.csv, index=False)
    held = sum(row["simulated as planned"].startswith("holds") for row in rows)
    near = sum(abs(float(row["over the best found"]) - 1.0) <= NEAR for row in rows)
    worst = max(math.inf if not rows else float(row["CPU [s]"]) for row in rows)
    print(f"{held} of {len(rows)} hold as planned, {near} within 5 % of the best found, plans take up to {worst:.2f} s")


if __name__ == "__main__":
    sys.exit(main())
