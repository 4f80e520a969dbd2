"""Ask ``ds.plan`` 120 questions, and simulate every design that it prints: does it hold, and what would have sufficed?

    python benchmarks/plan_outcomes.py [--first N] [--csv FILE]
    python benchmarks/plan_outcomes.py --draw
    python benchmarks/plan_outcomes.py --ranks [--csv FILE]

The questions lie in ``plan_outcomes.csv`` beside this script, in random order, so that the first N are a sample of all.
``--draw`` draws them anew from a fixed seed: model, system, lengths, limits, cached prompts or drafts, and a rate at
which the plan of the day has 4 to 200 GPUs. A file of results has a row a design; questions that it holds already are
not asked again. For every design (the best, and the runners-up of both modes) a simulation under Poisson arrivals says

* whether its limits hold at the planned rate, and at 0.8 and 1.2 of it,
* of how many GPUs the smallest deployment of its layouts is that holds (``planning.prove``).

``--ranks`` asks the 40 questions of ``plan_outcomes_ranks.csv`` (other models, systems and shapes), and simulates the
first co-located design with attention DP of each, printed or not: as planned, and as checked (``planning.prove``).

Printed at the end: the share that holds by kind of design, GPUs over the fewest that any printed design of the question
needs, and how often the mode that was said to be better needs no more than 1.1 times the GPUs of the other.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import pandas as pd

import disagg_sim as ds
from disagg_sim.domain import ServingMode
from disagg_sim.errors import DisaggSimError, InfeasibleError
from disagg_sim.facts.load import load_model, load_traffic
from disagg_sim.facts.traffic import EmpiricalLength, LengthSpec, LogNormalLength, TrafficCase
from disagg_sim.planning.answer import Plan
from disagg_sim.planning.assurance import assurance
from disagg_sim.planning.design import Design
from disagg_sim.planning.prove import Proof, checked, prove, resized
from disagg_sim.planning.question import PlanOptions
from disagg_sim.planning.ranking import ranked
from disagg_sim.planning.replayed import requests_of
from disagg_sim.planning.sizing import designs_at
from disagg_sim.report.plan_rows import mapping_words
from disagg_sim.techniques.speculation.facts_asked import asked_speculation
from disagg_sim.workload.distributions import length_distribution

FILE = Path(__file__).with_suffix(".csv")
OF_RANKS = FILE.with_stem("plan_outcomes_ranks")
QUESTIONS, SEED = 120, 31
MODELS = (
    "llama_3_1_8b",
    "mistral_small_3_1_24b",
    "gemma_3_27b",
    "qwen3_32b",
    "llama_3_1_70b",
    "llama_3_1_405b",
    "mixtral_8x7b",
    "qwen3_30b_a3b",
    "gpt_oss_120b",
    "glm_4_5",
    "qwen3_235b_a22b",
    "llama_4_maverick",
    "deepseek_r1",
    "kimi_k2",
)
SYSTEMS = ("a100_sxm_80gb", "h100_sxm", "h200_sxm", "mi300x", "b200_sxm", "gb200_nvl72")
SHAPES = (
    "512 + 512",
    "1024 + 1024",
    "2048 + 256",
    "4096 + 512",
    "8192 + 256",
    "16384 + 512",
    "azure_2023_conversation",
    "log_normal_4096_512",
)
#: Limits of TTFT by shape, each over that of the next smaller column, and of TPOT.
TTFT, TPOT = ("500 ms", "1 s", "2 s", "4 s", "8 s"), ("15 ms", "25 ms", "35 ms", "50 ms", "100 ms")
#: Share of a prompt that is cached, and drafts of a step by the share that is accepted, of one question in six each.
CACHED, DRAFTS = 0.5, "mtp 0.8 0.6"
DRAFTED = ("deepseek_r1", "kimi_k2", "glm_4_5", "qwen3_235b_a22b", "llama_3_1_70b")
#: Shares at which lengths are tabulated: finer where they are long. [1]
QUANTILES = (*(step / 100 for step in range(100)), *(0.99 + step / 1000 for step in range(1, 10)), 0.9995, 1.0)
#: Share of the requests that none of a simulation is among. [1]
NONE_IN = 1e-6
#: GPUs of a plan [1], and requests that its simulation may have at most.
SMALLEST, LARGEST, MOST_REQUESTS = 4, 200, 15_000
#: Draw of arrivals and lengths that judges, one that plans do not see (``planning.prove.DRAWS``).
JUDGE = 7
#: Rates beside the planned one, over it. [1]
LESS, MORE = 0.8, 1.2
#: GPUs of the mode that was said to be better over those of the other up to which that is no error. [1]
TIE = 1.1
#: Probabilities from which verdicts are counted together. [1]
SURE = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
#: Kind of co-located designs whose attention is data-parallel.
RANKS = f"{ServingMode.COLOCATED.value}, attention DP"
#: Columns of GPUs that are compared with the fewest.
SIZED = (("as planned", "gpus"), ("re-sized", "proven_gpus"))


class Question(NamedTuple):
    """One question of the file."""

    number: int
    model: str
    system: str
    lengths: str  # "ISL + OSL" [token], or a traffic
    cached: float  # share of every prompt [1]
    drafts: str  # acceptance of --speculate auto; "" = no drafts
    ttft: str
    tpot: str
    rate: float  # [request/s]


def asked(one: Question, **size: Any) -> Plan:
    """The plan of a question, for its rate or another size."""
    if "+" in one.lengths:
        isl, osl = (int(each) for each in one.lengths.split("+"))
        work: Any = ds.lengths(isl, osl, cached=one.cached or None)
    else:
        work = served_lengths(load_traffic(one.lengths).cases[0], load_model(one.model).max_context)
    options = PlanOptions()
    if one.drafts:
        options = replace(options, speculation=asked_speculation(load_model(one.model).name, "auto", one.drafts))
    size = size or {"rate": one.rate}
    return ds.plan(one.model, one.system, work, ttft=one.ttft, tpot=one.tpot, options=options, **size)


def served_lengths(case: TrafficCase, context: int) -> TrafficCase:
    """A case without requests beyond a model's context, which nothing serves: prompts take up to 3/4 of it."""
    return replace(case, isl=_below(case.isl, 0.75 * context), osl=_below(case.osl, 0.25 * context))


