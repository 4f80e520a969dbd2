"""Which checkpoint has the weights of a recipe, and whether the engine must quantise it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagg_sim.errors import InputError
from disagg_sim.facts.launcher import checkpoint_name
from disagg_sim.facts.load import load_checkpoints, load_model
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.yaml_files import DIRECTORIES, shipped_root
from disagg_sim.physics.setup import Setup
from disagg_sim.techniques.speculation.facts import MTP
from disagg_sim.techniques.speculation.physics import draft_model_of

#: In files, where no published checkpoint is known, of the model and of its drafter.
UNKNOWN, UNKNOWN_DRAFTER = "CHECKPOINT", "DRAFT_CHECKPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint, and how the engine reads it."""

    checkpoint: str
    quantised: str = ""  # format that the engine makes of it; empty = as it is
    note: str = ""  # what the reader must know
    drafter: Weights | None = None  # of a head or a draft model; None without, and where it lies in the checkpoint


def weights_of(at: Setup, checkpoint: str = "", *, quantises: bool = True) -> Weights:
    """Find the checkpoint of a setup's model in the formats of its recipe.

    Returns ``UNKNOWN`` with a note where none is known.
    """
    if checkpoint:
        try:
            checkpoint_name(checkpoint)
        except ValueError as error:
            raise InputError(f"checkpoint {error}") from None
    own = replace(at, speculation=None)
    return replace(_of_model(own, checkpoint, quantises=quantises), drafter=_of_drafter(at, quantises=quantises))


def format_of(at: Setup) -> str:
    """Name the format of most weights of a recipe."""
    return (at.precision.expert if at.model.is_moe else at.precision.ffn).name


def _of_drafter(at: Setup, *, quantises: bool) -> Weights | None:
    """Checkpoint of a head or a draft model."""
    speculation, own = at.speculation, draft_model_of(at)
    if speculation is None or speculation.method == MTP:
        return None
    if speculation.checkpoint:
        return Weights(checkpoint=speculation.checkpoint)
    if own is None:
        said = f"no checkpoint of the {speculation.method} head {speculation.name} is known: put its name or path"
        return Weights(checkpoint=UNKNOWN_DRAFTER, note=f"{said} in place of {UNKNOWN_DRAFTER}")
    found = _of_model(own, "", quantises=quantises)
    if found.checkpoint != UNKNOWN:
        return found
    return replace(found, checkpoint=UNKNOWN_DRAFTER, note=found.note.replace(UNKNOWN, UNKNOWN_DRAFTER))


def _of_model(at: Setup, checkpoint: str, *, quantises: bool) -> Weights:
    """Checkpoint of one model."""
    model, kind = at.model, format_of(at)
    if checkpoint:
        alone = ", and no format of its own for the KV cache" if at.precision.cache.name == "bf16" else ""
        return Weights(checkpoint=checkpoint, note=f"{checkpoint} must have its weights in {kind}{alone}")
    known = load_checkpoints().models.get(model.name, {})
    other = _of_another(model)
    if kind in known:
        return Weights(checkpoint=known[kind], note=other and known[kind] + other)
    if kind == "fp8" and "bf16" in known and quantises:
        said = f"{known['bf16']} is quantised to fp8 as it loads"
        return Weights(checkpoint=known["bf16"], quantised="fp8", note=said + other)
    said = f"no published checkpoint of {model.name} in {kind} is known: give its name or path for {UNKNOWN}"
    return Weights(checkpoint=UNKNOWN, note=said)


def _of_another(model: ModelSpec) -> str:
    """A warning of a model that is not the shipped one of its name, by which checkpoints are found."""
    shipped = shipped_root() / DIRECTORIES["model"] / f"{model.name}.yaml"
    if not shipped.is_file() or model == load_model(shipped):
        return ""
    return f" is a checkpoint of the {model.name} that is shipped, from which yours differs: say --checkpoint"
