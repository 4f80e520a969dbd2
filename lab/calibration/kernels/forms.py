"""Define the kernel tables: the columns that the CSV of each operator has; docs/calibration.md says what they mean.

A file with a column ``form`` holds tables of several forms, one below the other; cells of columns that a row's form
lacks are empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from disagg_sim.facts.efficiency import CACHE_LENGTH, COLLECTIVE_SIZES, GEMM_SIZES, HEADS, LATENT_HEADS, PROMPT_LENGTH

#: Words of every form.
IDENTITY = ("system", "framework", "version", "kernel_source")
#: Column of the measurement. [us]
LATENCY = "latency_us"
#: Column that names the form of each row where a file holds several.
FORM = "form"
#: Column that any table may have: a name of each row, by which verdicts tell it; else its line does.
ROW_ID = "row_id"


@dataclass(frozen=True, slots=True)
class TableForm:
    """Columns of one kind of table."""

    name: str
    words: tuple[str, ...]  # columns of text beside IDENTITY
    sizes: tuple[str, ...]  # whole numbers
    key: tuple[str, ...]  # columns of the shape by which rows are held out

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns."""
        return (*IDENTITY, *self.words, *self.sizes, LATENCY)


_ATTENTION_WORDS = ("compute_dtype", "kv_dtype")
_EXPERTS = ("hidden", "inter", "topk", "num_experts", "tp", "ep", "num_tokens")
_LINEAR = ("k_heads", "k_dim", "v_heads", "v_dim", "d_conv", "batch", PROMPT_LENGTH)
_SPARSE_WORDS = ("kind", "phase", "model", "kv_dtype", "gemm_dtype")
_SPARSE = ("heads", "tp_size", "shared_index", "batch", "new_tokens", "past_tokens")
_EXCHANGE = ("node_num", "ep_size", "hidden", "topk", "num_experts", "num_tokens")


def _attention(name: str, length: str, heads: tuple[str, ...]) -> TableForm:
    sizes = ("batch", length, *heads)
    return TableForm(name, _ATTENTION_WORDS, sizes, sizes)


_ALL = (
    TableForm("gemm", ("dtype",), GEMM_SIZES, ("n", "k")),
    _attention("context_attention", PROMPT_LENGTH, HEADS),
    _attention("generation_attention", CACHE_LENGTH, HEADS),
    _attention("mla_context", PROMPT_LENGTH, LATENT_HEADS),
    _attention("mla_generation", CACHE_LENGTH, LATENT_HEADS),
    TableForm(
        "mla_module",
        ("phase", *_ATTENTION_WORDS, "gemm_dtype"),
        ("batch", "q_len", "past_len", "heads"),
        ("phase", "batch", "q_len", "past_len", "heads"),
    ),
    TableForm("mla_bmm", ("op", "dtype"), ("num_tokens", "heads"), ("op", "num_tokens", "heads")),
    TableForm("moe", ("dtype", "distribution"), _EXPERTS, _EXPERTS),
    TableForm(
        "moe_ep_compute",
        ("op", "dtype", "distribution"),
        (*_EXPERTS[:4], "num_slots", *_EXPERTS[4:], "rank0_num_tokens"),
        (*_EXPERTS[:4], "num_slots", *_EXPERTS[4:]),
    ),
    TableForm("collectives", ("op", "dtype"), COLLECTIVE_SIZES, ("op", *COLLECTIVE_SIZES)),
    TableForm("moe_alltoall", ("comm_backend", "phase", "dtype"), (*_EXCHANGE, "sms"), ("phase", *_EXCHANGE)),
    TableForm("linear_attention", ("kind", "phase"), _LINEAR, ("kind", "phase", *_LINEAR)),
    TableForm("sparse_attention", _SPARSE_WORDS, _SPARSE, ("kind", "phase", *_SPARSE)),
    TableForm("quantize_ops", ("op", "dtype"), ("m", "k"), ("op", "m", "k")),
)
#: Name -> form.
FORMS = {form.name: form for form in _ALL}
#: Sizes that may be zero; all others start at 1.
MAY_BE_ZERO = frozenset({"sms", "past_len", "rank0_num_tokens", "past_tokens", "shared_index"})


def form_of(columns: Iterable[str]) -> TableForm | None:
    """The form that shares most columns with a table; None when it has less than half of every form's own."""
    present = set(columns) - {*IDENTITY, LATENCY}

    def likeness(form: TableForm) -> float:
        own = {*form.words, *form.sizes}
        return len(own & present) / len(own | present)

    best = max(_ALL, key=likeness)
    return best if likeness(best) >= 0.5 else None
