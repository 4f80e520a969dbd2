"""Attention kernels: cases derived by hand, counts of a toy that computes, limits, and what may never happen."""

import ast
import dataclasses
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pytest

import disagg_sim
from disagg_sim.domain import Sharding
from disagg_sim.facts.kinds import ATTENTION_KINDS, FFN_KINDS, AttentionSpec, register
from disagg_sim.facts.schema import Range
from disagg_sim.facts.yaml_files import spec_files
from disagg_sim.physics.attention import AttentionRate, decode_attention_cost, prefill_attention_cost
from disagg_sim.physics.blocks import ATTENTION
from disagg_sim.physics.blocks.base import FFN, AttentionBlock, attention
from disagg_sim.physics.blocks.gqa import gqa_decode_work, gqa_prefill_work
from disagg_sim.physics.blocks.mla import MlaDims, absorbed_shape, expanded_shape, mla_work
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.rates import SOFTMAX
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import AttentionShape, Operator, Work, gemm
from disagg_sim.units import TERA, US

PREFILL = AttentionRate(1e15, 2e12, 10 * US, s_half=128.0, multiprocessors=100, io_bandwidth=1e12, tail=0.4)
DECODE = AttentionRate(
    1e15, 2e12, 10 * US, multiprocessors=100, block_time=2 * US, serial_time=3 * US, serial_power=0.5, ramp=4 * US
)


def prefill(rate=PREFILL, *, sequences=1.0, new=1024.0, past=0.0, q_heads=8.0, kv_heads=2.0, window=0.0):
    sizes = {"sequences": sequences, "new": new, "past": past, "q_heads": q_heads, "kv_heads": kv_heads}
    work = gqa_prefill_work(**sizes, head_dim=128, window=window, cache_bytes=2)
    held = gqa_decode_work(
        sequences=sequences,
        context=past,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=128,
        window=window,
        cache_bytes=2,
    ).hbm_bytes
    shape = AttentionShape(sequences, new, past, q_heads, kv_heads, 128, held, window)
    return prefill_attention_cost(work, shape, work.flops / (sequences * q_heads * 256 * new), rate).time


def decode(rate=DECODE, *, sequences=8.0, context=4096.0, q_heads=32.0, kv_heads=8.0, cache_bytes=2):
    work = gqa_decode_work(
        sequences=sequences,
        context=context,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=128,
        window=0.0,
        cache_bytes=cache_bytes,
    )
    return decode_attention_cost(work, AttentionShape(sequences, 1.0, context - 1, q_heads, kv_heads, 128), rate).time


def test_a_prefill_by_hand():
    """2.1496 GFLOP at 1 PFLOP/s and 1 + 128/1025: 2.418 us; 10240 rows of 512 B at 1 TB/s: 5.243 us.

    The longest block multiplies 128 rows with 1024 keys, 67.1 MFLOP at 10 TFLOP/s: 6.711 us, 0.4 of which shows.
    """
    assert prefill() == pytest.approx(20.345 * US, rel=1e-4)


def test_a_lone_long_prompt_of_few_heads_takes_as_long_as_its_longest_block():
    balanced = dataclasses.replace(PREFILL, tail=0.0)
    longest = 128 * 512 * 8192 / 1e13
    assert prefill(balanced, new=8192.0, q_heads=1.0, kv_heads=1.0) == pytest.approx(10 * US + longest, rel=1e-12)


@pytest.mark.parametrize(
    ("arithmetic", "heads", "tflops", "others", "tflops_of_others"),
    [
        ("bf16", 64, 497, 128, 648),  # FlashAttention-3 on an H100, 16k tokens (arXiv:2407.08608, figure 5)
        ("fp8", 64, 613, 256, 1171),  # the same (figure 7); no share was set by it
        ("bf16", 64, 1225, 128, 1613),  # FlashAttention-4 on a B200 (pull request 2605; its paper); nor by this
    ],
)
def test_small_heads_take_longer_than_their_multiplies_tell(arithmetic, heads, tflops, others, tflops_of_others):
    """Time of a score goes as 4*h FLOP over the published FLOP/s."""

    def of_a_score(head_dim):
        shape = AttentionShape(1.0, 65536.0, 0.0, 32.0, 32.0, head_dim)
        work = Work(4.0 * 32 * head_dim * 65536.0**2 / 2, 0.0)
        rate = replace(PREFILL, softmax=SOFTMAX[arithmetic], io_bandwidth=np.inf)
        return prefill_attention_cost(work, shape, 65536.0, rate).time

    published = (heads / tflops) / (others / tflops_of_others)
    assert of_a_score(heads) / of_a_score(others) == pytest.approx(published, rel=0.02)


