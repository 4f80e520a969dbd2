"""Parts of a step over two pools and of encoding add up; what hides behind the other half counts nothing."""

import pytest

import disagg_sim as ds
from disagg_sim.certainty.pool_parts import encode_parts, split_parts
from disagg_sim.cli.main import run
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.techniques.split.physics import Split, split_step

LENGTHS = ds.lengths(4096, 512)
HAND = ("explain", "--model", "deepseek_r1", "--system", "gb200_nvl72", "--precision", "nvfp4_fp8kv")


def split_of(at, ffn_gpus, microbatches=3):
    if at.model.is_moe:
        return Split(Sharding(dp_attn=16, ep=16), Sharding(dp_attn=ffn_gpus, ep=ffn_gpus), microbatches)
    return Split(Sharding(tp_attn=4, tp_ffn=4), Sharding(tp_attn=ffn_gpus, tp_ffn=ffn_gpus), microbatches)


@pytest.mark.parametrize("profile", ["ideal", "measured"])
@pytest.mark.parametrize("model", ["deepseek_r1", "llama_3_1_70b", "qwen3_5_397b_a17b"])
@pytest.mark.parametrize("ffn_gpus", [4, 32])
def test_what_a_step_waits_for_adds_up_to_it(model, profile, ffn_gpus):
    at = ds.setup(model, "gb200_nvl72", "nvfp4_fp8kv", profile=profile)
    split = split_of(at, ffn_gpus)
    found = split_parts(at, split, LENGTHS, 48.0)
    ttl = float(split_step(at, at, split, sequences=48.0, context=LENGTHS.context).ttl)
    assert found.parts["waited"].sum() + found.host + found.links == pytest.approx(ttl)
    assert found.links >= -1e-12
    assert (found.parts["waited"] >= 0).all()
    layers = found.layers
    for pool, column in (("attention", "attention"), ("ffn", "ffn")):
        alone = found.parts.loc[found.parts["pool"] == pool, "seconds"].sum()
        ends = found.parts["operator"].isin(["embedding", "head"]) & (found.parts["pool"] == pool)
        whole = (layers["layers"] * layers[column]).sum() + found.parts.loc[ends, "seconds"].sum()
        assert alone == pytest.approx(whole)


def test_the_half_that_sets_the_pace_is_waited_for_m_times_and_the_other_hides():
    """Three micro-batches on few FFN GPUs: experts count three times a micro-batch but in the last layer's end."""
    at = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv", profile="ideal")
    found = split_parts(at, split_of(at, 4), LENGTHS, 512.0)
    parts = found.parts.set_index("operator")
    experts, attention = parts.loc["routed experts"], parts.loc["decode attention"]
    assert experts["waited"] == pytest.approx(3 * experts["seconds"], rel=0.02)
    assert attention["waited"] < 0.2 * attention["seconds"]
    assert float(found.step.attention_idle) > float(found.step.ffn_idle)


def test_halves_on_two_systems_rest_on_fits_of_their_own():
    at, theirs = (ds.setup("deepseek_r1", name, "fp8") for name in ("h200_sxm", "h100_sxm"))
    split = Split(Sharding(dp_attn=8, ep=8), Sharding(dp_attn=32, ep=32), 2)
    found = split_parts(at, split, LENGTHS, 32.0, theirs)
    sources = found.parts.groupby("pool")["source"].agg(" ".join)
    assert "h200_sxm" in sources["attention"]
    assert "h100_sxm" in sources["ffn"]
    assert found.parts["waited"].sum() + found.host + found.links == pytest.approx(float(found.step.ttl))


def test_the_parts_of_encoding_add_up_and_need_their_images():
    step = ds.encode_step(ds.setup("kimi_k2_5", "h200_sxm", "fp8"), images=2, height=1120, width=1120)
    found = encode_parts(step, 1120, 1120)
    assert found.parts["seconds"].sum() == pytest.approx(step.time)
    assert found.parts["share"].sum() == pytest.approx(step.time / step.latency)
    with pytest.raises(InputError, match="are not those of the step"):
        encode_parts(step, 560, 560)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--phase", "attention_ffn", "--dp", "16", "--batch", "3072"), "needs --ffn-gpus"),
        (("--phase", "attention_ffn", "--dp", "16", "--ffn-gpus", "8", "--batch", "100"), "give n times 48"),
        (("--phase", "attention_ffn", "--dp", "16", "--ffn-gpus", "8", "--pp", "2"), "no other degrees"),
        (("--phase", "attention_ffn", "--ffn-gpus", "8", "--json"), "--json: only prefill, decode"),
        (("--phase", "encode"), "needs --images"),
        (("--phase", "encode", "--images", "2x1120x1120"), "deepseek_r1 has no encoder"),
        (("--phase", "decode", "--images", "1x560x560"), "--images: only --phase encode takes it"),
        (("--phase", "decode", "--ffn-gpus", "8"), "--ffn-gpus: only --phase attention_ffn takes it"),
        (("--phase", "atention_ffn"), "did you mean 'attention_ffn'"),
    ],
)
def test_faults_are_one_line(more, said, capsys):
    assert run([*HAND, *more]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
