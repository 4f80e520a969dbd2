"""Co-located searches over several numbers of draft tokens."""

import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.facts.load import load_speculation

WIDE = Sharding(dp_attn=8, ep=8)


def drafted(*drafts: int):
    drafter = load_speculation("mtp 0.8 0.6 0.45").trying(drafts)
    return ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation=drafter)


@pytest.mark.parametrize("mode", [ds.colocated, ds.piggyback])
def test_several_numbers_of_drafts_are_searched_as_each_alone(mode):
    """The best of all numbers is the best of what each has alone, and three accepted tokens pay."""
    options = ds.Colocation(batch=(8, 256))
    alone = [mode(drafted(k), WIDE, ds.lengths(4096, 1024), ftl_limit=100.0, options=options) for k in (1, 2, 3)]
    together = mode(drafted(1, 2, 3), WIDE, ds.lengths(4096, 1024), ftl_limit=100.0, options=options)
    best = [min(table["ttl_mean_s"].iloc[row] for table in alone) for row in (0, 1)]
    assert together["ttl_mean_s"].tolist() == pytest.approx(best, rel=1e-12)
    assert together["decode_draft_tokens"].max() > 1