def test_a_decode_by_hand():
    """134.2 MB of cache and 0.13 MB of queries and outputs at 2 TB/s: 67.17 us; 64 blocks of 2 us on 100: 1.28 us.

    4096 keys: 3 us * 4**0.5 = 6 us; the ramp 4 us * 134.2/174.2 = 3.082 us. Multiplying 16 rows for 4: 2.1 us, hidden.
    """
    assert decode() == pytest.approx((10 + 3.0816 + np.sqrt(67.1744**2 + 1.28**2 + 6.0**2)) * US, rel=1e-5)


def test_without_tiles_and_blocks_both_are_the_plain_roofline():
    plain = AttentionRate(1e15, 2e12, 10 * US, s_half=500.0)
    flops = 4 * 128 * 8 * 1024 * 1025 / 2
    assert prefill(plain) == pytest.approx(10 * US + flops / 1e15 * (1 + 500 / 1025), rel=1e-12)
    assert decode(plain) == pytest.approx(10 * US + 134217728 / 2e12, rel=1e-12)


#: A key takes a block of 128 rows 65536 FLOP, 6.5536 ns at 1/100 of 1 PFLOP/s.
KEY = 4 * 128 * 128 / 1e13
ALONE = AttentionRate(1e15, np.inf, 0.0, s_half=128.0, multiprocessors=100, io_bandwidth=np.inf)
SHARED = replace(ALONE, splits_keys=True)


def new_part(new):
    """Keys that a multiprocessor walks for 8 heads of new tokens alone: S(S+1)/2 pairs, tiles on the diagonal whole."""
    return 8 * new * (new + 1 + 128) / 2 / 128 / 100


def test_blocks_on_a_past_run_in_whole_rounds():
    """8 heads of 12 tiles are 96 blocks on 100 multiprocessors, one round; of 13 tiles 104, two rounds of the past."""
    one, two = (prefill(ALONE, new=128.0 * tiles, past=1e6) for tiles in (12, 13))
    assert one == pytest.approx((1e6 + 12 * 128) * KEY, rel=1e-9)
    assert two == pytest.approx((2e6 + new_part(13 * 128)) * KEY, rel=1e-9)


def test_a_tail_is_that_of_the_new_keys():
    """Blocks pass a past in whole rounds; what sticks out at the end of a grid comes of their unequal new keys."""
    times = [prefill(replace(ALONE, tail=tail), new=1664.0, past=1e6) for tail in (0.0, 0.4)]
    assert times[1] - times[0] == pytest.approx(0.4 * 1664 * KEY, rel=1e-6)


def test_few_tokens_on_a_past_take_as_long_as_a_tile():
    assert prefill(ALONE, new=1.0, past=99_999.0) == pytest.approx(100_000 * KEY, rel=1e-12)
    assert prefill(ALONE, new=128.0, past=99_872.0) == pytest.approx(100_000 * KEY, rel=1e-12)


