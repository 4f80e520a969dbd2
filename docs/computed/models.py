"""The table of shipped models."""

from __future__ import annotations

from disagg_sim.facts.load import load_model, load_precision
from disagg_sim.facts.model import ModelSpec
from disagg_sim.units import MB
from docs.computed import on_site, quick, table
from docs.shipped_models import Shipped, shipped

HEADER = (
    "name",
    "parameters, 1e9 (published)",
    "active, 1e9 (published)",
    "cache of a token in bf16, B",
    "state of a sequence, MB",
    "kinds of layers",
)


def _kinds(model: ModelSpec) -> str:
    """Layers of each pair of kinds."""
    counted: dict[str, int] = {}
    for kind, count in zip(model.kinds, model.kind_counts, strict=True):
        parts = [f"{kind.attention.kind}{_reach(kind.attention)}", kind.ffn.kind]
        name = "+".join(part for part in parts if part != "none")
        counted[name] = counted.get(name, 0) + count
    return ", ".join(f"{count} {name}" for name, count in counted.items())


def _reach(attention: object) -> str:
    """Window or chunk of grouped-query attention. [token]"""
    window, chunk = getattr(attention, "window", 0), getattr(attention, "chunk", 0)
    return f" window {window}" if window else f" chunk {chunk}" if chunk else ""


def _row(row: Shipped) -> tuple[str, ...]:
    model = load_model(row.name)
    published = f" ({float(row.published_b):,.4g})" if row.published_b else ""
    active = f" ({row.published_active_b})" if row.published_active_b else ""
    cache = model.kv_bytes_per_token(load_precision("bf16").resolve(model))
    return (
        f"`{row.name}`",
        f"{model.total_params / 1e9:,.2f}{published}",
        f"{model.active_params / 1e9:,.2f}{active}" if model.is_moe else "",
        f"{cache:,.0f}",
        f"{model.state_bytes / MB:,.1f}" if model.state_bytes else "",
        _kinds(model),
    )


@on_site
def shipped_models() -> str:
    """Every shipped model with what is counted of it and what its publisher states."""
    return table(HEADER, [_row(row) for row in shipped()])


@quick
def shipped_models_count() -> str:
    """How many there are."""
    return str(len(list(shipped())))
