"""Every two techniques that the registry lets go together act together: neither leaves the other without effect.

Each loop asks for every technique alone and for every pair, in one command, and compares numbers of what both act on.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from itertools import combinations
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

import disagg_sim as ds
from disagg_sim.certainty.designs import scores_of, times_of
from disagg_sim.cli import explain
from disagg_sim.cli import plan as planned
from disagg_sim.parquet import read_parquet
from disagg_sim.question import ExplainQuestion, PlanQuestion
from disagg_sim.simulation.deployment import Replicas, ServedDeployment
from disagg_sim.simulation.instance_variants import FfnPool
from disagg_sim.simulation.run_options import RunOptions
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.techniques import registry
from disagg_sim.techniques.availability.play import FailureEvent, Failures
from disagg_sim.techniques.encode.play import Encoders
from disagg_sim.techniques.split.search import ffn_mapping
from disagg_sim.workload.request_columns import PrefixBlocks

MODEL, SYSTEM, RECIPE = "qwen3_5_35b_a3b", "h200_sxm", "fp8"
DRAFTS = "mtp 0.8 0.6"
NAMES = tuple(each.name for each in registry.TECHNIQUES)


def idle(
    command: str, asked: Callable[..., Any], names: Iterable[str], apart: Container[frozenset[str]] = ()
) -> list[str]:
    """Pairs in which one technique changes nothing beside the other; ``asked`` gives what both of a pair act on."""
    lazy = []
    for pair in map(frozenset, combinations(names, 2)):
        one, other = sorted(pair)
        if pair in apart or any(not each.part for each in registry.exclusions(one, other, command)):
            continue
        both = asked(pair, pair)
        lazy += [f"{other} beside {one}"] if both == asked(frozenset((one,)), pair) else []
        lazy += [f"{one} beside {other}"] if both == asked(frozenset((other,)), pair) else []
    return lazy


def merged(base: Mapping[str, Any], keys: Mapping[str, Mapping[str, Any]], on: frozenset[str]) -> dict[str, Any]:
    """Keys of all techniques that are on."""
    whole = dict(base)
    for name in sorted(on):
        whole |= keys[name]
    return whole


EXPLAINED = {
    "prefix": {"cached": 0.9},
    "context": {"dcp": 2},
    "experts": {"profile": "measured_skew0.5"},
    "ranks": {"rank_imbalance": "random"},
    "speculation": {"speculate": "2", "acceptance": DRAFTS},
    "prefill_delay": {"hold_prompts": "4"},
    "availability": {"availability": 0.999},
}


def test_pairs_act_in_explain(monkeypatch):
    """Compares times and scores of the design, its spares and its caches, not what each is broken down to."""
    monkeypatch.setattr(explain, "breakdown", Mock())
    base = {"model": MODEL, "system": SYSTEM, "precision": RECIPE, "phase": "colocated", "tp": 4, "dp": 4, "ep": 16}
    base |= {"batch": 256, "isl": 8192, "osl": 512}

    @cache
    def asked(on, _):
        apart = explain.explained(ExplainQuestion(**merged(base, EXPLAINED, on)))
        times = times_of(apart.one)
        numbers = [np.asarray(each).tolist() for each in (*times, *scores_of(apart.one, times))]
        return numbers, repr(apart.spared), repr(apart.held), repr(apart.uses), apart.one.at.cached_layers.name

    lazy = idle("explain", asked, EXPLAINED)
    assert lazy == [], lazy


POOLS = ["prefill", "attention", "ffn"]
PLANNED = {
    "prefix": {"cached": 0.9},
    "encode": {"images": "1x448x448", "pools": "encode,prefill,decode"},
    "context": {"max_dcp": 2},
    "experts": {"expert_skew": 0.5},
    "ranks": {"rank_imbalance": "random"},
    "speculation": {"speculate": "2", "acceptance": DRAFTS},
    "prefill_delay": {"hold_prompts": "4"},
    "split": {"pools": ",".join(POOLS)},
    "availability": {"availability": 0.999},
}


@pytest.mark.rare
def test_pairs_act_in_plans(monkeypatch):
    """Compares all steps, the instances that a plan weighs, and its designs with their spares, not how sure."""
    monkeypatch.setattr(planned, "assurance", Mock())
    base = {"model": MODEL, "system": SYSTEM, "precision": RECIPE, "isl": 8192, "osl": 512, "engine": "sglang"}
    base |= {"rate": 40.0, "ttft": "5 s", "tpot": "30 ms"}

    def numbers(choice):
        found = [getattr(choice, each.name) for each in fields(choice)]
        return [np.asarray(each).tolist() for each in found if isinstance(each, float | int | np.ndarray)]

    @cache
    def asked(on, _):
        keys = merged(base, PLANNED, on)
        if {"encode", "split"} <= on:
            keys["pools"] = ",".join(["encode", *POOLS])
        found = planned.plan_answer(PlanQuestion(**keys))[0]
        kinds = [(case.colocated, *case.inside, *case.across) for case in found.cases]
        weighed = [[numbers(choice) for choice in kind] for case in kinds for kind in case]
        steps = [case.grids.decode.latency.tolist() for case in found.cases]
        return weighed, steps, repr([found.best, *found.runners_up])

    lazy = idle("plan", asked, PLANNED, {frozenset(("context", "split"))})  # PCP, which linear attention has not
    assert lazy == [], lazy


IMAGES = {"images": 1, "height": 448, "width": 448}
SWEPT = {
    "prefix": {"traffic": [{"isl": 8192, "osl": 512, "cached": 0.9}]},
    "encode": {"pools": ["encode", "prefill", "decode"], "images": IMAGES},
    "context": {"limits": {"max_gpus": 4, "gpu_cap": 8, "max_dcp": 2}},
    "experts": {"expert_skew": 0.5},
    "ranks": {"rank_imbalance": "random"},
    "speculation": {"speculation": DRAFTS, "draft_tokens": 2},
    "prefill_delay": {"hold_steps": "tuned"},
    "split": {"pools": POOLS},
    "availability": {"availability": 0.999},
}


@pytest.mark.long
def test_pairs_act_in_sweeps(tmp_path):
    """All points count, not the frontiers alone; those of further pools stand in a table of their own."""
    base = {"name": "pairs", "models": MODEL, "systems": {SYSTEM: RECIPE}, "traffic": [{"isl": 8192, "osl": 512}]}
    base |= {"modes": ["disaggregated", "colocated"], "limits": {"max_gpus": 4, "gpu_cap": 8}}

    @cache
    def swept(on):
        keys = merged(base, SWEPT, on)
        if {"encode", "split"} <= on:
            keys["pools"] = ["encode", *POOLS]
        name = "-".join(["of", *sorted(on)])
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(keys))
        plan = plan_sweep(load_sweep(str(tmp_path / f"{name}.yaml")))
        result = run_sweep(plan, tmp_path / name, jobs=1, listener=Mock())
        blocks = [read_parquet(path) for path in sorted((tmp_path / name / "points").rglob("*.parquet"))]
        return result, [block for block in blocks if "mode" in block]

    def asked(on, pair):
        result, blocks = swept(on)
        if {"encode", "split"} & pair:
            return result.pools.select_dtypes("number").to_numpy().tobytes()
        tables = [result.frontier, *blocks]
        if "prefill_delay" in pair:
            tables = [table[table["mode"] == "colocated"] for table in tables]
        return [table.select_dtypes("number").to_numpy().tobytes() for table in tables]

    apart = {frozenset(("prefill_delay", pool)) for pool in ("encode", "split")}
    apart |= {frozenset(("context", "split"))}  # only PCP, which this model's linear attention has not
    lazy = idle("sweep", asked, NAMES, apart)
    assert lazy == [], lazy


def test_pairs_act_in_simulations():
    pytest.importorskip("numba")
    trace = ds.synthetic_trace(rate=20.0, requests=120, lengths=(6144, 60), seed=3)
    place = np.arange(12 * 120)
    ids = np.where(place % 12 < 9, place % 12, 12 + place)  # the first 9 of the 12 blocks of all prompts are the same
    trace = replace(trace, prefix=PrefixBlocks(offsets=12 * np.arange(121), ids=ids, block_tokens=512))

    @cache
    def asked(on, pair):
        profile = "measured_skew0.5" if "experts" in on else "measured"
        at = ds.setup(MODEL, SYSTEM, RECIPE, profile=profile, speculation=DRAFTS if "speculation" in on else None)
        drafts, dcp = 2 if "speculation" in on else 0, 2 if "context" in on else 1
        whole = ds.Sharding(tp_attn=4, dp_attn=2, ep=8, dcp=dcp, draft_tokens=drafts)
        prefill = Replicas(mapping=replace(whole, dcp=1), instances=2, batch=2)
        decode = Replicas(mapping=whole, instances=2, batch=64)
        if "split" in on:
            half = ds.Sharding(tp_attn=1, dp_attn=2, tp_ffn=1, ep=2)
            decode = Replicas(mapping=half, instances=2, batch=64, ffn=FfnPool(mapping=ffn_mapping(at, 2)))
        images = Encoders(step=ds.encode_step(at, **IMAGES), instances=1) if "encode" in on else None
        parts = {"prefill": (prefill,), "decode": (decode,)}
        if "prefill_delay" in pair:
            steps = 8 if "prefill_delay" in on else None
            parts = {"colocated": (Replicas(mapping=whole, instances=2, batch=64, hold_steps=steps),)}
        served = ServedDeployment(name="of", gpus=32, setup=at, encode=images, **parts)
        fails = Failures(events=(FailureEvent(at_s=2.0, kind="instance", number=1),), restart_s=2.0, migration_limit=3)
        options = RunOptions(prefix_cache="prefix" in on, failures=fails if "availability" in on else None)
        policy = "vllm" if "prefill_delay" in pair else "disaggregated"
        return ds.simulate(served, trace, policy=policy, options=options).frame().to_csv()

    played = [name for name in NAMES if name != "ranks"]  # these are always played
    apart = {frozenset(("split", other)) for other in ("prefill_delay", "context")}  # of other instances
    lazy = idle("simulate", asked, played, apart)
    assert lazy == [], lazy
