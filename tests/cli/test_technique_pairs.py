"""Every two techniques that the registry lets go together act together: neither leaves the other without effect.

Each loop asks for every technique alone and for every pair, in one command, and compares numbers of what both act on.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from functools import cache
from itertools import combinations
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml

from disagg_sim.certainty.designs import scores_of, times_of
from disagg_sim.cli import explain
from disagg_sim.question import ExplainQuestion
from disagg_sim.sweep.compare import read_block
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep
from disagg_sim.techniques import registry

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
IMAGES = {"images": 1, "height": 448, "width": 448}
SWEPT = {
    "prefix": {"traffic": [{"isl": 8192, "osl": 512, "cached": 0.9}]},
    "encode": {"pools": ["encode", "prefill", "decode"], "images": IMAGES},
    "context": {"limits": {"max_gpus": 8, "gpu_cap": 16, "max_dcp": 2}},
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
    base |= {"modes": ["disaggregated", "colocated"], "limits": {"max_gpus": 8, "gpu_cap": 16}}

    @cache
    def swept(on):
        keys = merged(base, SWEPT, on)
        if {"encode", "split"} <= on:
            keys["pools"] = ["encode", *POOLS]
        name = "-".join(["of", *sorted(on)])
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(keys))
        plan = plan_sweep(load_sweep(str(tmp_path / f"{name}.yaml")))
        result = run_sweep(plan, tmp_path / name, jobs=1, listener=Mock())
        blocks = [read_block(path) for path in sorted((tmp_path / name / "points").rglob("*.parquet"))]
        return result, [block for block in blocks if "mode" in block]

    def asked(on, pair):
        result, blocks = swept(on)
        if {"encode", "split"} & pair:
            return result.pools.select_dtypes("number").to_csv()
        tables = [result.frontier, *blocks]
        if "prefill_delay" in pair:
            tables = [table[table["mode"] == "colocated"] for table in tables]
        return [table.select_dtypes("number").to_csv() for table in tables]

    apart = {frozenset(("prefill_delay", pool)) for pool in ("encode", "split")}
    apart |= {frozenset(("context", "split"))}  # only PCP, which this model's linear attention has not
    lazy = idle("sweep", asked, NAMES, apart)
    assert lazy == [], lazy
