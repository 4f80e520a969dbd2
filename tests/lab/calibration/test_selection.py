"""Which fits are shipped: sound ones, whatever held-out rows say.

Of attention parts those that miss little, of the version with most rows; of experts those that gain by fewer bytes.
"""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from disagg_sim.facts.efficiency import AttentionPartFit, MoeFit
from disagg_sim.facts.load import load_efficiency, load_system
from disagg_sim.facts.precision import FORMATS
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.physics.experts import moe_cost
from disagg_sim.physics.rates import moe_rate
from disagg_sim.physics.work import ExpertRows, expert_work
from lab.calibration.kernels.registry import LEAST_CONTEXT, sound_experts, sound_parts

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
    for system in list_specs("hardware"):
        fits = load_efficiency(system)
        assert fits is None or not sound_parts(fits.attention_parts)[1], system


EXPERTS = MoeFit(
    engine="vllm",
    version="1.0",
    kernel="plain",
    format="bf16",
    regime="any",
    picks="T*k/ep",
    e_compute=0.5,
    e_memory=0.8,
    t0=1e-5,
    blend_q=2.0,
    points=4,
    median_error=0.1,
    p90_error=0.3,
)


def timed(kernel, dtype, *times, version="1.0"):
    """Rows of two widths, a time for each of 1, 8 and 64 tokens; the second takes twice as long."""
    shape = {"hidden": 4096, "topk": 8, "num_experts": 128, "tp": 1, "ep": 1, "distribution": "balanced"}
    shape |= {"framework": "vllm", "version": version, "kernel_source": kernel, "dtype": dtype}
    sizes = [(inter, tokens) for inter in (1536, 3072) for tokens in (1, 8, 64)]
    latency = [time * (inter / 1536) for inter, time in zip((i for i, _ in sizes), times * 2, strict=True)]
    made = pd.DataFrame(sizes, columns=["inter", "num_tokens"]).assign(latency=latency, **shape)
    return made.sample(frac=1.0, random_state=1)  # in no order


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ((30e-6, 60e-6, 200e-6), ""),
        ((60e-6, 60e-6, 90e-6), ""),  # slower at one size alone: a start that takes longer
        ((60e-6, 130e-6, 390e-6), "it takes 1.3 times as long as bf16 at the same shapes"),
        ((30e-6, 80e-6, 60e-6), "its time falls by 25 % as tokens are added, at most 5 %"),
        ((30e-6, 62e-6, 60e-6), ""),  # by noise
    ],
)
def test_experts_that_gain_nothing_by_fewer_bytes_are_left_out(times, reason):
    fits = [EXPERTS, replace(EXPERTS, kernel="packed", format="fp8")]
    other = timed("plain", "bfloat16", 1e-6, 1e-6, 1e-6, version="0.9")  # of another version: not compared
    rows = pd.concat([timed("plain", "bfloat16", 50e-6, 100e-6, 300e-6), timed("packed", "fp8", *times), other])
    shipped, left = sound_experts(fits, rows)
    assert [fit.kernel for fit in shipped] == (["plain"] if reason else ["plain", "packed"])
    assert [each.reason for each in left] == ([reason] if reason else [])


def shipped_experts():
    """Every engine and format of experts but bf16 that a shipped file has beside bf16."""
    for system in list_specs("hardware"):
        fits = load_efficiency(system)
        own = {} if fits is None else {(fit.engine, fit.format) for fit in fits.moe if fit.engine in fits.engine_order}
        yield from ((system, *each) for each in sorted(own) if each[1] != "bf16" and (each[0], "bf16") in own)


def test_shipped_experts_gain_by_fewer_bytes_and_take_longer_for_more_tokens():
    """As ``sound_experts`` judges rows: by the fastest kernel of each format, the median over sizes."""
    tokens, width, ep = np.meshgrid([1.0, 8.0, 64.0, 512.0, 4096.0], [768.0, 2048.0, 14336.0], [1.0, 8.0])
    picks, experts = tokens * 8 / ep, np.where(width > 8000.0, 8.0, 128.0) / ep
    rows = ExpertRows(picks, experts * -np.expm1(-picks / experts), experts, np.full(tokens.shape, 4096.0), width)

    def times(system, engine, name):
        work, spec = expert_work(rows, weight_bytes=FORMATS[name].bytes), load_system(system)
        of = [fit for fit in load_efficiency(system).moe if (fit.engine, fit.format) == (engine, name)]
        return np.min([moe_cost(rows, work, moe_rate(fit, spec)).time for fit in of if not fit.block_rows], axis=0)

    for system, engine, form in shipped_experts():
        found = times(system, engine, form)
        assert np.median(found / times(system, engine, "bf16")) < 1.0, (system, engine, form)
        assert (np.diff(found, axis=1) > 0.0).all(), (system, engine, form)
