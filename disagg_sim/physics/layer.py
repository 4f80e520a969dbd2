"""A model's layer as ordered lists of operators: the page to read first.

Each function returns what ONE GPU does for one layer. ``tp`` shards attention heads and the dense
and shared FFN; ``tokens`` are those of this GPU's attention (DP) rank. Everything here is a count;
``cost.py`` turns it into time. Sources: physics page, sections 2, 3 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from disagg_sim.errors import InputError, nearest
from disagg_sim.facts.model import DenseFfn, GqaAttention, LayerKind, MlaAttention, ModelSpec, MoeFfn
from disagg_sim.facts.precision import Format, Precision
from disagg_sim.physics.work import (
    ACTIVATION_BYTES,
    AttentionShape,
    ExpertRows,
    MlaDims,
    Numeric,
    Work,
    causal_pairs,
    expert_rows,
    expert_work,
    gemm_work,
    gqa_decode_work,
    gqa_prefill_work,
    mla_work,
)

#: MLA forms: "auto" takes the cheaper of naive and absorbed at every point.
MLA_FORMS = ("auto", "naive", "absorbed", "cached")


def check_form(form: str) -> None:
    """``InputError`` unless ``form`` is one of ``MLA_FORMS``."""
    if form not in MLA_FORMS:
        raise InputError(f"mla_form {form!r} is unknown{nearest(form, MLA_FORMS)}; allowed: {', '.join(MLA_FORMS)}")


#: Sizes of an operator that is no attention.
NO_ATTENTION = AttentionShape(0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
#: Rows of an operator that is no expert GEMM.
NO_EXPERTS = ExpertRows(0.0, 0.0, 0.0, 0.0, 0.0)


#: Kinds of operators: kernels, then transfers.
KINDS = (
    "gemm",
    "prefill_attention",
    "decode_attention",
    "experts",
    "elementwise",
    "copy",
    "all_reduce",
    "gather",
    "all_to_all",
    "hop",
)


class Operator(NamedTuple):
    """One kernel, or one collective, of a layer on one GPU."""

    name: str
    kind: str  # one of KINDS
    work: Work
    format: str = ""  # of a GEMM
    keys: Numeric = 0.0  # mean key length times two of a prefill attention [token]
    size: Numeric = 0.0  # full tensor of a collective [B]; tokens of experts, or of a rank in an all-to-all [token]
    ranks: Numeric = 1.0  # of a collective, or over which experts are spread [1]
    domains: Numeric = 1.0  # NVLink domains over which an all-to-all is spread [1]
    runs: Numeric = 1.0  # 0 where a GEMM has nothing to multiply and is not launched [1]
    shape: tuple[Numeric, Numeric, Numeric] = (0.0, 0.0, 0.0)  # m, n, k of a GEMM on this GPU [1]
    experts: ExpertRows = NO_EXPERTS  # of a grouped GEMM
    attention: AttentionShape = NO_ATTENTION  # its sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """What one attention rank works on in one pass: prompts in prefill and sequences in decode."""

    prompts: Numeric = 0.0  # [1]
    new: Numeric = 0.0  # new tokens of each prompt [token]
    past: Numeric = 0.0  # cached tokens before them [token]
    decodes: Numeric = 0.0  # sequences in decode [1]
    context: Numeric = 0.0  # their mean cached length [token]
    emitted: Numeric = 0.0  # sequences that emit a token [1]

    @property
    def linear(self) -> Numeric:
        """Tokens that pass through the matrix multiplies. [token]"""
        return self.prompts * self.new + self.decodes


def _gemm(name: str, m: Numeric, n: Numeric, k: Numeric, fmt: Format) -> Operator:
    return Operator(name, "gemm", gemm_work(m, n, k, weight_bytes=fmt.bytes), fmt.name, shape=(m, n, k))


def _all_reduce(name: str, tokens: Numeric, hidden: int, wire_bytes: float, tp: Numeric) -> Operator:
    return Operator(name, "all_reduce", Work(0.0, 0.0), size=tokens * (hidden * wire_bytes), ranks=tp)


def kv_heads_per_gpu(attention: GqaAttention, tp: Numeric) -> Numeric:
    """KV heads that one GPU holds: ``ceil(n_kv/tp)``, at least one (duplicated above n_kv). [1]"""
    return np.ceil(attention.kv_heads / tp)


def mla_dims(attention: MlaAttention, tp: Numeric, cache_bytes: float) -> MlaDims:
    """Sizes of MLA on one of ``tp`` GPUs; the latent is not sharded."""
    return MlaDims(
        attention.q_heads / tp,
        attention.kv_rank,
        attention.nope_dim,
        attention.rope_dim,
        attention.value_dim,
        cache_bytes,
    )


def expanded_shape(dims: MlaDims, sequences: Numeric, new: Numeric, past: Numeric) -> AttentionShape:
    """Latent attention with up-projected keys and values: every query head has its own."""
    size = (dims.nope + dims.rope + dims.value) / 2.0
    held = sequences * past * (dims.up_projected * dims.cache_bytes)
    return AttentionShape(sequences, new, past, dims.heads, dims.heads, size, held)


def absorbed_shape(dims: MlaDims, sequences: Numeric, new: Numeric, past: Numeric) -> AttentionShape:
    """Latent attention in latent space: all query heads share one key, whose front is the value."""
    return AttentionShape(sequences, new, past, dims.heads, 1.0, (dims.latent + dims.kv_rank) / 2.0)


def projections(
    model: ModelSpec, kind: LayerKind, precision: Precision, tp: Numeric, tokens: Numeric
) -> list[Operator]:
    """Attention's matrix multiplies and the all-reduce of its output."""
    attention, d, fmt = kind.attention, model.hidden, precision.attention_projection
    if isinstance(attention, MlaAttention):
        heads = attention.q_heads / tp
        latent = attention.q_rank + attention.kv_rank + attention.rope_dim
        operators = [
            _gemm("q_a, kv_a", tokens, latent, d, fmt),  # replicated over tp
            _gemm("q_b", tokens, heads * (attention.nope_dim + attention.rope_dim), attention.q_rank, fmt),
            # naive: up-projects the new tokens; absorbed: folds W_kv_b into q and out of the values
            _gemm("kv_b", tokens, heads * (attention.nope_dim + attention.value_dim), attention.kv_rank, fmt),
            _gemm("o", tokens, d, heads * attention.value_dim, fmt),
        ]
    else:
        heads = attention.q_heads / tp
        columns = (heads + 2 * kv_heads_per_gpu(attention, tp)) * attention.head_dim
        operators = [_gemm("qkv", tokens, columns, d, fmt), _gemm("o", tokens, d, heads * attention.head_dim, fmt)]
    return [*operators, _all_reduce("attention all-reduce", tokens, d, precision.combine_bytes, tp)]