def _below(spec: LengthSpec, most: float) -> LengthSpec:
    """Log-normal lengths up to a bound [token], as a table of quantiles; the same where they end below it."""
    if not isinstance(spec, LogNormalLength):
        return spec
    inside = NormalDist(math.log(spec.median), spec.sigma).cdf(math.log(most))
    if inside > 1.0 - NONE_IN:
        return spec
    whole = length_distribution(spec)
    tokens = [max(whole.quantile(share * inside), 1.0) if share < 1.0 else most for share in QUANTILES]
    return EmpiricalLength(probabilities=QUANTILES, tokens=tuple(tokens))


def drawn() -> Iterator[Question]:
    """Questions from a fixed seed; those that nothing serves, or of simulations that take long, are drawn again."""
    chance = random.Random(SEED)
    number = 0
    while number < QUESTIONS:
        shape, odd = chance.choice(SHAPES), chance.randrange(6)
        model = chance.choice(DRAFTED if odd == 0 else MODELS)
        one = Question(
            number=number + 1,
            model=model,
            system=chance.choice(SYSTEMS),
            lengths=shape,
            cached=CACHED if odd == 1 and "+" in shape else 0.0,
            drafts=DRAFTS if odd == 0 else "",
            ttft=chance.choice(TTFT),
            tpot=chance.choice(TPOT),
            rate=math.nan,
        )
        gpus = round(math.exp(chance.uniform(math.log(SMALLEST), math.log(LARGEST))))
        load = chance.uniform(0.6, 1.0)  # else all plans fill their GPUs
        try:
            most = asked(one, gpus=gpus)
        except DisaggSimError as error:
            print(f"left out: {error}", file=sys.stderr)
            continue
        if most.best is None:
            continue
        rate = most.best.rate * load
        requests = len(requests_of(most, replace(most.best, rate=rate), 0)[0])
        rate *= min(1.0, MOST_REQUESTS / requests)
        one = one._replace(rate=float(f"{rate:.3g}"))
        found = asked(one)
        if found.best is not None and SMALLEST <= found.best.gpus <= LARGEST:
            number += 1
            yield one


