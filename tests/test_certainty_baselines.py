"""Tables of what is known of designs, against text in git, to ten digits: bands, labels, joules, prices.

Of each case some designs of all modes go through every function of ``ds`` that adds to a table of points.
``--update-baselines`` records them anew. What moves a number is named in the commit.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from test_plan_baselines import as_recorded, rounded

import disagg_sim as ds
from disagg_sim.certainty.elasticity import PARAMETERS
from disagg_sim.certainty.error_bars import QUANTILES, within_reach
from disagg_sim.certainty.trust import trust_of_points
from disagg_sim.facts.profile import skewed_profile
from disagg_sim.facts.traffic import ConstantShare, Reuse
from disagg_sim.serving.evidence import layout_evidence
from disagg_sim.serving.points import INTERACTIVITY

BASELINES = Path(__file__).parent / "certainty" / "tables"
SAMPLES = 16  # of error bars [1]
FEW = ("hbm_bandwidth", "nvlink_latency")  # that elasticities are taken to


def degrees(tp: int = 1, dp: int = 1, **others: int) -> ds.Sharding:
    return ds.Sharding(tp_attn=tp, dp_attn=dp, **{"tp_ffn": tp * dp // others.get("ep", 1), **others})


#: Name of a record -> setup of decode, and of prefill where it is another; lengths; mappings; batches of decode.
CASES: dict[str, dict[str, Any]] = {
    "dense": {"at": ("llama_3_1_8b", "h100_sxm", "fp8"), "mappings": [degrees(), degrees(2)], "parameters": PARAMETERS},
    "stages": {
        "at": ("llama_3_1_70b", "h200_sxm", "fp8"),
        "engine": "vllm",
        "mappings": [degrees(4), degrees(2, pp=2)],
        "prices": {"h200_sxm": 3.0},
    },
    "experts": {
        "at": ("mixtral_8x7b", "h100_sxm", "fp8"),
        "engine": "sglang",
        "mappings": [degrees(1, 4, ep=4)],
        "lengths": ("azure_2023_code",),
        "imbalance": "random",
        "parameters": ("nvlink_latency",),
    },
    "copies": {
        "at": ("qwen3_30b_a3b", "h200_sxm", "fp8", skewed_profile("measured", 1.0)),
        "mappings": [degrees(1, 8, ep=8, redundant_slots=8), degrees(1, 8, ep=8)],
    },
    "nodes": {
        "at": ("deepseek_r1", "h200_sxm", "fp8_block"),
        "mappings": [degrees(1, 16, ep=16), degrees(8, ep=8)],
        "batch": (32, 256),
        "parameters": ("flops", "nic_bandwidth", "nic_latency"),
    },
    "two_systems": {
        "at": ("llama_3_1_70b", "h200_sxm", "fp8"),
        "prefill_at": ("llama_3_1_70b", "b200_sxm", "fp8"),
        "mappings": [degrees(2), degrees(4)],
    },
    "drafts": {
        "at": ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"),
        "speculation": "deepseek_r1_mtp",
        "prices": {"gb200_nvl72": 5.0},
        "mappings": [degrees(1, 8, ep=8, draft_tokens=2), degrees(8, ep=8)],
    },
    "cached": {
        "at": ("llama_3_1_8b", "h100_sxm", "fp8"),
        "mappings": [degrees(), degrees(2)],
        "lengths": (16384, 128),
        "cached": 0.5,
    },
    "inherited": {"at": ("llama_3_1_8b", "mi300x", "bf16"), "mappings": [degrees(), degrees(4)]},
    "linear": {"at": ("qwen3_5_35b_a3b", "h200_sxm", "fp8"), "mappings": [degrees(2), degrees(4, ep=4)]},
    "ranks": {
        "at": ("deepseek_r1", "h200_sxm", "fp8_block"),
        "speculation": "deepseek_r1_mtp",
        "mappings": [degrees(1, 8, ep=8, draft_tokens=1)],
        "imbalance": "random",
    },
    "context": {
        "at": ("deepseek_r1", "b200_sxm", "fp8"),
        "engine": "sglang",
        "mappings": [degrees(8, ep=8, dcp=2), degrees(8, ep=8)],
        "lengths": (65536, 256),
    },
    "tiers": {
        "at": ("llama_3_1_70b", "h200_sxm", "fp8"),
        "mappings": [degrees(2), degrees(4)],
        "lengths": (16384, 256),
        "cached": Reuse(share=ConstantShare(share=0.5), tiers=(("hbm", 0.5), ("dram", 0.5)), in_decode=0.3),
    },
    "compressed": {
        "at": ("deepseek_v4_flash", "h200_sxm", "mxfp4_fp8_block"),
        "engine": "vllm",
        "mappings": [degrees(1, 4, ep=4), degrees(4, ep=4)],
        "lengths": (32768, 256),
    },
    "states": {
        "at": ("nemotron_3_nano_30b_a3b", "h100_sxm", "fp8"),
        "mappings": [degrees(), degrees(2, pp=2)],
        "lengths": (8192, 256),
    },
    "chunks": {
        "at": ("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"),
        "speculation": "deepseek_r1_mtp",
        "prices": {"gb200_nvl72": 5.0},
        "mappings": [degrees(1, 4, ep=4, pp=2, chunk_tokens=2048, draft_tokens=1), degrees(4, pp=2)],
        "lengths": (16384, 128),
    },
    "ideal": {"at": ("llama_3_1_8b", "h100_sxm", "fp8", "ideal"), "mappings": [degrees(), degrees(2)]},
}


def slower(at: ds.Setup) -> ds.Setup:
    """The same with memory of half the bandwidth."""
    return at.changed(system=replace(at.system, hbm_bandwidth=0.5 * at.system.hbm_bandwidth))


def bars(points: pd.DataFrame, origin: ds.Origin) -> dict[str, Any]:
    """Error bars of designs, of the frontiers of their modes, and of the gain of disaggregation."""
    found = ds.uncertainty(points, samples=SAMPLES, seed=7, origin=origin)
    at = np.quantile(points[INTERACTIVITY], [0.1, 0.5, 0.9])
    bands = found.bands()
    told = {
        "bands": by_column(bands[[name for name in bands if name not in points]]),
        "first_token": np.quantile(found.beside, list(QUANTILES.values()), axis=1).tolist(),
        "frontier": by_column(found.frontier()),
        "frontier_at": by_column(found.frontier(at)),
    }
    if len(found.modes) > 1:
        return told | {"gain": by_column(found.gain(at))}
    fixed = ds.uncertainty(points, samples=SAMPLES, seed=7, rematch=False, throughput="tokens_per_usd", origin=origin)
    return told | {"unmatched": by_column(fixed.bands()[[f"tokens_per_usd_{name}" for name in QUANTILES]])}


def setups(case: dict[str, Any]) -> tuple[ds.Setup, ds.Setup]:
    """Setup of decode and of prefill."""
    rest = {name: case[name] for name in ("engine", "speculation") if name in case}
    at = ds.setup(*case["at"], **rest)
    return at, ds.setup(*case["prefill_at"], **rest) if "prefill_at" in case else at


def lengths_of(case: dict[str, Any]) -> ds.Lengths:
    return ds.lengths(
        *case.get("lengths", (4096, 256)), cached=case.get("cached"), rank_imbalance=case.get("imbalance", "even")
    )


def points_of(case: dict[str, Any], at: ds.Setup, prefill_at: ds.Setup) -> pd.DataFrame:
    """Some designs of every mode."""
    lengths, mappings, batch = lengths_of(case), case["mappings"], case.get("batch", (8, 64))
    options = ds.Colocation(batch=batch, prefill_batch=(1,))
    undrafted = [ds.Sharding(**{**asdict(each), "draft_tokens": 0}) for each in mappings]
    prefill = ds.prefill_grid(prefill_at, undrafted, lengths, batch=[1, 16])
    parts = [ds.disaggregated(prefill, ds.decode_grid(at, mappings, lengths, batch=batch), ftl_limit=20.0)]
    if at is prefill_at:
        parts += [make(at, mappings, lengths, ftl_limit=20.0, options=options) for make in (ds.colocated, ds.piggyback)]
    thinned = [part.iloc[:: max(1, len(part) // 3)] for part in parts]
    return pd.concat(thinned, ignore_index=True)


def by_column(table: pd.DataFrame) -> dict[str, list[Any]]:
    """Columns of a table; of numbers those that are none as words."""
    return {name: [plain(value) for value in column.tolist()] for name, column in table.items()}


def plain(value: Any) -> Any:
    return value if not isinstance(value, float) or np.isfinite(value) else str(value)


def record(case: dict[str, Any]) -> dict[str, Any]:
    """All that functions on tables say of the designs of a case."""
    at, prefill_at = setups(case)
    prices, points = case.get("prices"), points_of(case, at, prefill_at)
    origin = ds.Origin(lengths=lengths_of(case))
    own = set(points)
    table = ds.with_energy(points, origin=origin)
    table = ds.with_token_prices(table, prices, utilisation=0.5, origin=origin)
    table = ds.with_cost(ds.with_cost(table, prices or "usd"), "watt")
    table = ds.with_spares(table, ds.SpareRules(target=0.9995, per="watt"))
    table = table.assign(
        rests_on=ds.rests_on(points, origin=origin),
        outside=ds.outside_calibration(points, origin=origin),
        evidence=layout_evidence(points, at, prefill_at),
    )
    found = {"points": by_column(points), "beside": by_column(table[[name for name in table if name not in own]])}
    found["readable"] = by_column(ds.readable(table))
    found["shares"] = trust_of_points(points, origin=origin)
    found["sensitivity"] = by_column(ds.sensitivity(points, parameters=case.get("parameters", FEW), origin=origin))
    found["rescored"] = by_column(ds.rescore(points, slower, origin=origin))
    found["pays"] = by_column(ds.where_it_pays(points))
    found["reach"] = by_column(within_reach(points)[[INTERACTIVITY]])
    if case["at"][3:] != ("ideal",):
        found |= bars(table, origin)
    return json.loads(json.dumps(rounded(found)))


def text_of(found: dict[str, Any]) -> str:
    """JSON with a line for each column."""
    parts = []
    for key, value in found.items():
        lines = (
            [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in value.items()]
            if isinstance(value, dict)
            else []
        )
        parts.append(f"{json.dumps(key)}: " + ("{" + ",\n ".join(lines) + "}" if lines else json.dumps(value)))
    return "{" + ",\n".join(parts) + "}\n"


@pytest.mark.parametrize("name", CASES)
def test_tables_are_as_recorded(name, update_baselines):
    found = record(CASES[name])
    as_recorded(BASELINES / f"{name}.json", found, text_of(found), update_baselines)


def test_every_case_is_recorded_and_nothing_else_is():
    assert {path.stem for path in BASELINES.glob("*")} == set(CASES)
