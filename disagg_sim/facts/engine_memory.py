"""What a server of an engine holds beside weights and cache, and the part of a GPU's memory that it may fill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from disagg_sim.facts.faults import source_faults
from disagg_sim.facts.schema import Quantity, Range
from disagg_sim.units import GB

_Bytes = Annotated[float, Quantity("B", 0.0, 1000.0)]
_Memory = Annotated[float, Quantity("B", 0.0, 100 * GB)]
_Widths = Annotated[float, Range(0.0, 100.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Memory of a server as its start-up log tells it; ``physics.server_memory`` counts with these numbers.

    The engine profiles one full step, of ``chunk_tokens`` tokens and ``max_running`` sequences, and leaves what the
    budget then still has to the KV cache. ``graphs`` and ``context`` lie outside the budget.
    """

    hidden_widths: _Widths  # hidden states of a token that a forward pass keeps at once [1]
    stage_widths: _Widths  # the same that a pipeline stage takes from and hands to others, on top [1]
    sampler_word: _Bytes  # of a word of the vocabulary and a sampled sequence [B]
    sampler_row: _Bytes  # of a word of the vocabulary and a streaming multiprocessor: buffers of top-k and top-p [B]
    activation_base: _Memory  # of activations, whatever the model [B]
    position_entry: _Bytes  # of an element of a table of rotary positions, of each kind of attention [B]
    non_torch: _Memory  # runtime and collective libraries of a single GPU [B]
    non_torch_tp2: _Memory  # the same from TP 2 on [B]
    non_torch_tp4: _Memory  # and from TP 4 on [B]
    non_torch_stages: _Memory  # the same of a pipeline without TP [B]
    graphs: _Memory  # CUDA graphs, captured after the KV pool was sized [B]
    context: _Memory  # what is in use before the server starts [B]
    fitted_on: tuple[str, ...]  # models whose rows the fitted numbers saw
    sources: Mapping[str, str]  # key -> where its value comes from

    def __post_init__(self) -> None:
        """``ValueError`` unless every number has a source."""
        told = [key for key in EngineMemory.__dataclass_fields__ if key not in ("sources", "fitted_on")]
        if found := source_faults(self.sources, told, needed=told):
            raise ValueError("; ".join(found))

    @property
    def outside(self) -> float:
        """What lies outside the budget of the server. [B]"""
        return self.graphs + self.context
