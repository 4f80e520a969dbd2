"""Published points of context parallelism beside the forecast. Nothing is fitted to them.

Crossings of DCP8 with TP8: sgl-project/sglang pull request 33926 (MLA on ``trtllm_mla``, batches 1, 2, 4, ...; neither
model nor GPU is known here: DeepSeek-R1 on B200; ``ag_rs``, its default of August 2026).
DP8 against TP8: vllm-project/vllm issue 51454
(DeepSeek-V4 Flash on 8 B200, vLLM 0.25 at 95 % of the memory): 156.9 and 20.43 sequences of 2^20 tokens.
"""

from dataclasses import replace

import pytest

import disagg_sim as ds
from docs.computed.context import PUBLISHED, Capacity, capacity, crossing, ratio, sglang

B200, H200 = (sglang(name, "ag_rs") for name in ("b200_sxm", "h200_sxm"))
#: Upper ends of the published brackets, and how far above them the forecast crossing lies on B200: known misses.
MISSES = {32_768: 1.80, 65_536: 1.33, 131_072: 1.15, 262_144: 2.1}


@pytest.mark.parametrize("context", PUBLISHED)
def test_dcp_overtakes_tp_at_more_requests_than_published(context):
    _, high = PUBLISHED[context]
    assert crossing(B200, context) / high == pytest.approx(MISSES[context], rel=0.05)


def test_crossings_fall_with_the_context_and_two_of_four_are_bracketed_on_h200():
    found = [crossing(H200, context) for context in PUBLISHED]
    assert found == sorted(found, reverse=True)
    inside = [low <= each <= high for each, (low, high) in zip(found, PUBLISHED.values(), strict=True)]
    assert inside == [False, True, True, False]


@pytest.mark.long
@pytest.mark.parametrize("context", PUBLISHED)
def test_the_published_ends_lie_inside_the_error_bars(context):
    """At the lower end TP was the faster one, at the upper end DCP."""
    low, high = PUBLISHED[context]
    assert ratio(B200, context, high).low < 1.0
    assert not low or ratio(B200, context, low).high > 1.0


def test_dp_attention_holds_7_7_times_the_sequences_of_tp_for_one_kv_head():
    at = ds.setup("deepseek_v4_flash", "b200_sxm", "fp8", engine="vllm")
    assert at.overheads is not None
    at = replace(at, overheads=replace(at.overheads, memory_utilisation=0.95))
    tp, dp = (capacity(at, each, 2**20) for each in (ds.Sharding(tp_attn=8, ep=8), ds.Sharding(dp_attn=8, ep=8)))
    assert isinstance(tp, Capacity)
    assert dp.nominal / tp.nominal == pytest.approx(156.9 / 20.43, rel=0.02)
    assert dp.low / tp.high < 156.9 / 20.43 < dp.high / tp.low
    assert tp.nominal / 20.43 == pytest.approx(1.72, rel=0.03)  # known miss: whole pages for windows and compressors
