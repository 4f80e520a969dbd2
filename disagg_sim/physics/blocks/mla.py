"""Multi-head latent attention (DeepSeek-V2/V3) in its forms. Physics page, section 2 (MLA).

``naive`` up-projects the past again, ``absorbed`` works in latent space, ``cached`` kept the up-projected past in
memory; "auto" takes the cheaper of naive and absorbed at every point.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np

from disagg_sim.facts.attention import LatentAttention, MlaAttention
from disagg_sim.facts.efficiency import LATENT_HEADS
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import BF16, Precision
from disagg_sim.physics.blocks.base import AttentionBlock, attention
from disagg_sim.physics.work import (
    ACTIVATION_BYTES,
    AttentionShape,
    Numeric,
    Operator,
    Tokens,
    Work,
    causal_pairs,
    gemm,
)

S = TypeVar("S", bound=LatentAttention)

MLA_FORMS = ("auto", "naive", "absorbed", "cached")


class MlaDims(NamedTuple):
    """Sizes of multi-head latent attention on one GPU."""

    heads: Numeric  # query heads after sharding [1]
    kv_rank: int
    nope: int
    rope: int
    value: int
    cache_bytes: float  # per cached element [B]

    @property
    def latent(self) -> int:
        """Cached elements of a token and layer. [1]"""
        return self.kv_rank + self.rope

    @property
    def up_projected(self) -> Numeric:
        """Elements of the up-projected keys and values of a token and layer. [1]"""
        return self.heads * (self.nope + self.rope + self.value)


def mla_work(form: str, dims: MlaDims, *, sequences: Numeric, new: Numeric, past: Numeric) -> Work:
    """Count latent attention of ``new`` tokens after ``past`` ones, per layer and GPU, in one of its forms.

    ``naive`` up-projects the past again: ``2*n_q*(d_n+d_r+d_v)*pairs + 2*C*r_kv*n_q*(d_n+d_v)`` FLOP;
    ``cached`` keeps the up-projected past in memory and re-reads it; ``absorbed`` works in latent
    space: ``2*n_q*((r_kv+d_r)+r_kv)*pairs``. Up-projecting the NEW tokens is the ``kv_b`` GEMM of
    the layer and not counted here. Source: physics page, section 2 (MLA).

    Parameters
    ----------
    form
        ``naive``, ``absorbed`` or ``cached``; ``ValueError`` at any other.
    dims
        Sizes on one GPU.
    sequences
        Of the call. [1]
    new, past
        Query tokens of each, and cached tokens before them. [token]

    Returns
    -------
    Work
        Of one layer, of the broadcast shape of the counts.

    Examples
    --------
    One token of DeepSeek-R1 against 1000 keys, absorbed: 1000*2*128*(576 + 512) FLOP; up-projecting the past first
    takes 120 times as many:

    >>> dims = MlaDims(heads=128, kv_rank=512, nope=128, rope=64, value=128, cache_bytes=1)
    >>> flops = [mla_work(form, dims, sequences=1, new=1, past=999).flops for form in ("absorbed", "naive")]
    >>> f"{flops[0] / 1e6:.0f} MFLOP, {flops[1] / flops[0]:.0f}"
    '279 MFLOP, 121'
    """
    pairs = causal_pairs(new, past)
    latent_traffic = (past + 2 * new) * (dims.latent * dims.cache_bytes)
    if form == "absorbed":
        return Work(sequences * pairs * (2 * dims.heads * (dims.latent + dims.kv_rank)), sequences * latent_traffic)
    flops = pairs * (2 * dims.heads * (dims.nope + dims.rope + dims.value))
    if form == "naive":
        flops = flops + past * (2 * dims.kv_rank * dims.heads * (dims.nope + dims.value))
        return Work(sequences * flops, sequences * latent_traffic)
    if form == "cached":
        traffic = (past + 2 * new) * (dims.up_projected * dims.cache_bytes) + new * dims.latent * dims.cache_bytes
        return Work(sequences * flops, sequences * traffic)
    raise ValueError(f"no MLA form {form!r}")


def expanded_shape(dims: MlaDims, sequences: Numeric, new: Numeric, past: Numeric) -> AttentionShape:
    """Size latent attention with up-projected keys and values: every query head has its own. [token]"""
    size = (dims.nope + dims.rope + dims.value) / 2.0
    held = sequences * past * (dims.up_projected * dims.cache_bytes)
    return AttentionShape(sequences, new, past, dims.heads, dims.heads, size, held)


def absorbed_shape(dims: MlaDims, sequences: Numeric, new: Numeric, past: Numeric) -> AttentionShape:
    """Size latent attention in latent space: all query heads share one key, whose front is the value. [token]"""
    return AttentionShape(sequences, new, past, dims.heads, 1.0, (dims.latent + dims.kv_rank) / 2.0)


def absorbed_product(name: str, tokens: Numeric, heads: Numeric, inner: Numeric, outer: Numeric) -> Operator:
    """Multiply ``tokens`` rows by a matrix [inner, outer] of each head.

    In bf16, to which libraries convert the weights, and timed as one GEMM of all heads; the activations of every head
    are its own.

    64 tokens from 128 elements of a query to the latent of 512, in 16 heads: 2*64*16*128*512 FLOP.

    >>> work = absorbed_product("q to latent", 64, 16, 128, 512).work
    >>> f"{work.flops / 1e6:.0f} MFLOP"
    '134 MFLOP'
    """
    moved = heads * ACTIVATION_BYTES * (inner * outer + tokens * (inner + outer))
    work = Work(tokens * (2.0 * heads * inner * outer), moved)
    return Operator(name, "gemm", work, BF16.name, shape=(tokens, heads * outer, inner))


class LatentBlock(AttentionBlock[S]):
    """Projections through latents, the KV latent whole on every TP rank; query heads are sharded."""

    launches = 20

    def dims(self, tp: Numeric, cache_bytes: float) -> MlaDims:
        """Sizes on one of ``tp`` GPUs; the latent is not sharded."""
        s = self.spec
        return MlaDims(s.q_heads / tp, s.kv_rank, s.nope_dim, s.rope_dim, s.value_dim, cache_bytes)

    def projections(self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
        s, d, fmt = self.spec, model.hidden, precision.projection(self.spec.kind)
        heads = s.q_heads / tp
        queries = heads * (s.nope_dim + s.rope_dim)
        first = [  # latents are replicated over tp
            gemm("q_a, kv_a", tokens, s.q_rank + s.kv_rank + s.rope_dim, d, fmt),
            gemm("q_b", tokens, queries, s.q_rank, fmt),
        ]
        if not s.q_rank:
            first = [gemm("q, kv_a", tokens, queries + s.kv_rank + s.rope_dim, d, fmt)]
        if s.output_gate:
            first.append(gemm("gate", tokens, heads * s.value_dim, d, fmt))
        return [
            *first,
            # naive: up-projects the new tokens; absorbed: folds W_kv_b into q and out of the values
            gemm("kv_b", tokens, heads * (s.nope_dim + s.value_dim), s.kv_rank, fmt),
            gemm("o", tokens, d, heads * s.value_dim, fmt),
        ]

    def served_projections(
        self, model: ModelSpec, precision: Precision, tp: Numeric, tokens: Numeric, absorbed: Numeric
    ) -> list[Operator]:
        """As the base says: absorbed tokens pass W_kv_b as two batched products in bf16, head by head."""
        operators = self.projections(model, precision, tp, tokens)
        if not np.any(np.asarray(absorbed) > 0):
            return operators
        s, kept = self.spec, [op for op in operators if op.name != "kv_b"]
        heads, others = s.q_heads / tp, tokens - absorbed
        if np.any(np.asarray(others) > 0):
            fmt = precision.projection(s.kind)
            expanded = gemm("kv_b", others, heads * (s.nope_dim + s.value_dim), s.kv_rank, fmt)
            kept.append(expanded._replace(runs=np.where(others > 0, 1.0, 0.0)))
        into = absorbed_product("kv_b into q", absorbed, heads, s.nope_dim, s.kv_rank)
        return [*kept, into, absorbed_product("kv_b out of values", absorbed, heads, s.kv_rank, s.value_dim)]

    def matmul_params(self, hidden: int, tp: Numeric) -> Numeric:
        replicated = hidden * (self.spec.q_rank + self.spec.kv_rank + self.spec.rope_dim)
        return replicated + (self.spec.matmul_params(hidden) - replicated) / tp

    def outward_params(self, hidden: int) -> int:
        return self.spec.q_heads * self.spec.value_dim * (hidden + self.spec.kv_rank)

    def activation_width(self, tp: Numeric) -> Numeric:
        s = self.spec
        return s.q_heads * (2 * (s.nope_dim + s.rope_dim) + s.value_dim) / tp

    def elementwise_width(self, tp: Numeric) -> Numeric:
        return self.spec.q_rank + self.spec.kv_rank + self.spec.rope_dim

    def rejects(self, tp: int) -> str | None:
        return f"tp_attn does not divide {self.spec.q_heads} query heads" if self.spec.q_heads % tp else None

    @staticmethod
    def sizes(shape: AttentionShape) -> dict[str, Numeric]:
        return dict(zip(LATENT_HEADS, (shape.q_heads,), strict=True))


@attention("mla")
class Mla(LatentBlock[MlaAttention]):
    """One latent of ``kv_rank + rope_dim`` is cached, whole on every TP rank; query heads are sharded."""

    forms = MLA_FORMS

    def _again(self, precision: Precision, dims: MlaDims, tokens: Numeric) -> Operator:
        """Up-projection of cached tokens."""
        columns = dims.heads * (dims.nope + dims.value)
        return gemm("kv_b of the past", tokens, columns, dims.kv_rank, precision.projection(self.spec.kind))

    def prefill(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As the base says. With nothing cached it is up-projected unless ``absorbed`` is forced."""
        name, dims = "prefill attention", self.dims(tp, precision.cache.bytes)
        prompts, new, past = tokens.prompts, tokens.new, tokens.past
        expanded = mla_work("cached", dims, sequences=prompts, new=new, past=past)
        shape, keys = expanded_shape(dims, prompts, new, past), 2.0 * past + new
        cached = [Operator(name, "prefill_attention", expanded, keys=keys, attention=shape, table="mla")]
        if form == "cached" or (np.ndim(past) == 0 and past == 0.0 and form != "absorbed"):
            if np.any(np.asarray(tokens.latent) > 0):
                first = self._again(precision, dims, prompts * tokens.latent)
                cached.append(first._replace(runs=np.where(np.asarray(tokens.latent) > 0, 1.0, 0.0)))
            return (cached,)
        again = self._again(precision, dims, prompts * (past if tokens.projected is None else tokens.projected))
        again = again._replace(runs=np.where(np.asarray(past) > 0, 1.0, 0.0))
        latent = mla_work("absorbed", dims, sequences=prompts, new=new, past=past)
        if form == "auto":
            latent = Work(np.where(np.asarray(past) > 0, latent.flops, np.inf), latent.hbm_bytes)
        shape = absorbed_shape(dims, prompts, new, past)
        absorbed = [Operator(name, "decode_attention", latent, attention=shape, table="mla")]
        return {"naive": ([*cached, again],), "absorbed": (absorbed,), "auto": ([*cached, again], absorbed)}[form]

    def decode(self, precision: Precision, tp: Numeric, tokens: Tokens, form: str) -> tuple[list[Operator], ...]:
        """As the base says. MLA is absorbed unless another form is forced."""
        dims = self.dims(tp, precision.cache.bytes)
        # One new token over ctx cached ones: ctx pairs, hence a past of ctx - 1 (causal_pairs adds the token itself).
        past, queries = tokens.context - 1.0, tokens.queries
        chosen = "absorbed" if form in ("auto", "absorbed") else "cached"
        work = mla_work(chosen, dims, sequences=tokens.decodes, new=queries, past=past)
        if chosen == "absorbed":  # read the latent of every cached position once
            read = tokens.context + (queries - 1.0)
            work = Work(work.flops, tokens.decodes * read * (dims.latent * dims.cache_bytes))
        shape = (absorbed_shape if chosen == "absorbed" else expanded_shape)(dims, tokens.decodes, queries, past)
        operators = [Operator("decode attention", "decode_attention", work, attention=shape, table="mla")]
        if form == "naive":
            operators.append(self._again(precision, dims, tokens.decodes * tokens.context))
        return (operators,)

    def expanded_elements(self, tp: Numeric) -> Numeric:
        return self.dims(tp, 0.0).up_projected
