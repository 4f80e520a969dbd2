"""Which fits of attention parts are shipped: sound ones, of the version with most rows, whatever held-out rows say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disagg_sim.calibration.kernels.registry import OPERATORS
from disagg_sim.calibration.kernels.selection import LEAST_CONTEXT, sound_parts
from disagg_sim.facts.efficiency import AttentionPartFit
from disagg_sim.facts.load import load_efficiency
from disagg_sim.facts.yaml_files import list_specs

STEP = AttentionPartFit(
    engine="vllm",
    version="1.0",
    kind="dsa",
    part="index_step",
    t0=1e-5,
    points=100,
    median_error=0.1,
    p90_error=0.3,
    valid=(("seq_len", 1.0, 1e6),),
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"median_error": 0.21}, "median error 21 %"),
        ({"p90_error": 0.61}, "p90 error 61 %"),
        ({"part": "index", "valid": (("seq_len", 1.0, LEAST_CONTEXT / 2),)}, "longest context is 15,000 tokens"),
        ({"part": "index", "kind": "msa", "e_compute": 1.9}, "1.90 of the bf16 peak"),
    ],
)
def test_a_fit_that_misses_much_or_saw_short_prompts_alone_is_left_out(change, reason):
    shipped, left = sound_parts([replace(STEP, **change)])
    assert not shipped
    assert reason in str(left[0])


def test_held_out_errors_choose_nothing():
    bad = replace(STEP, held_out_points=50, held_out_median_error=0.9, held_out_p90_error=2.0)
    assert sound_parts([bad]) == ([bad], [])


def test_of_several_versions_the_one_with_most_rows_counts_and_of_equals_the_last():
    few, many, equal = replace(STEP, points=50), STEP, replace(STEP, version="1.1")
    other = replace(STEP, engine="sglang", points=1)
    shipped, left = sound_parts([many, few, other, equal])
    assert shipped == [other, equal]
    assert [each.fit for each in left] == [few, many]


def test_shipped_attention_parts_are_sound():
    """Every efficiency file holds what its own errors allow."""
    assert OPERATORS["sparse_attention"].select is OPERATORS["linear_attention"].select is sound_parts
    for system in list_specs("hardware"):
        fits = load_efficiency(system)
        assert fits is None or not sound_parts(fits.attention_parts)[1], system
