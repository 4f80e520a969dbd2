"""FLOP and bytes by operator against formulas written out by hand, for every shipped model, to 1e-9."""

import csv
from pathlib import Path

import pytest

from disagg_sim.errors import InputError, UnknownNameError
from disagg_sim.facts.attention import MlaAttention
from disagg_sim.facts.ffn import DenseFfn, MoeFfn
from disagg_sim.facts.load import load_model
from disagg_sim.facts.model import ModelSpec
from disagg_sim.physics.counts import decode_work, prefill_work
from disagg_sim.physics.work import causal_pairs, expected_distinct_experts

COUNTS = Path(__file__).parents[1] / "facts" / "model_counts.csv"
MODELS = {row["name"]: row for row in csv.DictReader(COUNTS.open(encoding="utf-8"))}
EXACT = 1e-9


def every_model(check):
    """Make a check of a model one test of all of them."""

    def test():
        for name in MODELS:
            check(name)

    return test


def pairs_one_by_one(new: int, window: int) -> int:
    """Keys seen by each of ``new`` tokens, counted token by token."""
    return sum(min(position, window) if window else position for position in range(1, new + 1))


def attention_flops_of_prefill(model: ModelSpec, isl: int) -> float:
    total = 0
    for kind in model.layers:
        a = kind.attention
        if isinstance(a, MlaAttention):
            total += 2 * a.q_heads * (a.nope_dim + a.rope_dim + a.value_dim) * pairs_one_by_one(isl, 0)
        else:
            total += 4 * a.q_heads * a.head_dim * pairs_one_by_one(isl, a.window)
    return total


def attention_of_decode(model: ModelSpec, context: int, cache_bytes: float) -> tuple[float, float]:
    """FLOP and cache bytes of one new token. [FLOP], [B]"""
    flops, moved = 0.0, 0.0
    for kind in model.layers:
        a = kind.attention
        if isinstance(a, MlaAttention):
            flops += 2 * a.q_heads * (a.kv_rank + a.rope_dim + a.kv_rank) * context
            moved += (a.kv_rank + a.rope_dim) * cache_bytes * context
        else:
            seen = min(context, a.window) if a.window else context
            flops += 4 * a.q_heads * a.head_dim * seen
            moved += 2 * a.kv_heads * a.head_dim * cache_bytes * seen
    return flops, moved


@every_model
def test_prefill_flops(name):
    """2*S*P_lin + attention + 2*d*V per prompt, P_lin from the table of model counts."""
    for isl in (1, 200, 1000):
        row, model = MODELS[name], load_model(name)
        linear, head = int(row["linear_params_per_token"]), int(row["lm_head_params"])
        expected = 2 * isl * linear + attention_flops_of_prefill(model, isl) + 2 * head
        assert prefill_work(name, isl=isl).flops == pytest.approx(expected, rel=EXACT)
        assert prefill_work(name, isl=isl, batch=3).flops == pytest.approx(3 * expected, rel=EXACT)


@every_model
def test_decode_flops(name):
    """B*(2*P_lin + attention + 2*d*V); MLA works in latent space."""
    row, model = MODELS[name], load_model(name)
    attention, _ = attention_of_decode(model, 3000, 2.0)
    expected = 2 * int(row["linear_params_per_token"]) + attention + 2 * int(row["lm_head_params"])
    assert decode_work(name, context=3000, batch=7).flops == pytest.approx(7 * expected, rel=EXACT)


@every_model
def test_decode_attention_reads_the_cache_once(name):
    model = load_model(name)
    for recipe, size in (("bf16", 2.0), ("fp8", 1.0)):
        _, moved = attention_of_decode(model, 3000, size)
        work = decode_work(name, context=3000, batch=7, precision=recipe)
        assert work["decode attention"].hbm_bytes == pytest.approx(7 * moved, rel=EXACT)
    if not any(getattr(kind.attention, "window", 0) for kind in model.kinds):
        assert moved == 3000 * int(MODELS[name]["kv_bytes_per_token_fp8"])


@every_model
def test_gemm_flops_and_bytes_by_operator(name):
    """Every GEMM [T x a] x [a x c] of the layer in bf16: 2*T*a*c FLOP, 2*(T*a + T*c + a*c) bytes."""
    model = load_model(name)
    shapes: dict[str, list[tuple[int, int]]] = {}

    def add(operator: str, a: int, c: int) -> None:
        shapes.setdefault(operator, []).append((a, c))

    d = model.hidden
    for kind in model.layers:
        attention, ffn = kind.attention, kind.ffn
        if isinstance(attention, MlaAttention):
            add("q_a, kv_a", d, 1536 + 512 + 64)
            add("q_b", 1536, attention.q_heads * 192)
            add("kv_b", 512, attention.q_heads * 256)
            add("o", attention.q_heads * 128, d)
        else:
            add("qkv", d, (attention.q_heads + 2 * attention.kv_heads) * attention.head_dim)
            add("o", attention.q_heads * attention.head_dim, d)
        if isinstance(ffn, DenseFfn):
            gated = ffn.matrices == 3
            add("gate, up" if gated else "up", d, (2 if gated else 1) * ffn.width)
            add("down", ffn.width, d)
            continue
        add("router", d, ffn.experts)
        if ffn.shared_experts:
            add("shared gate, up", d, 2 * ffn.shared_experts * ffn.shared_width)
            add("shared down", ffn.shared_experts * ffn.shared_width, d)
    add("head", d, model.vocab)
    works = ((600, 2, prefill_work(name, isl=300, batch=2)), (12, 12, decode_work(name, context=100, batch=12)))
    for tokens, in_head, work in works:
        for operator, gemms in shapes.items():
            m = in_head if operator == "head" else tokens
            assert work[operator].flops == pytest.approx(sum(2 * m * a * c for a, c in gemms), rel=EXACT)
            moved = sum(2 * (m * a + m * c + a * c) for a, c in gemms)
            assert work[operator].hbm_bytes == pytest.approx(moved, rel=EXACT)


