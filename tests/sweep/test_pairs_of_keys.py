"""Keys of what serving has beside steps and passes, two at a time: a sweep runs, or one line says what does not go."""

import copy
from itertools import combinations
from unittest.mock import Mock

import pytest
import yaml

from disagg_sim.cli.main import run
from disagg_sim.errors import SpecError
from disagg_sim.report.summary import summary
from disagg_sim.sweep.fidelity import fidelity_of
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import load_sweep

BASE = {
    "name": "pairs",
    "models": "qwen3_5_35b_a3b",
    "systems": {"h200_sxm": "fp8"},
    "traffic": [{"isl": 1024, "osl": 64}],
    "limits": {"max_gpus": 2, "gpu_cap": 8},
}
DRAM = {"dram": {"bandwidth": "50 GB/s", "latency_s": 2e-5, "capacity": "250 GB"}}
IMAGES = {"images": 1, "height": 448, "width": 448}
#: Name -> keys of the file, in place of those of ``BASE``.
KEYS = {
    "held prompts": {"modes": ["disaggregated", "colocated"], "hold_steps": "tuned"},
    "tiers": {"kv_tiers": DRAM, "traffic": [{"isl": 1024, "osl": 64, "cached": {"share": 0.5, "tiers": {"dram": 1}}}]},
    "sessions": {"traffic": [{"sessions": "coding_agent", "sessions_per_s": 0.5, "cache": [{"hbm": "10 GB"}]}]},
    "drafts": {"speculation": "mtp 0.8 0.6", "draft_tokens": 2},
    "uneven ranks": {"rank_imbalance": "round_robin"},
    "spares": {"availability": 0.999},
    "link": {"kv_link": {"path": "rail", "order": "nhd"}},
    "copies": {"expert_skew": 0.5, "limits": {**BASE["limits"], "max_redundant_experts": 4}},
    "columns": {"columns": ["token_prices", "energy"], "utilisation": 0.6},
    "further pools": {"pools": ["encode", "prefill", "attention", "ffn", "decode"], "images": IMAGES},
    "joules": {"per": "joule"},
    "prices": {"per": "usd", "prices": {"h200_sxm": 3.0}},
    "paper": {"matching": "paper"},
    "ratio": {"ctx_gen_ratio": "1/2"},
}
#: Pairs that state one key.
SAME = {frozenset(pair) for pair in (("tiers", "sessions"), ("joules", "prices"))}
#: Pairs that do not go together, and the word that says so.
REFUSED = {
    ("further pools", "drafts"): "speculation: 'mtp 0.8 0.6': steps over attention and feed-forward GPUs",
    ("further pools", "spares"): "availability",
    ("further pools", "joules"): "per: joule",
    ("further pools", "paper"): "matching: paper",
    ("further pools", "link"): "kv_link: link_rail_nhd",
    ("further pools", "ratio"): "ctx_gen_ratio: 1/2",
    ("paper", "ratio"): "ctx_gen_ratio: a fixed ratio needs 'matching: exact'",
    ("columns", "joules"): "columns: 'energy' is what 'per: joule' has already",
}


def load(folder, names):
    keys = copy.deepcopy(BASE)
    for name in names:
        keys |= KEYS[name]
    (folder / "pairs.yaml").write_text(yaml.safe_dump(keys))
    return load_sweep(str(folder / "pairs.yaml"))


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """Pairs that a file may have; what is said of the others."""
    folder, taken, said = tmp_path_factory.mktemp("pairs"), set(), {}
    for pair in map(frozenset, combinations(KEYS, 2)):
        if pair in SAME:
            continue
        try:
            load(folder, pair)
            taken.add(pair)
        except SpecError as error:
            said[pair] = str(error)
    return taken, said


def test_what_does_not_go_together_is_one_line(taken):
    _, said = taken
    for pair, line in said.items():
        assert len(line.splitlines()) == 1, pair
    for pair, word in REFUSED.items():
        assert word in said.pop(frozenset(pair)), pair
    assert not said


@pytest.mark.long
def test_what_goes_together_runs(taken, tmp_path):
    """Few sweeps, and their pages, hold all pairs: each has as many of the keys that are left as go together."""
    left, _ = taken
    everything = left.copy()
    while left:
        chosen: list[str] = [*min(left, key=sorted)]
        for name in sorted(KEYS, key=lambda name: -sum(name in pair for pair in left)):
            if name not in chosen and all(frozenset((name, other)) in everything for other in chosen):
                chosen.append(name)
        left -= {frozenset(pair) for pair in combinations(chosen, 2)}
        out = tmp_path / "_".join(chosen).replace(" ", "")
        result = run_sweep(plan_sweep(load(tmp_path, chosen)), out, jobs=1, listener=Mock(), outside=True)
        told = summary(result, fidelity=fidelity_of(result, out, error_bars=False, jobs=1))
        (out / "summary.md").write_text(told)
        assert run(["report", str(out), "--no-breakdowns"]) == 0, chosen
        found = result.frontier
        assert len(found), chosen
        assert found["tokens_per_s_per_gpu"].gt(0).all(), chosen