@pytest.mark.parametrize(
    ("new", "blocks", "parts", "rounds"),
    [
        (32, 1000, 46, 1),  # 4 heads share a tile: 2 tiles on 100 multiprocessors, 1000/ceil(22) parts
        (128, 1000, 12, 1),  # 8 tiles: 1000/ceil(88)
        (640, 1000, 3, 2),  # 40 tiles: 1000/ceil(440); 120 blocks are two rounds
        (1248, 1000, 2, 2),  # 78 tiles: 1000/ceil(858)
        (1280, 1000, 1, 1),  # 80 tiles fill 0.8 of them
        (32, 40, 40, 1),  # 2 tiles of 40: a multiprocessor for each
    ],
)
def test_keys_are_split_over_the_multiprocessors_that_tiles_leave_idle(new, blocks, parts, rounds):
    """2 KV heads of 4 query heads on blocks of 128 keys."""
    held = 128.0 * blocks
    time = prefill(SHARED, new=float(new), past=held - new)
    keys = max(held / parts, rounds * (held - new) / parts + new_part(new))
    assert time == pytest.approx(keys * KEY, rel=1e-9)


@pytest.mark.parametrize(("new", "parts", "rounds"), [(64, 23, 1), (1248, 2, 2)])
def test_partial_outputs_are_written_and_read(new, parts, rounds):
    """4 or 78 tiles of 100,000 keys: 64 tokens of 8 heads of 128 elements are 524288 B a part, written and read."""
    moved = replace(SHARED, io_bandwidth=1e12)
    exchange = (10 * 512 + parts * 8 * 128 * 8) * new / 1e12
    computed = (rounds * 100_000 / parts + new_part(new)) * KEY
    assert prefill(moved, new=float(new), past=100_000.0) == pytest.approx(computed + exchange, rel=1e-9)


def test_a_window_bounds_the_longest_block_and_the_serial_time():
    wide, narrow = (AttentionShape(1.0, 512.0, 7680.0, 8.0, 8.0, 128, 0.0, window) for window in (0.0, 1024.0))
    assert (wide.longest, narrow.longest) == (8192.0, 1024.0)
    assert (wide.shortest, narrow.shortest) == (7680.0, 1024.0)


def test_no_tokens_take_the_launch_alone():
    nothing = AttentionShape(0.0, 512.0, 0.0, 8.0, 2.0, 128)
    assert prefill_attention_cost(Work(0.0, 0.0), nothing, 513.0, PREFILL).time == PREFILL.t0


def test_a_form_that_is_ruled_out_takes_forever_and_leaves_its_sums_without_nan():
    """The absorbed form of a prompt without a past multiplies for ever, so that the naive one is the cheaper."""
    cost = decode_attention_cost(Work(np.inf, 1e6), AttentionShape(1.0, 512.0, 0.0, 16.0, 1.0, 544), DECODE)
    assert np.isinf(cost.time)
    assert not np.isnan(cost.sums).any()


@pytest.mark.parametrize("heads", [8.0, 128.0])
@pytest.mark.parametrize(("form", "shape_of"), [("cached", expanded_shape), ("absorbed", absorbed_shape)])
def test_a_query_key_pair_of_latent_attention_costs_four_flop_an_element(form, shape_of, heads):
    dims = MlaDims(heads, 512, 128, 64, 128, 1.0)
    shape = shape_of(dims, 4.0, 300.0, 0.0)
    flops = mla_work(form, dims, sequences=4.0, new=300.0, past=0.0).flops
    assert 4 * shape.q_heads * shape.head_dim * 4 * 300 * 301 / 2 == pytest.approx(flops, rel=1e-12)


def test_blackwell_blocks_take_two_tiles_of_128_rows():
    rates = [setup("llama_3_1_70b", name, "bf16").rates for name in ("a100_sxm_80gb", "h100_sxm", "b200_sxm")]
    assert [rate.prefill_attention["gqa"].s_half for rate in rates] == [128.0, 128.0, 256.0]


def one_call(
    rate: AttentionRate, cache: float = 1.0, flops: float = 0.0, group: float = 1.0, keys: float = 1.0, new: float = 1.0
) -> float:
    """One sequence of ``group`` query heads on one KV head. [s]"""
    shape = AttentionShape(1.0, new, keys - 1, group, 1.0, 128)
    return float(decode_attention_cost(Work(flops, cache), shape, rate).time)


FREE = AttentionRate(np.inf, np.inf, 0.0, multiprocessors=1.0)


