"""A draft model of its own: its passes by hand, limits, its memory and cache, and the search over draft tokens."""

from dataclasses import replace

import numpy as np
import pytest

import disagg_sim as ds
from disagg_sim.certainty.rows import rescore
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.load import load_model
from disagg_sim.facts.speculation import stated_speculation
from disagg_sim.physics.cache_tiers import loaded_bytes
from disagg_sim.physics.memory import decode_bytes
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.engine_time import host_time
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.residents import decode_residents
from disagg_sim.search.grid import decode_grid, prefill_grid

SHARES = "0.8 0.6 0.45"
FOUR = Sharding(tp_attn=4, tp_ffn=4)
#: Bytes of one pass of one token at 4096 cached: fp8 layers and caches, bf16 head.
BYTES_8B = 32 * (4096 * (4096 + 2048) + 4096**2 + 3 * 4096 * 14336) + 2 * 4096 * 128256 + 4096 * 32 * 2 * 8 * 128
BYTES_70B = 80 * (8192 * (8192 + 2048) + 8192**2 + 3 * 8192 * 28672) + 2 * 8192 * 128256 + 4096 * 80 * 2 * 8 * 128


def setups(profile: str = "ideal") -> tuple[ds.Setup, ds.Setup, ds.Setup]:
    """Llama-3.1-70B with Llama-3.1-8B as its draft model, without it, and the draft model alone."""
    said = f"draft_model llama_3_1_8b {SHARES}"
    at = ds.setup("llama_3_1_70b", "h200_sxm", "fp8", profile=profile, speculation=said)
    own = ds.setup("llama_3_1_8b", "h200_sxm", "fp8", profile=profile)
    return at, replace(at, speculation=None), own


class TestByHand:
    @pytest.mark.parametrize("drafts", [0, 1, 2, 3])
    def test_one_request_reads_its_model_once_and_the_draft_model_k_times(self, drafts):
        """One GPU of 4.8 TB/s, ideal kernels: all is bound by bytes, norms and residuals are the rest."""
        at, plain, _ = setups()
        step = decode_step(at, Sharding(draft_tokens=drafts), batch=1.0, context=4096.0)
        read = BYTES_70B + drafts * BYTES_8B
        host = float(host_time(plain, Sharding(), 1.0))
        assert float(step.time) - host == pytest.approx(read / 4.8e12, rel=0.005)
        assert float(step.time / step.ttl) == pytest.approx([1.0, 1.8, 2.4, 2.85][drafts])

    def test_the_first_pass_takes_what_was_verified_and_the_others_a_token(self):
        """16 sequences, two drafts, TP 4: rows and shapes of the draft model, which is sharded as the model is."""
        at, _, _ = setups()
        seen = []

        def record(op, cost):
            seen.append(op)
            return cost

        decode_step(
            replace(at, rates=replace(at.rates, adjust=record)),
            replace(FOUR, draft_tokens=2),
            batch=16.0,
            context=999.0,
        )
        out = [tuple(map(float, op.shape)) for op in seen if op.name == "o"]
        assert out == [(48.0, 8192.0, 8192 / 4), (48.0, 4096.0, 4096 / 4), (16.0, 4096.0, 4096 / 4)]
        head = [tuple(map(float, op.shape)) for op in seen if op.name == "head"]
        assert head == [(48.0, 128256 / 4, 8192.0), (16.0, 128256 / 4, 4096.0), (16.0, 128256 / 4, 4096.0)]

    def test_a_pass_after_the_first_is_a_decode_step_of_the_draft_model(self):
        """Measured kernels of an engine: what the third draft adds, its verification and its row aside."""
        at, _, own = setups("measured")
        drafted = [float(decode_step(at, replace(FOUR, draft_tokens=k), batch=1.0, context=4e3).time) for k in (2, 3)]
        alone = float(decode_step(own, FOUR, batch=1.0, context=4e3).time - host_time(own, FOUR, 1.0))
        assert drafted[1] - drafted[0] == pytest.approx(alone, rel=0.03)

    def test_memory_has_a_shard_of_both_models_and_of_both_caches(self):
        """16 sequences of 1500 tokens, and two standard deviations of their sum; two drafts of each have places."""
        at, plain, own = setups()
        cached = decode_residents(1000, 1000)
        with_drafts = decode_bytes(at, replace(FOUR, draft_tokens=2), 16.0, cached=cached)
        without = decode_bytes(plain, FOUR, 16.0, cached=cached)
        tokens = 16 * 1500 + at.profile.resident_deviations * 4 * 1000 / np.sqrt(12) + 32
        weights = own.model.total_params + (own.model.embedding_params + own.model.head_params)  # ends in bf16
        norms = 4096 * (2 * 32 + 1)  # bf16, and whole on every GPU
        caches = tokens * 2 * 8 * 128 * 32 + 32 * 2 * 8 * 128 * 80
        rows = 32 * 128256 * 4  # logits in fp32
        expected = (weights - norms + caches + rows) / 4 + 2 * norms
        more = float(with_drafts - without) - expected
        assert 0 <= more < 0.01e9  # activations and buffers of 32 more rows

    def test_both_caches_are_handed_over_and_lie_in_tiers(self):
        at, plain, _ = setups()
        both = (80 + 32) * 2 * 8 * 128
        assert at.handed_bytes(1000) == loaded_bytes(at, 1000) == 1000 * both
        assert plain.handed_bytes(1000) == loaded_bytes(plain, 1000) == 1000 * 80 * 2 * 8 * 128

    def test_the_module_of_a_head_lies_in_tiers_too(self):
        at = ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation="deepseek_r1_mtp")
        assert loaded_bytes(at, 1000) == 62 * 576 * 1000

    @pytest.mark.parametrize("past", [0.0, 500.0])
    def test_prompts_pass_both_models(self, past):
        """Ideal kernels on one stage: a pass takes as long as both, and so do its chunks; the host counts once."""
        at, plain, own = setups()
        passes = [float(prefill_pass(each, FOUR, batch=2, isl=4096, past=past).ftl) for each in (at, plain, own)]
        host = float(host_time(own, FOUR, 0.0))
        assert passes[0] == pytest.approx(passes[1] + passes[2] - host, rel=1e-12)
        chunks = [
            chunked_prefill_pass(each, FOUR, batch=2, isl=4096, chunk_tokens=1000, past=past)
            for each in (at, plain, own)
        ]
        assert float(chunks[0].ftl) == pytest.approx(float(chunks[1].ftl + chunks[2].ftl) - host, rel=1e-12)
        one = chunked_prefill_pass(at, FOUR, batch=2, isl=4096, chunk_tokens=4096, past=past)
        assert float(one.ftl) == pytest.approx(passes[0], rel=1e-12)

    def test_on_stages_the_last_one_drafts(self):
        """Chunks keep the last of two stages busy with its layers and the whole draft model."""
        at, plain, own = setups()
        two = replace(FOUR, pp=2)
        whole, alone = (
            chunked_prefill_pass(each, where, batch=1, isl=8192, chunk_tokens=512)
            for each, where in ((at, two), (own, FOUR))
        )
        stage = chunked_prefill_pass(plain, two, batch=1, isl=8192, chunk_tokens=512).busy
        host = float(host_time(own, FOUR, 0.0))
        assert float(whole.busy) == pytest.approx(float(stage + alone.busy) - host, rel=1e-9)
        held = [float(decode_bytes(each, two, 8.0, cached=decode_residents(100, 100))) for each in (at, plain)]
        assert held[1] < held[0] < held[1] + float(decode_bytes(own, FOUR, 8.0, cached=decode_residents(100, 100)))


