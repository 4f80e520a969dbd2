"""What caches hold of prompts: whole blocks, distributions of the share, few prompts that stand for all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.errors import InputError
from disagg_sim.facts.traffic import BetaShare, ConstantShare, EmpiricalShare, Reuse
from disagg_sim.techniques.prefix.requests import CachedPrefixes
from disagg_sim.workload.lengths import lengths
from disagg_sim.workload.named import lengths_named, parted, reuse_text


def test_a_past_is_whole_blocks_and_leaves_a_token():
    """0.9 of 65,536 is 58,982.4: 3,686 blocks of 16; all of it is 4,095, as the last token is computed."""
    found = [lengths(65_536, 1024, cached=share).cached.past.tolist() for share in (0.9, 1.0)]
    assert found == [[58_976.0], [65_520.0]]
    single = Reuse(share=ConstantShare(share=1.0), block_tokens=1)
    assert lengths(65_536, 1024, cached=single).mean_new == 1


def test_nothing_cached_is_the_same_as_no_cache():
    for plain, off in (
        (lengths(1024, 64), lengths(1024, 64, cached=0.0)),
        (lengths("log_normal_4096_512"), lengths("log_normal_4096_512", cached=0)),
    ):
        assert plain == off
        assert off.prompt_nodes().past.tolist() == [0.0] * off.prompt_nodes().isl.size


def test_decode_does_not_see_what_prefill_found():
    plain, found = lengths(32_768, 1024), lengths(32_768, 1024, cached=0.9)
    assert (found.context, found.resident, found.mean_isl) == (plain.context, plain.resident, plain.mean_isl)


def test_a_quantile_of_new_tokens_lies_between_the_middles_of_equal_halves():
    """Half of the prompts have 100 new tokens of 1,000, half 300: of the median 200 are new and 800 in a cache."""
    halves, reuse = np.full(2, 0.5), Reuse(share=ConstantShare(share=0.8))
    found = CachedPrefixes(isl=np.full(2, 1000.0), past=np.array([900.0, 700.0]), weight=halves, reuse=reuse)
    assert found.quantile(0.5) == pytest.approx((1000.0, 800.0))


@settings(max_examples=25)
@given(st.floats(0.5, 20.0), st.floats(0.5, 20.0))
def test_nodes_of_a_beta_share_keep_its_moments(alpha, beta):
    """Mean alpha/(alpha + beta), and each further one (alpha + k)/(alpha + beta + k) times the one before."""
    reuse = Reuse(share=BetaShare(alpha=alpha, beta=beta), block_tokens=1)
    cached, moment = lengths(10**8, 2, cached=reuse).cached, 1.0
    for k in range(5):
        moment *= (alpha + k) / (alpha + beta + k)
        assert cached.weight @ (cached.past / 1e8) ** (k + 1) == pytest.approx(moment, rel=1e-6)


def test_a_quantile_table_of_shares_is_uniform_between_its_points():
    table = EmpiricalShare(probabilities=(0.0, 0.5, 1.0), shares=(0.0, 0.0, 0.8))
    cached = lengths(10**8, 2, cached=Reuse(share=table, block_tokens=1)).cached
    share = cached.past / 1e8
    assert cached.weight @ share == pytest.approx(0.2, rel=1e-6)
    assert cached.weight @ share**2 == pytest.approx(0.5 * 0.8**2 / 3, rel=1e-6)


def test_what_decode_holds_is_not_sent():
    found = Reuse(share=ConstantShare(share=0.9), in_decode=0.5)
    assert lengths(65_536, 64, cached=found).cached.sent.tolist() == [65_536 - 29_488]
    assert lengths(65_536, 64, cached=found).mean_over_prompts(float) == 65_536 - 29_488
    assert lengths(65_536, 64, cached=0.9).mean_over_prompts(float) == 65_536


@pytest.mark.parametrize("text", ["16384/2048/cached0.9", "log_normal_4096_512/cached0.5_decode1_blocks64"])
def test_names_of_tables_are_read_back(text):
    traffic, reuse = parted(text)
    assert f"{traffic}/{reuse_text(reuse)}" == text
    assert lengths_named(text).cached.reuse == reuse


@pytest.mark.parametrize("share", [1.5, "much", True])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(InputError, match=r"cached .* is no share of prompts; allowed: from 0 to 1"):
        lengths(1024, 64, cached=share)


def test_a_past_as_long_as_its_prompt_is_refused():
    with pytest.raises(InputError, match="from 0 and below its input tokens"):
        lengths([100, 200], [10, 10], cached=[0, 200])