@pytest.mark.parametrize(("group", "filled"), [(1, 16), (16, 16), (17, 32), (24, 32), (32, 32), (33, 48)])
def test_query_rows_of_a_decode_are_multiplied_in_tiles_of_16(group, filled):
    """1 GFLOP at 1 TFLOP/s is 1 ms; a KV head with 24 query heads multiplies 32 rows: 1.333 ms."""
    slow = replace(FREE, flops=1e12)
    assert one_call(slow, flops=1e9, group=float(group)) == pytest.approx(1e-3 * filled / group, rel=1e-12)


@pytest.mark.parametrize(
    ("group", "new", "blocks"), [(1, 1, 1), (64, 1, 1), (65, 1, 2), (128, 1, 2), (129, 1, 3), (32, 4, 2)]
)
def test_a_block_of_a_decode_takes_64_query_rows(group, new, blocks):
    """Of each new token its heads: 32 that verify three drafts are 128."""
    time = one_call(replace(FREE, block_time=3 * US), group=float(group), new=float(new))
    assert time == pytest.approx(blocks * 3 * US, rel=1e-12)


def test_half_of_the_ramp_is_paid_at_a_cache_of_40_megabytes():
    assert one_call(replace(FREE, ramp=10 * US), cache=40e6) == pytest.approx(5 * US, rel=1e-12)
    assert one_call(replace(FREE, ramp=10 * US), cache=120e6) == pytest.approx(7.5 * US, rel=1e-12)


def test_the_serial_time_is_that_of_1024_keys_and_grows_with_a_power_of_them():
    """0.45 under split KV: 4,096 keys take 4^0.45 = 1.866 times as long."""
    rate = replace(FREE, serial_time=2 * US)
    assert rate.serial_power == 0.45
    assert one_call(rate, keys=1024.0) == pytest.approx(2 * US, rel=1e-12)
    assert one_call(rate, keys=4096.0) == pytest.approx(2 * 1.866066 * US, rel=1e-6)


def test_a_cache_that_l2_holds_is_read_four_times_as_fast():
    """Half of a cache of the resident size counts a quarter: 0.625; of one half as large 1/257 counts whole: 0.2529."""
    rate = replace(FREE, bandwidth=1e12, resident=30e6)
    queries = 512.0  # bytes of one query and output row of 128
    assert one_call(rate, cache=30e6) == pytest.approx((0.625 * 30e6 + queries) / 1e12, rel=1e-12)
    share = 1 / 257 + 256 / 257 / 4
    assert one_call(rate, cache=15e6) == pytest.approx((share * 15e6 + queries) / 1e12, rel=1e-12)


def test_a_prompt_of_one_token_moves_four_tenths_of_a_tile_of_queries():
    """8 query heads of 0.4*128 rows and 2 KV heads of one row, 512 B each at 1 TB/s."""
    rate = AttentionRate(np.inf, np.inf, 0.0, 128.0, multiprocessors=100.0, io_bandwidth=1e12)
    assert prefill(rate, new=1.0) == pytest.approx((8 * 51.2 + 2) * 512 / 1e12, rel=1e-12)


HEADS, SIZE, PEAK, HBM = 16, 128, 989.5 * TERA, 3.35 * TERA  # of the toy; of an H100 in bf16 [FLOP/s, B/s]

STATE = HEADS * SIZE * SIZE  # of a sequence and layer [B]


# The spec of the kind: one key of a model's file.
@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention(AttentionSpec):
    kind: ClassVar[str] = "linear"
    heads: Annotated[int, Range(1, 10**6)]
    key_dim: Annotated[int, Range(1, 10**6)]
    value_dim: Annotated[int, Range(1, 10**6)]

    def matmul_params(self, hidden: int) -> int:
        return hidden * self.heads * (2 * self.key_dim + 2 * self.value_dim)

    @property
    def state_bytes(self) -> float:
        return float(self.heads * self.key_dim * self.value_dim)

    @property
    def cache_parts(self) -> int:
        return self.heads


