"""Which checkpoint has the weights of a recipe, and whether the engine must quantise it."""

from __future__ import annotations

from dataclasses import dataclass

from disagg_sim.facts.load import load_checkpoints
from disagg_sim.physics.setup import Setup

#: In files, where no published checkpoint is known.
UNKNOWN = "CHECKPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint, and how the engine reads it."""

    checkpoint: str
    quantised: str = ""  # format that the engine makes of it; empty = as it is
    note: str = ""  # what the reader must know


def weights_of(at: Setup, checkpoint: str = "", *, quantises: bool = True) -> Weights:
    """Find the checkpoint of a setup's model in the formats of its recipe.

    Parameters
    ----------
    at
        Its model and recipe count; the format is that of most weights, of experts where there are any.
    checkpoint
        Name or path given by hand, which must be in that format.
    quantises
        Whether the engine can make fp8 weights of a checkpoint in bf16 as it reads it.

    Returns
    -------
    Weights
        ``UNKNOWN`` with a note where none is known.

    Examples
    --------
    >>> from disagg_sim.physics.setup import setup
    >>> weights_of(setup("deepseek_r1", "h200_sxm", "fp8")).checkpoint
    'deepseek-ai/DeepSeek-R1'
    >>> weights_of(setup("qwen2_5_7b", "h200_sxm", "fp8")).quantised
    'fp8'
    """
    recipe, model = at.precision, at.model
    kind = (recipe.expert if model.is_moe else recipe.ffn).name
    if checkpoint:
        return Weights(checkpoint=checkpoint, note=f"{checkpoint} must have its weights in {kind}")
    known = load_checkpoints().models.get(model.name, {})
    if kind in known:
        return Weights(checkpoint=known[kind])
    if kind == "fp8" and "bf16" in known and quantises:
        return Weights(
            checkpoint=known["bf16"], quantised="fp8", note=f"{known['bf16']} is quantised to fp8 as it loads"
        )
    said = f"no published checkpoint of {model.name} in {kind} is known: put its name or path in place of {UNKNOWN}"
    return Weights(checkpoint=UNKNOWN, note=said)
