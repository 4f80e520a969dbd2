"""Parts of passes whose DP ranks wait for each other: those of the ranks that all wait for, and they add up."""

import pytest

import disagg_sim as ds
from disagg_sim.certainty.rows import Origin
from disagg_sim.workload.named import lengths_named

WIDE = ds.Mapping(dp_attn=4, ep=4)
WORDS = ("log_normal_4096_512/ranks_least_load", "log_normal_4096_512/cached0.6/ranks_random")


@pytest.fixture(scope="module")
def mixtral():
    return ds.setup("mixtral_8x7b", "h100_sxm", "bf16")


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("stages", [1, 2])
def test_parts_of_a_pass_add_up_to_it(mixtral, word, stages):
    mapping = ds.Mapping(dp_attn=4, ep=4, pp=stages)
    grid = ds.prefill_grid(mixtral, mapping, lengths_named(word), batch=[8], chunk_tokens=[])
    parts = ds.breakdown(grid).latency(0, "ftl")
    assert parts["seconds"].sum() == pytest.approx(grid.latency[0, 0])
    assert (parts["seconds"] >= 0).all()
    plain = ds.prefill_grid(mixtral, mapping, lengths_named(word.rpartition("/")[0]), batch=[8], chunk_tokens=[])
    even = ds.breakdown(plain).latency(0, "ftl").set_index("operator")["seconds"]
    uneven = parts.set_index("operator")["seconds"]
    assert uneven["prefill attention"] > 2 * even["prefill attention"]  # of the rank with the most pairs
    assert uneven["routed experts"] == pytest.approx(even["routed experts"], rel=0.02)  # of the tokens of all


@pytest.mark.parametrize("word", WORDS)
def test_parts_of_a_co_located_row_add_up(mixtral, word):
    table = ds.colocated(mixtral, WIDE, lengths_named(word), options=ds.Colocation(batch=(32,)))
    row = table.iloc[[0]].assign(traffic=word)
    found = ds.breakdown(row, origin=Origin(exact=True))
    for name in ("ftl", "ttl"):
        parts = found.latency(row.index[0], name)
        assert parts["seconds"].sum() == pytest.approx(row[f"{name}_s"].iloc[0])
