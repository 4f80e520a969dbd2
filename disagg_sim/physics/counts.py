"""Count FLOP and bytes of a whole pass by operator, on one GPU that holds everything, for checks by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg_sim.domain import Sharding
from disagg_sim.errors import UnknownNameError, above_zero, nearest, whole_number
from disagg_sim.facts.load import load_model, load_precision
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.physics.blocks import check_form, elementwise, layers_of
from disagg_sim.physics.blocks.base import Layer
from disagg_sim.physics.work import Operator, Tokens, embedding, head
from disagg_sim.techniques.experts.physics import ExpertRouting

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """One operator summed over the layers that have it."""

    name: str
    flops: float  # [FLOP]
    hbm_bytes: float  # [B]


@dataclass(frozen=True, slots=True)
class PassWork:
    """What one pass multiplies and moves, operator by operator, before any sharding."""

    operators: tuple[OperatorWork, ...]

    @property
    def flops(self) -> float:
        """All of the pass. [FLOP]"""
        return sum(op.flops for op in self.operators)

    @property
    def hbm_bytes(self) -> float:
        """All of the pass. [B]"""
        return sum(op.hbm_bytes for op in self.operators)

    def __getitem__(self, name: str) -> OperatorWork:
        """The operator of that name; ``UnknownNameError`` if the model has none."""
        for op in self.operators:
            if op.name == name:
                return op
        names = [op.name for op in self.operators]
        raise UnknownNameError(f"unknown operator {name!r}{nearest(name, names)}; known: {', '.join(names)}")

    def to_frame(self) -> pd.DataFrame:
        """A table with columns operator, flops [FLOP], hbm_bytes [B]."""
        import pandas as pd

        rows = [(op.name, op.flops, op.hbm_bytes) for op in self.operators]
        return pd.DataFrame(rows, columns=["operator", "flops", "hbm_bytes"])


def prefill_work(
    model: ModelSpec | str, *, isl: int, batch: int = 1, precision: Precision | str = "bf16", mla_form: str = "auto"
) -> PassWork:
    """FLOP and bytes of prefilling some prompts, operator by operator.

    ``F = 2*S*P_lin + sum over layers of the attention FLOP + 2*d*V`` per prompt (physics page, section 2).

    Parameters
    ----------
    model
        A model, its name, or the path of its file.
    isl
        Length of each prompt. [token]
    batch
        Prompts of the pass. [request]
    precision
        Formats, or the name of a recipe.
    mla_form
        "auto" (up-projected keys and values) or a forced form; without effect where the model has no MLA.

    Returns
    -------
    PassWork
        FLOP and bytes of each operator, summed over layers and prompts.

    Raises
    ------
    InputError, UnknownNameError
        Values out of range, unknown names.

    Examples
    --------
    >>> f"{prefill_work('deepseek_r1', isl=16384).flops:.3e}"
    '1.840e+15'
    """
    prompts, new = whole_number("batch", batch), whole_number("isl", isl)
    return _pass_work(model, Tokens(prompts=prompts, new=float(new), emitted=prompts), precision, mla_form)


def decode_work(
    model: ModelSpec | str,
    *,
    context: float,
    batch: int = 1,
    precision: Precision | str = "bf16",
    mla_form: str = "auto",
) -> PassWork:
    """FLOP and bytes of one decode step, a token for each sequence, operator by operator (physics page, section 2).

    Parameters
    ----------
    context
        Cached tokens of each sequence, mean. [token]
    batch
        Sequences of the step. [request]
    model, precision, mla_form
        As in ``prefill_work``; "auto" is absorbed in decode.

    Returns
    -------
    PassWork
        FLOP and bytes of each operator, summed over layers and sequences.

    Raises
    ------
    InputError, UnknownNameError
        Values out of range, unknown names.

    Examples
    --------
    A token of Llama-3.1-70B reads 69.5e9 parameters, all but the embedding, at two bytes each. It spends two FLOP on
    each of them and 3 GFLOP on attention to 1000 tokens:

    >>> work = decode_work("llama_3_1_70b", context=1000)
    >>> f"{work.flops / 1e9:.0f} GFLOP, {work.hbm_bytes / 1e9:.0f} GB"
    '142 GFLOP, 139 GB'
    """
    decodes, cached = whole_number("batch", batch), above_zero("context", context, "tokens")
    return _pass_work(model, Tokens(decodes=decodes, context=cached, emitted=decodes), precision, mla_form)


def _pass_work(model: ModelSpec | str, tokens: Tokens, precision: Precision | str, form: str) -> PassWork:
    check_form(form)
    spec = model if isinstance(model, ModelSpec) else load_model(model)
    formats = precision if isinstance(precision, Precision) else load_precision(precision).resolve(spec)
    flops: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[str, float] = defaultdict(float)
    ends = [(embedding(spec, formats, tokens.linear), 1), (head(spec, formats, 1.0, tokens.emitted), 1)]
    layers = [
        (op, count) for layer, count in layers_of(spec) for op in _layer_operators(spec, layer, formats, tokens, form)
    ]
    for op, count in [ends[0], *layers, ends[1]]:
        if op.kind != "all_reduce":
            flops[op.name] += float(op.work.flops) * count
            moved[op.name] += float(op.work.hbm_bytes) * count
    return PassWork(tuple(OperatorWork(name=name, flops=flops[name], hbm_bytes=moved[name]) for name in flops))


def _layer_operators(
    model: ModelSpec, layer: Layer, precision: Precision, tokens: Tokens, form: str
) -> Iterator[Operator]:
    linear = tokens.linear
    yield from layer.attention.projections(model, precision, 1.0, linear)
    attend = layer.attention.prefill if tokens.prompts else layer.attention.decode
    yield from attend(precision, 1.0, tokens, form)[0]
    yield from layer.ffn.local(model, precision, 1.0, linear)
    if layer.ffn.picks:
        yield layer.ffn.routed(model, precision, Sharding(), linear, ExpertRouting(1.0))
    yield from layer.ffn.beside(model, precision, 1.0, linear)
    yield elementwise(model, layer, 1.0, linear)
