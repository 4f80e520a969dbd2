"""The mixed step: its limits, and its chunk penalty under MLA."""

from dataclasses import replace

import numpy as np
import pytest
from cases import cached_setting, cases, mappings_of
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.facts.speculation import stated_speculation
from disagg_sim.physics.memory import colocated_bytes, decode_bytes
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.residents import Prefilling, decode_residents, prompt_residents

quick = settings(max_examples=40)
batches, chunks, contexts = st.integers(1, 2000), st.integers(1, 40_000), st.integers(2, 50_000)


def step_of(at, mapping, batch, chunk, context=5000, isl=4096, **more):
    return mixed_step(
        at, mapping, batch=float(batch), context=float(context), chunk=Chunk(float(chunk), float(isl)), **more
    )


@pytest.mark.parametrize("form", ["naive", "absorbed", "cached"])
def test_the_form_of_mla_is_that_of_the_chunk_and_decodes_stay_absorbed(form):
    at, mapping = cached_setting("deepseek_r1", "gb200_nvl72", "measured"), Sharding(dp_attn=8.0, ep=8.0)
    given = {"batch": 64.0, "context": 5000.0}
    mixed = mixed_step(at, mapping, chunk=Chunk(0.0, 4096.0), mla_form=form, **given)
    assert mixed.time == decode_step(at, mapping, **given).ttl


@pytest.mark.parametrize("model", ["deepseek_r1", "llama_3_1_70b"])
def test_a_grid_of_steps_without_decodes_is_one_prompt_a_rank(model):
    at, mapping = cached_setting(model, "gb200_nvl72", "measured"), mappings_of(model, "gb200_nvl72").for_grid()
    chunk = 4096.0 * mapping.dp_attn
    mixed = mixed_step(at, mapping, batch=0.0, context=9.0, chunk=Chunk(chunk, 4096.0))
    alone = prefill_pass(at, mapping, batch=mapping.dp_attn, isl=4096.0)
    np.testing.assert_allclose(mixed.time, alone.ftl, rtol=1e-12)


def test_drafts_pass_experts_and_links_as_tokens_do():
    """1,000 sequences of three tokens and 3,000 of one, on one cached token, beside a prompt; the drafter adds a layer
    of 48 and the head, twice.
    """
    plain, four = cached_setting("qwen3_30b_a3b", "h100_sxm", "ideal"), {"dp_attn": 4, "ep": 4}
    drafting = replace(plain, speculation=stated_speculation("mtp", (0.8, 0.6)))
    drafted = step_of(drafting, Sharding(**four, draft_tokens=2), 1000, 512, context=1, isl=512)
    tokens = step_of(plain, Sharding(**four), 3000, 512, context=1, isl=512)
    assert 1.0 < float(drafted.time / tokens.time) < 1.2
    assert 1.0 < float(drafted.sums.communication / tokens.sums.communication) < 1.2


def test_a_stage_takes_as_long_as_its_fullest_micro_batch():
    """Three sequences on two stages are two and one: both stages wait for the two, as of four."""
    at, two = cached_setting("llama_3_1_70b", "gb200_nvl72", "measured"), Sharding(pp=2)
    three, four = (step_of(at, two, batch, 512) for batch in (3, 4))
    assert three.time == pytest.approx(four.time, rel=1e-3)
    assert step_of(at, two, 2, 512).time < 0.999 * three.time


def colocated_memory(at, mapping, batch, prompts, *, mixed):
    """Bytes with ``prompts`` in prefill, of which 512 tokens are live on a rank."""
    return float(
        colocated_bytes(
            at,
            mapping,
            float(batch),
            cached=decode_residents(4096, 512),
            prefilling=Prefilling(
                prompts=prompts, prompt=prompt_residents(4096), new=min(prompts, 1.0) * 512.0, mixed=mixed
            ),
        )
    )


@quick
@given(cases(models=("llama_3_1_70b", "opt_30b")), batches, st.booleans())
def test_memory_without_prompts_is_that_of_decode(case, batch, mixed):
    at, mapping = case
    alone = decode_bytes(at, mapping, float(batch), cached=decode_residents(4096, 512))
    assert colocated_memory(at, mapping, batch, 0.0, mixed=mixed) == pytest.approx(float(alone), rel=1e-12)
