"""Hand-overs of caches as an axis of sweeps: by hand, in the FTL limit, and off."""

import json

import numpy as np
import pandas as pd
import pytest

import disagg_sim as ds
from disagg_sim.cli.main import run
from disagg_sim.domain import Sharding
from disagg_sim.physics.kv_transfer import KvLayout, kv_hand_over
from disagg_sim.sweep.kv_links import LINK_COLUMNS, classes_of, handed_over, takers_of

SWEEP = """
name: {name}
models: [llama_3_1_70b]
systems: {{h100_sxm: fp8}}
traffic: [{{isl: 8192, osl: 512}}]
modes: [disaggregated, colocated]
limits: {{max_gpus: 16, gpu_cap: 64, ftl_s: {ftl}}}
{more}
"""
LINKS = "kv_link: [none, {path: rail}, {path: rail, order: nhd, descriptor_us: 2.4}]"


@pytest.fixture(scope="module")
def fronts(swept, tmp_path_factory):
    folder = tmp_path_factory.mktemp("links")
    asked = {"links": (2.0, LINKS), "loose": (1e3, "kv_link: [none, {descriptor_us: 2.4}]")}
    texts = {name: SWEEP.format(name=name, ftl=ftl, more=more) for name, (ftl, more) in asked.items()}
    return {name: pd.read_csv(swept(text, folder / name) / "frontier.csv") for name, text in texts.items()}


def of(front: pd.DataFrame, end: str) -> pd.DataFrame:
    mine = front[front["case"].str.endswith(end) & (front["mode"] == "disaggregated")]
    assert len(mine)
    return mine.reset_index(drop=True)


def test_without_a_link_nothing_is_handed_over(fronts):
    off = of(fronts["links"], "no_link")
    assert not off[[column.name for column in LINK_COLUMNS[:3]]].to_numpy().any()
    assert (off["ftl_with_hand_over_s"] == off["ftl_s"]).all()


def test_explain_of_a_row_tells_its_hand_over(fronts, tmp_path, capsys):
    """Of the row above, 97 % of 50 GB/s; a case without a link, and one instance for both phases, hand nothing over."""
    table, file = fronts["links"], tmp_path / "frontier.csv"
    table.to_csv(file, index=False)
    linked = table["case"].str.endswith("link_rail") & (table["mode"] == "disaggregated")
    row = int(table.index[linked & (table["prefill_gpus"] == 1) & (table["decode_pp"] == 1)][0])
    assert run(["explain", str(file), "--row", str(row), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["hand_over"]
    wire = 1.5175e-3 + 8192 * 163_840 / 48.5e9
    assert told == pytest.approx(
        {"link": "link_rail", "bandwidth": 48.5e9, "size": 8192 * 163_840, "descriptors": 512 * 160}
        | {"post": 512 * 160 * 2.4e-6, "wire": wire, "time": 512 * 160 * 2.4e-6 + wire}
        | {"ftl": table["ftl_s"][row] + 512 * 160 * 2.4e-6 + wire}
    )
    assert run(["explain", str(file), "--row", str(row)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "1.34 GB a prompt over link_rail, 48.5 GB/s a GPU: 29.2 ms on the wire" in text
    assert "a GPU of the receiver posts 81,920 descriptors in 197 ms" in text
    plain = int(table.index[table["case"].str.endswith("no_link") & (table["mode"] == "disaggregated")][0])
    for other in (plain, int(table.index[table["mode"] == "colocated"][0])):
        assert handed_over(table.loc[other].to_dict()) is None


def test_rows_say_what_the_notebook_interface_says(fronts):
    at, layout = ds.setup("llama_3_1_70b", "h100_sxm", "fp8"), KvLayout(order="nhd")
    for row in of(fronts["links"], "nhd").to_dict("records"):
        ends = (
            Sharding(tp_attn=row[f"{side}_tp_attn"], tp_ffn=row[f"{side}_tp_ffn"], pp=row[f"{side}_pp"])
            for side in ("prefill", "decode")
        )
        over = kv_hand_over(at, *ends, 8192, path="rail", layout=layout, descriptor_s=2.4e-6)
        assert row["hand_over_s"] == pytest.approx(over.time, rel=1e-9)
        assert row["kv_descriptors"] == pytest.approx(over.descriptors)


def test_the_limit_holds_with_the_hand_over(fronts):
    """With tokens before heads a change of TP costs seconds: other layouts win, and none is better than without."""
    off, dear = of(fronts["links"], "no_link"), of(fronts["links"], "nhd")
    assert (dear["ftl_with_hand_over_s"] <= 2.0).all()
    assert (dear["ftl_s"] + dear["hand_over_s"]).to_numpy() == pytest.approx(dear["ftl_with_hand_over_s"].to_numpy())
    best = [
        off[off["tokens_per_s_per_user"] >= x * (1 - 1e-9)]["tokens_per_s_per_gpu"].max()
        for x in dear["tokens_per_s_per_user"]
    ]
    assert (dear["tokens_per_s_per_gpu"] <= np.array(best) * (1 + 1e-9)).all()
    assert dear["tokens_per_s_per_gpu"].max() < off["tokens_per_s_per_gpu"].max()


def test_a_limit_that_is_never_met_leaves_the_frontier_as_it_is(fronts):
    off, counted = of(fronts["loose"], "no_link"), of(fronts["loose"], "2.4us")
    for column in ("tokens_per_s_per_user", "tokens_per_s_per_gpu", "ftl_s"):
        assert counted[column].to_numpy() == pytest.approx(off[column].to_numpy(), rel=1e-12)


def test_receivers_of_one_class_have_equal_hand_overs():
    """The latent of DeepSeek-R1 is one piece whatever TP is, so stages alone tell receivers apart."""
    at = ds.setup("deepseek_r1", "h200_sxm", "fp8")
    mappings = ds.enumerate_mappings(at, max_gpus=32)
    takers = takers_of(mappings, at)
    kinds = classes_of(mappings, takers, at)
    assert len(takers) == len(np.unique(mappings.pp))
    assert (np.asarray(takers.pp)[kinds] == mappings.pp).all()
