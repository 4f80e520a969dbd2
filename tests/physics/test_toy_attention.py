"""Kinds of attention mix in a model, even one that the package does not know.

Linear attention keeps a matrix of ``key_dim x value_dim`` a head and sequence, and no cache. It is added through what
the package offers to everybody: a spec whose keys are registered, a block, and rows of fits in files of the user's own.
"""

import ast
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
from disagg_sim.physics.blocks import ATTENTION
from disagg_sim.physics.blocks.base import FFN, AttentionBlock, attention
from disagg_sim.physics.passes.chunked import chunked_prefill_pass
from disagg_sim.physics.passes.decode import decode_step
from disagg_sim.physics.passes.mixed import Chunk, mixed_step
from disagg_sim.physics.passes.prefill import prefill_pass
from disagg_sim.physics.setup import setup
from disagg_sim.physics.work import AttentionShape, Operator, Work, gemm
from disagg_sim.units import TERA, US

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