# The block of the kind: one class.
class Linear(AttentionBlock[LinearAttention]):
    def projections(self, model, precision, tp, tokens):
        s, fmt, heads = self.spec, precision.projection("linear"), self.spec.heads / tp
        qkv = gemm("qkv", tokens, heads * (2 * s.key_dim + s.value_dim), model.hidden, fmt)
        return [qkv, gemm("o", tokens, model.hidden, heads * s.value_dim, fmt)]

    def _update(self, name, kind, precision, tp, sequences, new):
        s, heads = self.spec, self.spec.heads / tp
        work = Work(sequences * new * (4 * heads * s.key_dim * s.value_dim), sequences * (2 * self.state_bytes(tp)))
        shape = AttentionShape(sequences, new, 0.0, heads, heads, s.key_dim)
        return ([Operator(name, kind, work, keys=1.0, attention=shape, table="linear")],)

    def prefill(self, precision, tp, tokens, form):
        return self._update("prefill attention", "prefill_attention", precision, tp, tokens.prompts, tokens.new)

    def decode(self, precision, tp, tokens, form):
        return self._update("decode attention", "decode_attention", precision, tp, tokens.decodes, 1.0)

    def matmul_params(self, hidden, tp):
        return self.spec.matmul_params(hidden) / tp

    def activation_width(self, tp):
        return self.spec.heads * (2 * self.spec.key_dim + self.spec.value_dim) / tp

    def elementwise_width(self, tp):
        return self.activation_width(tp)

    def rejects(self, tp):
        return f"tp_attn does not divide {self.spec.heads} linear heads" if self.spec.heads % tp else None


# Its kernel table: rows of fits.
FITS = {
    "prefill_attention:\n": "{engine: trtllm, version: toy, kind: linear, compute: fp8, cache: fp8, e_compute: 0.5, "
    "t0: 7 us, points: 9, median_error: 0.1, p90_error: 0.2}",
    "decode_attention:\n": "{engine: trtllm, version: toy, kind: linear, cache: fp8, e_memory: 0.8, t0: 3 us, "
    "points: 9, median_error: 0.1, p90_error: 0.2}",
}

BLOCKS = {
    "gqa": "{kind: gqa, q_heads: 32, kv_heads: 8, head_dim: 128}",
    "mla": "{kind: mla, q_heads: 32, q_rank: 512, kv_rank: 512, nope_dim: 128, rope_dim: 64, value_dim: 128}",
    "linear": f"{{kind: linear, heads: {HEADS}, key_dim: {SIZE}, value_dim: {SIZE}}}",
}


@pytest.fixture
def own_files(tmp_path, monkeypatch):
    """A directory of the user's own with models of such layers, and a system with the fits of the toy."""
    monkeypatch.setitem(ATTENTION_KINDS, "linear", None)
    register(LinearAttention)
    monkeypatch.setitem(ATTENTION, "linear", None)
    attention("linear")(Linear)
    (tmp_path / "models").mkdir()
    (tmp_path / "hw_specs" / "efficiency").mkdir(parents=True)
    fits = spec_files("efficiency")["h100_sxm"].read_text(encoding="utf-8")
    for section, row in FITS.items():
        fits = fits.replace(f"\n{section}", f"\n{section}  - {row}\n")
    (tmp_path / "hw_specs" / "efficiency" / "h100_sxm.yaml").write_text(fits, encoding="utf-8")
    monkeypatch.setenv("DISAGG_SIM_PATH", str(tmp_path))
    return tmp_path


def model_with(folder: Path, name: str, **layers: int) -> str:
    """Llama-3.1-8B with so many layers of each kind of attention."""
    text = spec_files("model")["llama_3_1_8b"].read_text(encoding="utf-8")
    head, _, rest = text.partition("attention:\n")
    blocks = "".join(f"  {kind}: {BLOCKS[kind]}\n" for kind in layers)
    runs = "".join(f"  - {{count: {n}, attention: {kind}, ffn: dense}}\n" for kind, n in layers.items())
    ffn = rest[rest.index("ffn:") : rest.index("layers:")]
    source = rest[rest.index("source:") :]
    path = folder / "models" / f"{name}.yaml"
    path.write_text(f"{head}attention:\n{blocks}{ffn}layers:\n{runs}{source}", encoding="utf-8")
    return name


