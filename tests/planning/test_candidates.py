"""Candidates of plans against tables in git: every configuration that is sized, not the winner alone.

A fault in a candidate that loses is seen here, and nowhere in an answer. ``--update-baselines`` records them anew.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import disagg_sim as ds
from disagg_sim.domain import SHARDING
from disagg_sim.planning.candidates import mappings_of
from disagg_sim.planning.choices import _scored, _worth
from disagg_sim.planning.counts import least
from disagg_sim.planning.limits import Demand, Limit
from disagg_sim.planning.pools import AnyChoice, DecodeChoice, PrefillChoice
from disagg_sim.planning.question import PlanOptions

RECORDED = Path(__file__).parent / "candidates"
#: Relative difference that processors may make.
ALIKE = 1e-6
DRAM = {"tiers": (("dram", 0.7), ("hbm", 0.3))}


def cached(isl: int, osl: int, **reuse: Any) -> ds.Lengths:
    from disagg_sim.facts.traffic import ConstantShare, Reuse

    return ds.lengths(isl, osl, cached=Reuse(share=ConstantShare(share=0.5), **reuse))


#: Name -> model, systems, lengths, rate, limits, options.
ASKED: dict[str, tuple[str, str, Any, float, dict[str, str], dict[str, Any]]] = {
    "plain": ("llama_3_1_8b", "h100_sxm", lambda: ds.lengths(2048, 256), 40.0, {}, {}),
    "experts": ("mixtral_8x7b", "h100_sxm", lambda: ds.lengths(4096, 256), 60.0, {}, {"hold_prompts": "tuned"}),
    "latent": (
        "deepseek_r1",
        "h200_sxm",
        lambda: ds.lengths(4096, 512),
        8.0,
        {"ttft": "4 s"},
        {"max_dcp": 2, "max_redundant_experts": 32, "expert_skew": 0.7, "engine": "sglang"},
    ),
    "long": ("llama_3_1_8b", "h200_sxm", lambda: ds.lengths(60_000, 300), 1.0, {"ttft": "8 s"}, {}),
    "pasts": (
        "llama_3_1_70b",
        "h200_sxm",
        lambda: cached(16384, 512, **DRAM),
        3.0,
        {"ttft": "6 s@p99"},
        {"max_pcp": 2},
    ),
    "two_systems": (
        "llama_3_1_70b",
        "h100_sxm",
        lambda: ds.lengths(4096, 512),
        10.0,
        {"tpot": "30 ms@p50"},
        {"prefill_system": "b200_sxm", "max_nic": 10e9, "headroom": 0.2},
    ),
    "varied": ("llama_3_1_8b", "l40s", lambda: ds.lengths("log_normal_4096_512"), 4.0, {"ttft": "5 s"}, {}),
}


#: Of so many candidates of the long tables one is compared in every run, all on request.
EVERY = {"experts": 10, "latent": 20}


def degrees(choice: AnyChoice) -> str:
    found = {name: int(getattr(choice.mapping, name)) for name in (*SHARDING, "chunk_tokens", "draft_tokens")}
    return " ".join(f"{name}{value}" for name, value in found.items() if value > 1)


def test_ranks_that_share_a_prompt_share_no_cache():
    """Of an instance: prompts are shared by those that prefill, caches by those that decode."""
    at = ds.setup("deepseek_r1", "h200_sxm", "fp8")
    prefill, decode = mappings_of((at, at), PlanOptions(max_dcp=2, max_pcp=2, within=None))
    assert set(zip(prefill.dcp.tolist(), prefill.pcp.tolist(), strict=True)) == {(1, 1), (2, 1), (1, 2)}
    assert set(zip(decode.dcp.tolist(), decode.pcp.tolist(), strict=True)) == {(1, 1), (2, 1)}


#: Loads, and instances among which they are shared: what follows is told of each.
STATES = ((0.6, 2), (0.2, 1), (0.95, 300))


def row(role: str, choice: AnyChoice, rate: float) -> dict[str, Any]:
    """What a candidate is, and what some instances of it do at some loads."""
    known = {name: getattr(choice, name, "") for name in ("budget", "hold_steps", "seats", "memory_seats", "bound")}
    told = {name: getattr(choice, name, "") for name in ("most", "ceiling", "link_rate", "memory")}
    for load, count in STATES if choice.most else ():
        told |= {f"{name}@{load}": value for name, value in at_load(choice, load * count * choice.most, count).items()}
    needed = {f"least@{factor}": least(choice, factor * rate) for factor in (1, 20)}
    return {"role": role, "mapping": degrees(choice), "batch": int(choice.batch[-1]), **known, **told, **needed}


def at_load(choice: AnyChoice, rate: float, count: int) -> dict[str, Any]:
    """Latencies and sequences of so many instances at a rate."""
    told = {}
    for name, share in (("ttft", 0.5), ("ttft", 0.9), ("tpot", 0.5), ("tpot", 0.99)):
        if hasattr(choice, name):
            told[f"{name}_{share}"] = getattr(choice, name)(rate, count, share)
    if not isinstance(choice, PrefillChoice):
        held = choice.occupied(rate, count)
        told |= {"mean": held.mean, "full": f"{held.full:.6f}", "p90": held.at(0.9)}
    if not isinstance(choice, DecodeChoice):
        told["mean_ttft"] = choice.mean_ttft(rate, count)
    return told


@cache
def candidates(name: str) -> list[tuple[str, AnyChoice]]:
    """All of a question, planned once for both comparisons."""
    model, system, lengths, rate, limits, options = ASKED[name]
    case = ds.plan(model, system, lengths(), rate=rate, **limits, options=PlanOptions(within=None, **options)).cases[0]
    sides = {"prefill": case.across[0], "decode": case.across[1], "both": case.colocated}
    return [(role, choice) for role, choices in sides.items() for choice in choices]


def table_of(name: str, every: int) -> list[dict[str, str]]:
    rows = [row(role, choice, ASKED[name][3]) for role, choice in candidates(name)[::every]]
    return [
        {key: f"{value:.9g}" if isinstance(value, float) else str(value) for key, value in each.items()}
        for each in rows
    ]


def differ(old: str, new: str) -> bool:
    try:
        return not math.isclose(float(old), float(new), rel_tol=ALIKE)
    except ValueError:
        return old != new


@pytest.mark.parametrize(
    ("name", "every"),
    [*EVERY.items(), *(pytest.param(name, 1, marks=[pytest.mark.rare] * (name in EVERY)) for name in ASKED)],
)
def test_candidates_are_as_recorded(name, every, update_baselines):
    path, found = RECORDED / f"{name}.csv", table_of(name, every)
    if update_baselines:
        if every > 1:
            pytest.skip("the whole table is recorded")
        path.parent.mkdir(exist_ok=True)
        with path.open("w") as file:
            writer = csv.DictWriter(file, {key: None for each in found for key in each}, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found)
        pytest.skip(f"recorded {path.name}: read the diff before committing it")
    with path.open() as file:
        old = [{key: value for key, value in each.items() if value} for each in csv.DictReader(file)][::every]
    found = [{key: value for key, value in each.items() if value} for each in found]
    assert [each.get("mapping") for each in old] == [each.get("mapping") for each in found]
    moved = [
        f"{place} {was['role']} {was.get('mapping', 'one GPU')}, {key}: {was.get(key)} -> {now.get(key)}"
        for place, (was, now) in enumerate(zip(old, found, strict=True))
        for key in {**was, **now}
        if differ(was.get(key, ""), now.get(key, ""))
    ]
    assert not moved, "; ".join(moved[:8])


def test_a_layout_of_one_rank_is_kept_beside_a_faster_one_of_several():
    """Eight ranks of DeepSeek-R1 are faster at the mean lengths, but wait for the longest of their prompts."""
    at, law = ds.setup("deepseek_r1", "h200_sxm", "fp8"), ds.lengths("log_normal_4096_512")
    mappings = (ds.enumerate_mappings(at, max_gpus=16),) * 2
    work = Demand(lengths=law.at_means(), ttft=Limit(5.0), tpot=Limit(0.05))
    (kept, _), _ = _worth(_scored(at, at, mappings, work), work, alike=False)
    of_eight = kept.gpus == 8
    assert {(8, 1), (1, 8)} <= set(zip(kept.dp_attn[of_eight].tolist(), kept.pp[of_eight].tolist(), strict=True))