class TestSearch:
    def test_points_say_their_draft_model_and_are_timed_again_from_their_rows(self):
        at, _, _ = setups("measured")
        lens = ds.lengths(4096, 512)
        points = ds.disaggregated(
            prefill_grid(at, FOUR, lens), decode_grid(at, FOUR, lens, batch=[1, 16, 128]), gpu_cap=64
        )
        assert set(points["speculation"]) == {f"draft_model llama_3_1_8b {SHARES}"}
        assert points["decode_draft_tokens"].max() > 0
        assert rescore(points)["ttl_s"].tolist() == pytest.approx(points["ttl_s"].tolist(), rel=1e-12)
        assert points["kv_bytes_per_request"].tolist() == [4096 * (80 + 32) * 2048.0] * len(points)

    def test_heads_of_both_models_must_divide(self):
        """Llama-3.1-8B has 32 query heads: no TP of 64 for it, though the model has 64."""
        at, _, _ = setups()
        wide = ds.setup("llama_3_1_70b", "gb200_nvl72", "fp8", speculation=at.speculation)
        with pytest.raises(InputError, match="32"):
            decode_grid(wide, Sharding(tp_attn=64, tp_ffn=64), ds.lengths(1000, 100))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("draft_model llama_2_7b 0.8", "32000 tokens in its vocabulary, llama_3_1_70b 128256"),
        ("draft_model 0.8 0.6", "such as 'mtp 0.8 0.6' or 'draft_model llama_3_1_8b 0.8 0.6'"),
    ],
)
def test_a_wrong_draft_model_is_refused_in_one_line(word, said):
    with pytest.raises(ds.DisaggSimError, match=said):
        ds.setup("llama_3_1_70b", "h200_sxm", "fp8", speculation=word)


def test_a_request_beyond_the_context_of_the_draft_model_is_refused():
    short = replace(load_model("llama_3_1_8b"), max_context=8192)
    said = stated_speculation("draft_model", (0.8,), drafter=short)
    at = ds.setup("llama_3_1_70b", "h200_sxm", "fp8", speculation=said)
    with pytest.raises(InputError, match="8192"):
        decode_grid(at, FOUR, ds.lengths(8000, 500))


def test_a_file_names_its_draft_model(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "title: mine\nmodel: llama_3_1_70b\nmethod: draft_model\ndraft_model: llama-3.1-8b\n"
        "acceptance: [0.8, 0.6]\nsource: my own server\n"
    )
    at = ds.setup("llama_3_1_70b", "h200_sxm", "fp8", speculation=path)
    assert at.speculation.drafter == load_model("llama_3_1_8b")
    path.write_text(path.read_text().replace("draft_model: llama-3.1-8b\n", ""))
    with pytest.raises(ds.DisaggSimError, match="method draft_model needs key 'draft_model'"):
        ds.setup("llama_3_1_70b", "h200_sxm", "fp8", speculation=path)