@every_model
def test_routed_experts(name):
    """6*T*k*d*d_e FLOP; weights of the distinct experts that T tokens are expected to hit."""
    model, tokens = load_model(name), 20
    moe = [kind.ffn for kind in model.layers if isinstance(kind.ffn, MoeFfn)]
    work = decode_work(name, context=100, batch=tokens)
    if not moe:
        assert "routed experts" not in {op.name for op in work.operators}
        return
    flops = sum(6 * tokens * f.top_k * model.hidden * f.width for f in moe)
    hit = sum(f.experts * (1 - (1 - f.top_k / f.experts) ** tokens) * 3 * model.hidden * f.width * 2 for f in moe)
    assert work["routed experts"].flops == pytest.approx(flops, rel=EXACT)
    assert work["routed experts"].hbm_bytes == pytest.approx(hit, rel=EXACT)


@every_model
def test_elementwise_and_embedding_bytes(name):
    """Per token and layer 16*d + 6*f_act + 6*(heads or latents); the embedding reads and writes a row of bf16."""
    model, tokens = load_model(name), 9
    per_token = 0
    for kind in model.layers:
        a, f = kind.attention, kind.ffn
        row = 1536 + 512 + 64 if isinstance(a, MlaAttention) else (a.q_heads + 2 * a.kv_heads) * a.head_dim
        active = f.width if isinstance(f, DenseFfn) else f.top_k * f.width + f.shared_experts * f.shared_width
        per_token += 16 * model.hidden + 6 * active + 6 * row
    work = decode_work(name, context=100, batch=tokens)
    assert work["elementwise"].hbm_bytes == pytest.approx(tokens * per_token, rel=EXACT)
    assert work["embedding"].hbm_bytes == pytest.approx(tokens * model.hidden * 4, rel=EXACT)


def test_r1_prefill_by_hand():
    """F(16,384) = 1.170e15 linear + 6.71e14 attention; F(262,144) = 1.90e17, nine tenths attention. 0.3 %: digits."""
    short, long = prefill_work("deepseek_r1", isl=16_384), prefill_work("deepseek_r1", isl=262_144)
    attention = short["prefill attention"].flops
    assert attention == pytest.approx(6.71e14, rel=0.003)
    assert short.flops - attention == pytest.approx(1.170e15, rel=0.003)
    assert long.flops == pytest.approx(1.90e17, rel=0.003)
    assert long["prefill attention"].flops / long.flops == pytest.approx(0.90, abs=0.005)
    # 81,920 FLOP a pair and layer
    assert attention == pytest.approx(61 * 81_920 * 16_384 * 16_385 / 2, rel=EXACT)


@pytest.mark.parametrize("past", [0, 3, 100, 128, 500])
@pytest.mark.parametrize("new", [1, 60, 300])
def test_pairs_after_cached_tokens_count_token_by_token(past, new):
    for window in (0, 128):
        seen = [min(past + i, window) if window else past + i for i in range(1, new + 1)]
        assert causal_pairs(float(new), float(past), window=window) == sum(seen)


@pytest.mark.parametrize(("tokens", "distinct"), [(8, 57.4), (64, 222.4), (256, 255.9)])
def test_expected_distinct_experts_of_r1(tokens, distinct):
    assert round(float(expected_distinct_experts(tokens, 256, 8)), 1) == distinct


def test_a_model_of_one_expert_always_reads_it():
    assert float(expected_distinct_experts(1, 1, 1)) == 1.0


@pytest.mark.parametrize(("form", "extra"), [("naive", 2 * 512 * 128 * 256 * 2000 * 61), ("cached", 0)])
def test_forced_mla_forms_of_decode(form, extra):
    """Naive and cached work on 128 heads of 320; naive up-projects the whole context again for one token."""
    work = decode_work("deepseek_r1", context=2000, mla_form=form)
    attention = work["decode attention"].flops
    again = work["kv_b of the past"].flops if form == "naive" else 0
    assert attention == 61 * 2 * 128 * 320 * 2000
    assert again == extra


def test_work_tells_itself_as_a_table():
    table = prefill_work("llama_3_1_8b", isl=10).to_frame()
    assert list(table.columns) == ["operator", "flops", "hbm_bytes"]
    assert table["flops"].sum() == pytest.approx(prefill_work("llama_3_1_8b", isl=10).flops)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"isl": 0}, "isl 0 is out of range; allowed: whole numbers from 1"),
        ({"mla_form": "naiv"}, "mla_form 'naiv' is unknown, did you mean 'naive'"),
    ],
)
def test_arguments_of_a_prefill_out_of_range_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        prefill_work(**({"model": "deepseek_r1", "isl": 10} | change))


def test_an_unknown_operator_is_refused_with_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown operator 'decode atention', did you mean 'decode attention'"):
        decode_work("llama_3_1_8b", context=10)["decode atention"]
