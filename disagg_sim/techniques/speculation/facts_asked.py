"""Choose the acceptance of drafts that a model is served with: measured on it, or stated. There is no default."""

from __future__ import annotations

from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.load import load_speculation
from disagg_sim.facts.speculation import Speculation
from disagg_sim.facts.yaml_files import list_specs


def measured_speculation(model: str) -> Speculation:
    """Find the one curve of acceptance that was measured on a model."""
    every = [load_speculation(name) for name in list_specs("speculation")]
    own = [curve for curve in every if curve.model == model]
    if len(own) == 1:
        return own[0]
    state = "state your own, such as 'mtp 0.8 0.6' or 'draft_model llama_3_1_8b 0.8 0.6', or in a file"
    if own:
        raise InputError(
            f"{model} has {len(own)} curves of acceptance: {', '.join(c.name for c in own)}; name one, or {state}"
        )
    names = ", ".join(curve.name for curve in every)
    raise InputError(f"no acceptance was measured on {model}, and none is assumed; measured: {names}; {state}")


def asked_speculation(model: str, asked: str, acceptance: str) -> Speculation | None:
    """Find the speculation that a command asks for: ``off``, ``auto`` (all numbers of drafts), or a number."""
    if asked == "off":
        if acceptance:
            raise InputError("--acceptance says what is accepted of drafts; give --speculate auto or a number, too")
        return None
    if asked != "auto" and not (asked.isdigit() and asked.isascii()):
        raise InputError(f"--speculate {quoted(asked)}; allowed: auto, off, or a number of draft tokens")
    found = load_speculation(acceptance) if acceptance else measured_speculation(model)
    if asked == "auto":
        return found
    return found.trying((int(asked),)) if int(asked) else None
