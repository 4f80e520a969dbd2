"""What people read: words for mappings, the summary, and labels that do not cover each other."""

from dataclasses import replace
from unittest.mock import Mock

import pytest

from disagg_sim.domain import SHARDING
from disagg_sim.report.summary import summary
from disagg_sim.report.words import mapping_text, ratio_text
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import MODES, PointLimits, SweepSpec, same_system
from disagg_sim.sweep.store import RunListener
from disagg_sim.sweep.traffic import Traffic


def point(*cut: int) -> dict[str, int]:
    return {f"decode_{name}": value for name, value in zip(SHARDING, cut, strict=False)}


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ((1, 1, 1, 1, 1, 0), "1 GPU"),
        ((8, 1, 8, 1, 1, 0), "TP8"),
        ((8, 1, 1, 8, 1, 0), "TP8 EP8"),
        ((1, 32, 1, 32, 1, 0), "DP32 EP32"),
        ((2, 32, 4, 16, 2, 0), "DP32 TP2 FFN-TP4 EP16 PP2"),
        ((1, 8, 8, 1, 1, 0), "DP8 FFN-TP8"),
        ((1, 1, 1, 1, 4, 0), "PP4"),
        ((1, 48, 1, 48, 1, 32), "DP48 EP48+32"),
    ],
)
def test_a_mapping_reads_as_engineers_write_it(degrees, text):
    assert mapping_text(point(*degrees), "decode") == text


def test_a_ratio_shows_instances_and_their_size():
    counts = {"prefill_instances": 3, "prefill_gpus": 8, "decode_instances": 2, "decode_gpus": 16}
    assert ratio_text(counts) == "3×8 : 2×16"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    listener: RunListener = Mock()
    spec = SweepSpec(
        source="trial.yaml",
        name="trial",
        models=("llama_3_1_8b", "llama_3_1_405b"),
        pools=(same_system("h800_sxm", "fp8"),),
        traffic=(Traffic(isl=1024, osl=128),),
        modes=MODES,
        limits=(PointLimits(max_gpus=2),),
    )
    return run_sweep(plan_sweep(spec), tmp_path_factory.mktemp("out"), jobs=1, listener=listener)


def test_the_summary_names_the_ftl_limit_of_each_traffic(result):
    spec = result.plan.spec
    longer = replace(spec, traffic=(*spec.traffic, Traffic(isl=65536, osl=128, ftl_s=60.0)))
    assert "FTL at most 10 s," in summary(result)
    assert "FTL at most 10 or 60 s," in summary(replace(result, plan=replace(result.plan, spec=longer)))


def test_every_table_of_the_summary_is_rectangular(result):
    text = summary(result)
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) >= 3
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "fits on no allowed mapping" in text
    assert "h800_sxm, fp8 \\*" in text
