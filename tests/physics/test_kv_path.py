"""The hand-over of one cache: descriptors by hand, paths, what hides, and a published measurement."""

import math
from dataclasses import replace

import pytest

import disagg_sim as ds
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.load import list_specs, load_model, load_profile, load_system
from disagg_sim.physics.kv_transfer import KvLayout, descriptors, kv_hand_over, path_bandwidth, path_of
from disagg_sim.simulation.kv_link import LinkSpec


def tp(n):
    return Sharding(tp_attn=n, tp_ffn=n)


@pytest.fixture(scope="module")
def llama():
    return ds.setup("llama_3_1_70b", "h200_sxm", "fp8", profile="ideal")


def test_a_drafter_has_a_cache_of_its_own_in_the_hand_over():
    """61 layers of a latent and the MTP module's: 62 descriptors a block, and the hidden state of the last token.

    A draft model of 32 layers of keys and values beside 80.
    """
    plain, drafts = (ds.setup("deepseek_r1", "h200_sxm", "fp8", speculation=s) for s in (None, "deepseek_r1_mtp"))
    ends = ds.Sharding(dp_attn=8, ep=8), ds.Sharding(dp_attn=8, ep=8), 4096
    alone, both = (kv_hand_over(at, *ends, path="rail", descriptor_s=1e-6) for at in (plain, drafts))
    assert alone.descriptors == 256 * 61
    assert both.descriptors == 256 * 62
    assert both.gpu_bytes - alone.gpu_bytes * 62 / 61 == pytest.approx(7168 * 2)
    assert both.post == pytest.approx(256 * 62e-6)
    said = "draft_model llama_3_1_8b 0.7 0.5"
    large = ds.setup("llama_3_1_70b", "h200_sxm", "fp8", speculation=said)
    over = kv_hand_over(large, tp(4), tp(4), 4096, path="rail", descriptor_s=1e-6)
    assert over.descriptors == 256 * 2 * (80 + 32)
    assert over.gpu_bytes == pytest.approx(4096 * 2 * 128 * 8 * (80 + 32) / 4)  # eight heads of 128 in both


def test_a_hand_over_by_hand(llama):
    """Llama-70B, 32,768 tokens, TP4 to TP8, blocks of 16: 2,048 blocks x 160 regions of 2,048 B a receiving GPU.

    A receiver takes 0.67 GB in; each of four senders has 1.34 GB, and its NIC decides.
    """
    over = kv_hand_over(llama, tp(4), tp(8), 32_768, path="rail", descriptor_s=0.5e-6)
    whole = 32_768 * 163_840
    assert over.descriptors == 2048 * 160 == 327_680
    assert over.descriptors * 2048 == whole / 8
    assert over.gpu_bytes == whole / 4
    assert over.post == pytest.approx(0.164, abs=1e-3)
    assert over.wire == pytest.approx(2 * 0.0134, rel=2e-3)
    assert over.time == pytest.approx(over.latency + over.post + over.wire)
    fourth = over.time / 4  # of four pieces, three leave in three quarters of a prefill
    assert over.exposed(over.time / 5, 4) == pytest.approx(over.time - 3 / 4 * over.time / 5)
    assert over.exposed(10 * over.time, 4) == fourth
    assert over.exposed(10 * over.time, 1) == over.time
    crossed = kv_hand_over(llama, tp(4), tp(8), 32_768, path="rail", layout=KvLayout(cross_layer=True))
    assert crossed.descriptors == 2048


def posted(at, sender, receiver, **layout):
    return kv_hand_over(at, sender, receiver, 1600, path="rail", layout=KvLayout(**layout)).descriptors


def test_descriptors_where_layouts_differ(llama):
    """From the larger side a block comes in tp_P/tp_D pieces; with tokens before heads in one a token; MLA whole."""
    count = {
        (a, b, order): posted(llama, tp(a), tp(b), order=order)
        for a, b, order in ((4, 4, "hnd"), (4, 4, "nhd"), (8, 2, "hnd"), (2, 8, "hnd"), (2, 8, "nhd"))
    }
    plain = 100 * 160
    assert [each / plain for each in count.values()] == [1, 1, 4, 1, 16]
    r1 = ds.setup("deepseek_r1", "h200_sxm", "fp8", profile="ideal")
    latent = {posted(r1, tp(8), other, order="nhd") for other in (tp(1), tp(8))}
    assert latent == {100 * 61}
    assert posted(llama, tp(4), tp(4), run=4.0) == plain / 4
    assert posted(llama, tp(4), Sharding(tp_attn=4, tp_ffn=4, pp=4)) == plain / 4


def test_without_a_cost_of_descriptors_only_bytes_count(llama):
    over = kv_hand_over(llama, tp(8), tp(8), 8192, path="domain", descriptor_s=0.0)
    assert over.post == 0.0
    assert over.time == pytest.approx(over.latency + 8192 * 163_840 / 8 / 450e9)
    assert kv_hand_over(llama, tp(8), tp(8), 8192, path="domain").post == 0.0  # so says the profile 'ideal'


