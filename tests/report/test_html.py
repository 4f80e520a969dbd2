"""What a notebook shows: tables of HTML with units, escaped; readable tables of points; the summary."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from unittest.mock import Mock

import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.domain import SHARDING
from disagg_sim.facts.load import load_profile
from disagg_sim.report.summary import summary
from disagg_sim.report.words import mapping_text, ratio_text
from disagg_sim.sweep.plan import plan_sweep
from disagg_sim.sweep.run import run_sweep
from disagg_sim.sweep.spec import MODES, PointLimits, SweepSpec, same_system
from disagg_sim.sweep.store import RunListener
from disagg_sim.sweep.traffic import Traffic

SHAPE = {"isl": 2048, "osl": 512}


@pytest.fixture(scope="module")
def grids():
    model, system = ds.load_model("llama_3_1_70b"), ds.load_system("h200_sxm")
    at, lengths = ds.setup(model, system, "fp8"), ds.lengths(**SHAPE)
    mappings = ds.enumerate_mappings(at, max_gpus=8)
    return ds.prefill_grid(at, mappings, lengths), ds.decode_grid(at, mappings, lengths)


class Balanced(HTMLParser):
    """Fails where tags do not nest; keeps the text of every cell."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        if tag in ("td", "th", "caption"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th", "caption"):
            self.cells[-1] += data


def shown(value) -> list[str]:
    return Balanced(value._repr_html_()).cells


@pytest.mark.parametrize("kind", ["hardware", "model", "traffic", "precision", "profile"])
def test_every_shipped_spec_shows_itself(kind):
    load = {
        "hardware": ds.load_system,
        "model": ds.load_model,
        "traffic": ds.load_traffic,
        "precision": ds.load_precision,
        "profile": load_profile,
    }[kind]
    for name in ds.list_specs(kind):
        assert load(name).title in shown(load(name))


def test_a_system_shows_engineers_units():
    cells = shown(ds.load_system("h200_sxm"))
    assert {"141 GB", "4.8 TB/s", "450 GB/s one way", "700 W", "8 GPUs"} <= {*cells}


def test_a_mapping_is_told_in_words():
    cells = shown(ds.Sharding(tp_attn=2, dp_attn=4, ep=8, pp=3, chunk_tokens=4096))
    assert cells[0] == "DP4 TP2 EP8 PP3, chunk 4,096: 24 GPUs"
    assert "tensor parallel over 2, data parallel over 4" in cells
    assert "chunks of 4,096 tokens" in cells


def test_a_table_of_mappings_counts_them_by_size_and_says_what_was_refused():
    system = ds.load_system("h100_sxm")
    html = ds.enumerate_mappings(ds.setup("llama_3_1_8b", system, "fp8"), max_gpus=2)._repr_html_()
    assert Balanced(html).cells == ["3 mappings", "GPUs of an instance", "1", "2", "mappings", "1", "2"]
    assert "Rejected:" in html


def test_text_of_a_file_is_escaped():
    system = replace(ds.load_system("h100_sxm"), title="<script>alert(1)</script> & Co")
    assert "<script" not in system._repr_html_()
    assert shown(system)[0] == "<script>alert(1)</script> & Co"


def test_a_grid_shows_counts_memory_and_its_best_points(grids):
    _, decode = grids
    cells = shown(decode)
    assert cells[0].startswith("Decode grid: Llama")
    assert "2,048 tokens in, 512 out" in cells
    fits = int((decode.memory_bytes <= decode.memory_limit).sum())
    assert any(cell.startswith(f"{decode.latency.size:,}, of which {fits:,} (") for cell in cells)
    lowest = cells[cells.index("lowest TTL") + 1]
    best = decode.latency[decode.feasible].min()
    assert float(lowest.split(" ms: ")[0]) == pytest.approx(best * 1e3, rel=1e-3)
    # 80 layers x 8 heads x 128 x (K and V) x 1 B x 2048 tokens
    assert cells[cells.index("cache of a prompt") + 1] == "0.336 GB in fp8"


def test_a_grid_without_room_says_how_much_it_lacks(grids):
    _, decode = grids
    full = replace(decode, memory_bytes=decode.memory_bytes + decode.memory_limit)
    lacking = decode.memory_bytes.min() / 1e9
    cells = shown(full)
    assert cells[cells.index("closest") + 1] == f"lacks {lacking:.3g} GB on a GPU"
    assert "lowest TTL" not in cells


def test_a_plan_shows_its_pools_with_units(grids):
    plan = ds.plan_pools(grids, ttl_limit=0.03, gpu_budget=24)
    cells = shown(plan)
    instance = plan.deployment.decode.members[0][0]
    assert f"TTL {instance.latency_s * 1e3:.4g} ms" in cells
    assert f"{instance.memory_bytes / 1e9:.1f} GB/GPU" in cells
    assert any(re.fullmatch(r"[\d,.]+ tokens/s/GPU over \d+ GPUs", cell) for cell in cells)
    assert "cost" not in cells
    assert {*shown(plan.deployment)[1:]} <= {*cells}
    assert shown(plan.deployment.prefill)[0].startswith("prefill: ")


def test_a_plan_that_nothing_meets_says_so():
    refused = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(2048, 256), tpot="1 ms", rate=40)
    assert "INFEASIBLE: " in refused._repr_html_()


def test_the_breakdown_of_a_decode_step_has_no_first_token():
    at = ds.setup("llama_3_1_8b", "h100_sxm", "fp8")
    grid = ds.decode_grid(at, ds.Sharding(), ds.lengths(2048, 256), batch=[8])
    html = ds.breakdown(grid)._repr_html_()
    assert "TTL" in html
    assert "FTL" not in html


def test_points_are_readable_in_every_mode(grids):
    prefill, decode = grids
    front = ds.pareto_front(ds.disaggregated(prefill, decode))
    mixed = ds.pareto_front(ds.piggyback(decode.setup, ds.Sharding(tp_attn=8, tp_ffn=8), decode.lengths))
    table = ds.readable(ds.with_cost(pd.concat([front, mixed]), "usd"))
    assert len(table) == len(front) + len(mixed)
    first, last = table.iloc[0], table.iloc[-1]
    assert (first["mode"], last["mode"]) == ("disaggregated", "piggybacked")
    assert first["TTL [ms]"] == pytest.approx(front.iloc[0]["ttl_s"] * 1e3, rel=5e-3)
    assert first["KV out [GB/s/GPU]"] == pytest.approx(front.iloc[0]["kv_egress_bytes_per_s_per_gpu"] / 1e9, rel=5e-3)
    assert last["decode"] == "TP8"
    assert last["prefill"].endswith("of the steps")
    assert (table["tokens/USD"] > 0).all()


def test_readable_keeps_the_best_point_at_stated_interactivities(grids):
    front = ds.pareto_front(ds.disaggregated(*grids))
    table = ds.readable(front, at=[20, 1e6])
    assert len(table) == 1
    best = front[front["tokens_per_s_per_user"] >= 20]["tokens_per_s_per_gpu"].max()
    assert table["tokens/s/GPU"][0] == pytest.approx(best, rel=5e-3)


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


def test_printed_plans_and_setups_are_short():
    """Notebooks store the plain text of a cell beside its table, and a terminal shows nothing else."""
    found = ds.plan("llama_3_1_8b", "h100_sxm", ds.lengths(1024, 128), rate=5)
    assert "colocated: 1 x Sharding(tp_attn=1, " in repr(found.best)
    assert repr(found.best.pools[0].setup) == "Setup(llama_3_1_8b on h100_sxm, fp8, trtllm)"
    assert len(repr(found)) < 4000