def at_of(name: str):
    return replace(setup(name, "h100_sxm", "fp8", engine="trtllm"), overheads=None)


def times(at) -> np.ndarray:
    """Seconds of a decode step, a prefill, a prefill in chunks and a mixed step, without host work."""
    cut = Sharding(tp_attn=2.0, tp_ffn=2.0)
    found = (
        decode_step(at, cut, batch=64.0, context=5000.0).ttl,
        prefill_pass(at, cut, batch=2.0, isl=3000.0).ftl,
        chunked_prefill_pass(at, cut, batch=1.0, isl=3000.0, chunk_tokens=1000.0).ftl,
        mixed_step(at, cut, batch=64.0, context=5000.0, chunk=Chunk(512.0, 3000.0)).time,
    )
    return np.array([float(each) for each in found]) - at.profile.host


@pytest.mark.parametrize("other", ["mla", "linear"])
def test_every_layer_is_timed_by_the_fits_of_its_own_kind(own_files, other):
    """The ends of the model are in all three: ``T(8 of one, 24 of the other) = T(one)/4 + 3/4*T(other)``."""
    one, two = (at_of(model_with(own_files, f"all_{kind}", **{kind: 32})) for kind in ("gqa", other))
    mixed = at_of(model_with(own_files, f"mixed_{other}", **{"gqa": 8, other: 24}))
    assert set(mixed.rates.prefill_attention) == {"gqa", other}
    assert mixed.rates.decode_attention[other] == two.rates.decode_attention[other]
    assert times(mixed) == pytest.approx((8 * times(one) + 24 * times(two)) / 32, rel=1e-12)


def test_operators_of_the_toy_take_what_its_fits_say(own_files):
    """By hand: decode moves the state twice at 0.8 of HBM; prefill multiplies 4*16*128*128 a token at half the peak."""
    at = at_of(model_with(own_files, "all_linear", linear=32))
    alone = replace(at, rates=replace(at.rates, adjust=lambda op, cost: cost * float(op.table == "linear")))
    moved = 64 * 2 * STATE * 1.0  # one byte an element in fp8
    for context in (100.0, 100_000.0):  # a state has no length
        step = float(decode_step(alone, Sharding(), batch=64.0, context=context).ttl) - at.profile.host
        assert step == pytest.approx(32 * (3 * US + moved / (0.8 * HBM)), rel=1e-9)
    flops = 5 * 3000 * 4 * STATE
    first = float(prefill_pass(alone, Sharding(), batch=5.0, isl=3000.0).ftl) - at.profile.host
    assert first == pytest.approx(32 * (7 * US + flops / (0.5 * PEAK)), rel=1e-3)  # the peak has three digits


def test_a_recipe_that_names_kinds_is_rejected_for_another(own_files):
    with pytest.raises(disagg_sim.DisaggSimError, match="gives no attention_projection for attention of kind 'linear'"):
        setup(model_with(own_files, "all_linear", linear=32), "b200_sxm", "nvfp4_fp8kv")


SPECS = {spec.__name__ for spec in (*ATTENTION_KINDS.values(), *FFN_KINDS.values())}

BLOCK_CLASSES = {block.__name__ for block in (*ATTENTION.values(), *FFN.values())}

#: Models, whose layers may lack a part.
KNOW_KINDS = {"disagg_sim/facts/model.py"}


def test_three_places_make_a_kind_and_nothing_else_asks_for_one():
    """A spec with its keys, a block, a kernel table: no other module of the package names the class of a kind."""
    root = Path(disagg_sim.__file__).parents[1]
    named = {
        path.relative_to(root).as_posix()
        for tree in ("disagg_sim", "lab")
        for path in (root / tree).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id in SPECS | BLOCK_CLASSES
    }
    assert {name for name in named if not name.startswith("disagg_sim/physics/blocks/")} <= KNOW_KINDS
    assert (len(FITS), Linear.__mro__[1], LinearAttention.__mro__[1]) == (2, AttentionBlock, AttentionSpec)