def test_paths_from_near_to_far():
    h100 = replace(load_system("h100_sxm"), leaf_gpus=32, spine_oversubscription=4.0)
    assert [path_of(h100, gpus) for gpus in (8, 32, 33, math.inf)] == ["domain", "rail", "spine", "spine"]
    assert path_of(h100, 4, load_system("h200_sxm")) == "rail"
    assert path_of(load_system("gb200_nvl72"), math.inf) == "rail"  # no figure of leaves, no spine
    assert [path_of(load_system("h100_sxm"), gpus) for gpus in (256, 257)] == ["rail", "spine"]  # a scalable unit
    rates = [path_bandwidth(h100, load_profile("ideal"), path) / 1e9 for path in ("domain", "rail", "spine")]
    assert rates == [450.0, 50.0, 12.5]


def test_the_published_hand_over_of_glm_on_gb200():
    """vllm-project/vllm issue 55434: GLM-5.3, DEP8 to TP4 on GB200, agentic, 4.9 GB a transfer of a rank.

    Published: 91,000 to 120,000 descriptors. Over cuda_ipc 800.8 ms, of which 455.9 ms posting, 4.067 us each; over
    four InfiniBand rails 350.8 ms, 24.4 ms posting, 0.204 us each. The first two checks take none of this but 4.9 GB:
    the model counts descriptors from it, and the profile's cost of one is of another model and engine.
    """
    glm, at = load_model("glm_5_3"), ds.setup("glm_5_3", "gb200_nvl72", "nvfp4_fp8kv")
    token = 78 * 656 + 21 * 132  # latents, and rows of the index [B]
    tokens = round(4.9e9 / token)
    blocks = math.ceil(tokens / 64)
    # 1. the count: one descriptor a block and layer of latents, against posting over its cost
    latents = blocks * len(glm.layers)
    assert latents == pytest.approx(455.9e-3 / 4.067e-6, rel=0.02)
    # with a row of the index each they would be a quarter more: blocks that follow each other took one together
    assert 1.15 < descriptors(glm, tokens, 64) / 120_000 < descriptors(glm, tokens, 64) / 91_000 < 1.6
    # 2. posting at the profile's cost, 2.4 us: one costs 0.2 to 4.1 us by path, so a factor of two is what it tells
    sides, run = (Sharding(dp_attn=8, ep=8), tp(4)), descriptors(glm, tokens, 64) / latents
    layout = KvLayout(block_tokens=64, run=run)
    near = kv_hand_over(at, *sides, tokens, path="domain", layout=layout)
    assert near.descriptors == pytest.approx(latents, rel=0.01)
    assert 0.5 < near.post / 455.9e-3 < 1.0
    # 3. which path wins, at the published costs of a descriptor: the one with an eighteenth of the bandwidth
    costs = {"domain": 4.067e-6, "rail": 0.204e-6}
    found = {
        path: kv_hand_over(at, *sides, tokens, path=path, layout=layout, descriptor_s=cost)
        for path, cost in costs.items()
    }
    assert found["domain"].time > 2 * found["rail"].time
    assert found["domain"].post == pytest.approx(455.9e-3, rel=0.02)  # repeats check 1
    # a known miss: pieces of 44 kB moved at 14 GB/s on either path; links are counted at their rate for large pieces
    moving = 800.8e-3 - 455.9e-3
    assert near.gpu_bytes / moving == pytest.approx(14.2e9, rel=0.01)
    assert near.wire < moving / 40
    assert found["domain"].post / found["domain"].time > 0.95  # published: 56.9 %


def test_a_stated_spine_that_is_not_oversubscribed_changes_no_link():
    """Shipped leaves are of full fat trees: wires are those of a system that states none, to the last bit."""
    for name in list_specs("hardware"):
        at = ds.setup("llama_3_1_8b", name, "bf16", profile="ideal")
        plain = at.changed(system=replace(at.system, leaf_gpus=None, spine_oversubscription=None))
        for gpus in (1, 8, 256, 257, 10_000, math.inf):
            assert LinkSpec().wire(at, gpus) == LinkSpec().wire(plain, gpus)
            assert LinkSpec().spine(at, gpus) is None
            if (leaf := at.system.leaf_gpus) and math.isfinite(gpus):
                own = LinkSpec(spine_oversubscription=4.0)
                assert (own.spine(at, gpus) is not None) == (gpus > leaf)
                assert (
                    own.wire(at, gpus).bandwidth * (4.0 if gpus > leaf else 1.0) == LinkSpec().wire(at, gpus).bandwidth
                )


def test_faults_name_the_value(llama):
    for call, said in (
        (lambda: kv_hand_over(llama, tp(4), tp(8), 100, path="spline"), "did you mean 'spine'"),
        (lambda: KvLayout(order="dnh"), "order 'dnh' is unknown"),
        (lambda: KvLayout(run=0.5), "run 0.5 is out of range"),
        (lambda: kv_hand_over(llama, tp(4), tp(8), 0, path="rail"), "tokens"),
    ):
        with pytest.raises(InputError, match=said):
            call()