def outcomes(one: Question) -> Iterator[dict[str, Any]]:
    """A row for each design of a question's plan, the best first; one row where there is none."""
    begun = time.process_time()
    plan = asked(one)
    planned_s = time.process_time() - begun
    known = one._asdict()
    if plan.best is None:
        yield {**known, "design": 0, "kind": "none"}
        return
    sure = assurance(plan)
    designs = list(dict.fromkeys([plan.best, *plan.runners_up]))
    proofs = [_proof(plan, each) for each in designs]
    least = min((each.design.gpus for each in proofs if each is not None and each.proven), default=math.nan)
    beside = [[_holds(plan, design, share) for share in (LESS, MORE)] for design in designs]
    seconds = time.process_time() - begun
    for place, (design, proof, (less, more)) in enumerate(zip(designs, proofs, beside, strict=True)):
        yield {
            **known,
            "design": place,
            "mode": design.mode.value,
            "kind": kind_of(design),
            "pools": " + ".join(f"{pool.instances} x {mapping_words(pool)}" for pool in design.pools),
            "load": max(pool.utilisation for pool in design.pools),
            "gpus": design.gpus,
            **_latencies(design, proof),
            "holds": proof is not None and proof.planned.holds,
            "holds_at_0.8": less,
            "holds_at_1.2": more,
            "proven_gpus": proof.design.gpus if proof is not None and proof.proven else math.nan,
            "fewest_gpus": least,
            "gain": plan.gain,
            "gain_low": sure.gain[0],
            "gain_high": sure.gain[1],
            "probability": sure.probability,
            "plan_s": planned_s,
            "question_s": seconds,
            "simulations": sum(each.runs for each in proofs if each is not None) + 2 * len(designs),
        }


def of_ranks(one: Question) -> Iterator[dict[str, Any]]:
    """A row for the first co-located design with attention DP as it is planned, one for the same as it is checked.

    None where no such design keeps the limits.
    """
    plan = asked(one)
    every = [each for case in plan.cases for each in designs_at(case, one.rate) if kind_of(each) == RANKS]
    if not every:
        return
    first = ranked(every)[0]
    for place, (kind, design) in enumerate((("as planned", first), ("as checked", checked(plan, first, {})))):
        row = {**one._asdict(), "design": place, "kind": kind}
        if design is not None:
            proof, law = _proof(plan, design, adapt=False), replace(design, simulated=None)
            row |= {"gpus": design.gpus, **_latencies(law, proof), "holds": proof is not None and proof.planned.holds}
        yield row


def _proof(plan: Plan, design: Design, *, adapt: bool = True) -> Proof | None:
    """What simulation says of a design; None where it sees no request that could keep the limits."""
    try:
        return prove(plan, design, adapt=adapt, seed=JUDGE)
    except InfeasibleError:
        return None


def _holds(plan: Plan, design: Design, share: float) -> bool:
    """Whether the design, as it is, holds at a share of its rate."""
    counts = tuple(pool.instances for pool in design.pools)
    proof = _proof(plan, resized(plan, design, counts, share * design.rate), adapt=False)
    return proof is not None and proof.planned.holds


def _latencies(design: Design, proof: Proof | None) -> dict[str, float]:
    """Latencies at the percentiles of the limits, planned and simulated, over the limits. [1]"""
    found = {}
    for name, limit in (("ttft", design.work.ttft), ("tpot", design.work.tpot)):
        found[f"{name}_planned"] = getattr(design, name)[limit.percentile] / limit.seconds
        seen = math.nan if proof is None else getattr(proof.planned, name)[limit.percentile]
        found[f"{name}_simulated"] = seen / limit.seconds
    return found


def kind_of(design: Design) -> str:
    """Mode, and of co-located designs whether attention is data-parallel."""
    if design.mode == ServingMode.DISAGGREGATED:
        return design.mode.value
    ranks = int(design.pools[0].mapping.dp_attn)
    return RANKS if ranks > 1 else f"{design.mode.value}, no DP"