def prefill_attention(
    kind: LayerKind, precision: Precision, tp: Numeric, tokens: Tokens, form: str
) -> tuple[list[Operator], ...]:
    """Alternatives for the scores and values of the prompts; the fastest counts at each point.

    With nothing cached MLA is up-projected unless ``absorbed`` is forced: there is no past to project again.
    """
    attention, cache = kind.attention, precision.cache.bytes
    prompts, new, past = tokens.prompts, tokens.new, tokens.past
    if isinstance(attention, GqaAttention):
        q_heads, kv_heads, window = attention.q_heads / tp, kv_heads_per_gpu(attention, tp), attention.window
        work = gqa_prefill_work(
            sequences=prompts,
            new=new,
            past=past,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
            window=window,
            cache_bytes=cache,
        )
        keys = 2.0 * causal_pairs(new, past, window) / new
        held = gqa_decode_work(
            sequences=prompts,
            context=past,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
            window=window,
            cache_bytes=cache,
        ).hbm_bytes
        shape = AttentionShape(prompts, new, past, q_heads, kv_heads, attention.head_dim, held, window)
        return ([Operator("prefill attention", "prefill_attention", work, keys=keys, attention=shape)],)
    dims = mla_dims(attention, tp, cache)
    keys = 2.0 * past + new
    expanded = mla_work("cached", dims, sequences=prompts, new=new, past=past)
    shape = expanded_shape(dims, prompts, new, past)
    cached = [Operator("prefill attention", "prefill_attention", expanded, keys=keys, attention=shape)]
    if form == "cached" or (np.ndim(past) == 0 and past == 0.0 and form != "absorbed"):
        return (cached,)
    again = _gemm(
        "kv_b of the past",
        prompts * past,
        dims.heads * (dims.nope + dims.value),
        dims.kv_rank,
        precision.attention_projection,
    )._replace(runs=np.where(np.asarray(past) > 0, 1.0, 0.0))
    latent = mla_work("absorbed", dims, sequences=prompts, new=new, past=past)
    if form == "auto":
        latent = Work(np.where(np.asarray(past) > 0, latent.flops, np.inf), latent.hbm_bytes)
    shape = absorbed_shape(dims, prompts, new, past)
    absorbed = [Operator("prefill attention", "decode_attention", latent, attention=shape)]
    return {"naive": ([*cached, again],), "absorbed": (absorbed,), "auto": ([*cached, again], absorbed)}[form]