def summary(table: pd.DataFrame) -> str:
    """Tables for reading, of rows of ``outcomes``."""
    asked_all = table["number"].nunique()
    table = table[table["kind"] != "none"]
    best = table[table["design"] == 0]
    lines = [
        f"{asked_all} questions, {asked_all - len(best)} without a plan; CPU time (median, p90) of a plan "
        f"{_range(best['plan_s'])} s, of a question {_range(best['question_s'])} s"
    ]
    for title, rows in (("all designs", table), ("best designs", best)):
        lines += [
            "",
            f"| {title} | designs | hold | hold at 0.8 | hold at 1.2 | TPOT, simulated / planned p90 | TTFT |",
        ]
        lines += ["| --- | --: | --: | --: | --: | --: | --: |"]
        for kind, some in [*rows.groupby("kind"), ("all", rows)]:
            shares = " | ".join(f"{some[name].mean():.0%}" for name in ("holds", "holds_at_0.8", "holds_at_1.2"))
            ratios = " | ".join(
                _range(some[f"{each}_simulated"] / some[f"{each}_planned"]) for each in ("tpot", "ttft")
            )
            lines.append(f"| {kind} | {len(some)} | {shares} | {ratios} |")
    proven = best[best["fewest_gpus"].notna()]
    over = [f"{what} {_range(proven[name] / proven['fewest_gpus'])}" for what, name in SIZED]
    lines += ["", f"GPUs of the best designs over the fewest of all printed, re-sized (median, p90): {', '.join(over)}"]
    lines += ["", "| probability from | verdicts | right | said, mean |", "| --- | --: | --: | --: |"]
    verdicts = verdicts_of(table)
    for low, high in zip(SURE, (*SURE[1:], 1.01), strict=True):
        some = verdicts[(verdicts["probability"] >= low) & (verdicts["probability"] < high)]
        if len(some):
            lines.append(f"| {low:.0%} | {len(some)} | {some['right'].mean():.0%} | {some['probability'].mean():.0%} |")
    return "\n".join(lines)


def summary_of_ranks(table: pd.DataFrame) -> str:
    """Table for reading, of rows of ``of_ranks``."""
    lines = ["| | designs | hold | TPOT, simulated / planned (median, p90) |", "| --- | --: | --: | --: |"]
    for kind, some in table.groupby("kind", sort=False):
        told = some["tpot_simulated"] / some["tpot_planned"]
        lines.append(f"| {kind} | {some['gpus'].count()} | {some['holds'].sum()} | {_range(told)} |")
    return "\n".join(lines)


def verdicts_of(table: pd.DataFrame) -> pd.DataFrame:
    """A row a question: the probability of its verdict, and whether simulation says so, too."""
    found = []
    for number, rows in table.groupby("number"):
        best = rows[rows["design"] == 0].iloc[0]
        mine = rows.loc[rows["mode"] == best["mode"], "proven_gpus"].min()
        others = rows.loc[rows["mode"] != best["mode"], "proven_gpus"].min()
        if not math.isnan(best["probability"]) and not (math.isnan(mine) and math.isnan(others)):
            right = math.isnan(others) or mine <= TIE * others
            found.append({"number": number, "probability": best["probability"], "over": mine / others, "right": right})
    return pd.DataFrame(found, columns=["number", "probability", "over", "right"])


def _range(values: pd.Series) -> str:
    """Median and 90th percentile."""
    return f"{values.quantile(0.5):.2f}, {values.quantile(0.9):.2f}"


def main() -> None:
    """Ask, write a row a design, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=QUESTIONS)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--ranks", action="store_true")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.draw:
        pd.DataFrame(drawn()).to_csv(FILE, index=False)
        return
    questions = pd.read_csv(OF_RANKS if given.ranks else FILE, keep_default_na=False).head(given.first)
    rows: list[dict[Any, Any]] = []
    if given.csv is not None and given.csv.exists():
        rows = pd.read_csv(given.csv).to_dict("records")
    done = {row["number"] for row in rows}
    for one in (Question(*each) for each in questions.itertuples(index=False)):
        if one.number in done:
            continue
        new = list((of_ranks if given.ranks else outcomes)(one))
        rows += new
        said = "; ".join(
            f"{row['pools']}: {row['gpus']} GPUs, {row['proven_gpus']:g} proven" for row in new if "pools" in row
        )
        print(f"{one.number}. {one.model}, {one.system}, {one.lengths}, {one.rate:g}/s: {said}", flush=True)
        if given.csv is not None:
            pd.DataFrame(rows).to_csv(given.csv, index=False)
    print(summary_of_ranks(pd.DataFrame(rows)) if given.ranks else summary(pd.DataFrame(rows)))


if __name__ == "__main__":
    main()