def decode_attention(
    kind: LayerKind, precision: Precision, tp: Numeric, tokens: Tokens, form: str
) -> tuple[list[Operator], ...]:
    """Scores and values of the sequences in decode. MLA is absorbed unless another form is forced."""
    attention, cache = kind.attention, precision.cache.bytes
    if isinstance(attention, GqaAttention):
        q_heads, kv_heads, window = attention.q_heads / tp, kv_heads_per_gpu(attention, tp), attention.window
        work = gqa_decode_work(
            sequences=tokens.decodes,
            context=tokens.context,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=attention.head_dim,
            window=window,
            cache_bytes=cache,
        )
        past = tokens.context - 1.0
        shape = AttentionShape(tokens.decodes, 1.0, past, q_heads, kv_heads, attention.head_dim, window=window)
        return ([Operator("decode attention", "decode_attention", work, attention=shape)],)
    dims = mla_dims(attention, tp, cache)
    # One new token over ctx cached ones: ctx pairs, hence a past of ctx - 1 (causal_pairs adds the token itself).
    chosen = "absorbed" if form in ("auto", "absorbed") else "cached"
    work = mla_work(chosen, dims, sequences=tokens.decodes, new=1.0, past=tokens.context - 1.0)
    if chosen == "absorbed":  # read the latent of every cached position once
        work = Work(work.flops, tokens.decodes * tokens.context * (dims.latent * cache))
    shaped = absorbed_shape if chosen == "absorbed" else expanded_shape
    shape = shaped(dims, tokens.decodes, 1.0, tokens.context - 1.0)
    operators = [Operator("decode attention", "decode_attention", work, attention=shape)]
    if form == "naive":
        columns = dims.heads * (dims.nope + dims.value)
        again = tokens.decodes * tokens.context
        operators.append(_gemm("kv_b of the past", again, columns, dims.kv_rank, precision.attention_projection))
    return (operators,)


def dense_ffn(model: ModelSpec, ffn: DenseFfn, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
    """A dense FFN and its all-reduce."""
    d, width = model.hidden, ffn.width / tp
    return [
        _gemm("gate, up" if ffn.matrices == 3 else "up", tokens, (ffn.matrices - 1) * width, d, precision.ffn),
        _gemm("down", tokens, d, width, precision.ffn),
        _all_reduce("FFN all-reduce", tokens, d, precision.combine_bytes, tp),
    ]


def moe_local(model: ModelSpec, ffn: MoeFfn, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
    """What an MoE layer does on the attention ranks: the router, and the all-reduce over ``tp``.

    The all-reduce sums the shared experts and, under TEP, the routed ones; under DP attention
    (tp = 1) it costs nothing.
    """
    return [
        _gemm("router", tokens, ffn.experts, model.hidden, precision.router),
        _all_reduce("FFN all-reduce", tokens, model.hidden, precision.combine_bytes, tp),
    ]


def shared_experts(model: ModelSpec, ffn: MoeFfn, precision: Precision, tp: Numeric, tokens: Numeric) -> list[Operator]:
    """Shared experts, sharded like a dense FFN (whole on every rank under DP attention)."""
    if not ffn.shared_experts:
        return []
    d, width = model.hidden, ffn.shared_experts * ffn.shared_width / tp
    return [
        _gemm("shared gate, up", tokens, 2 * width, d, precision.expert),
        _gemm("shared down", tokens, d, width, precision.expert),
    ]


def routed_experts(
    model: ModelSpec,
    ffn: MoeFfn,
    precision: Precision,
    *,
    ep: Numeric,
    tp_ffn: Numeric,
    tokens: Numeric,
    imbalance: float,
) -> Operator:
    """Grouped GEMMs of the routed experts; ``tokens`` counts all ranks of the stage."""
    rows = expert_rows(
        tokens=tokens,
        experts=ffn.experts,
        top_k=ffn.top_k,
        hidden=model.hidden,
        width=ffn.width / tp_ffn,
        ep=ep,
        imbalance=imbalance,
    )
    work = expert_work(rows, weight_bytes=precision.expert.bytes)
    return Operator("routed experts", "experts", work, precision.expert.name, size=tokens, ranks=ep, experts=rows)


def elementwise(model: ModelSpec, kind: LayerKind, tp: Numeric, tokens: Numeric) -> Operator:
    """Norms, residual, activation, rotary, quantise and cache write.

    ``16*d + (6*f_act + 6*(n_q+2*n_kv)*h)/tp`` bytes per token, f_act = f or k*d_e plus the shared
    width; MLA counts its two latents instead of the heads (physics page, section 2, an assumption).
    """
    attention, ffn = kind.attention, kind.ffn
    if isinstance(attention, MlaAttention):
        row: Numeric = attention.q_rank + attention.kv_rank + attention.rope_dim
    else:
        row = (attention.q_heads + 2 * attention.kv_heads) * attention.head_dim / tp
    active = ffn.top_k * ffn.width + ffn.shared_experts * ffn.shared_width if isinstance(ffn, MoeFfn) else ffn.width
    per_token = 16.0 * model.hidden + 6.0 * active / tp + 6.0 * row
    return Operator("elementwise", "elementwise", Work(0.0, tokens * per_token))


def head(model: ModelSpec, precision: Precision, tp: Numeric, emitted: Numeric) -> Operator:
    """LM head for the sequences that emit a token."""
    return _gemm("head", emitted, model.vocab / tp, model.hidden, precision.head)


def embedding(model: ModelSpec, precision: Precision, tokens: Numeric) -> Operator:
    """Embedding look-up: one row read and written per token."""
    row = model.hidden * (precision.embedding.bytes + ACTIVATION_BYTES)
    return Operator("embedding", "copy", Work(0.0, tokens * row))
