"""Choose the acceptance of drafts that a model is served with: measured on it, or stated. There is no default."""

from __future__ import annotations

from disagg_sim.errors import InputError, quoted
from disagg_sim.facts.load import list_specs, load_speculation
from disagg_sim.facts.speculation import Speculation


def measured_speculation(model: str) -> Speculation:
    """Find the one curve of acceptance that was measured on a model.

    Parameters
    ----------
    model
        Canonical name.

    Returns
    -------
    Speculation
        Of ``speculation/``.

    Raises
    ------
    InputError
        None or several; says what there is, and how to state one's own.

    Examples
    --------
    >>> measured_speculation("deepseek_r1").name
    'deepseek_r1_mtp'
    >>> measured_speculation("llama_3_1_8b")
    Traceback (most recent call last):
    disagg_sim.errors.InputError: no acceptance was measured on llama_3_1_8b, and none is assumed; measured: ...
    """
    every = [load_speculation(name) for name in list_specs("speculation")]
    own = [curve for curve in every if curve.model == model]
    if len(own) == 1:
        return own[0]
    state = "state your own, such as 'mtp 0.8 0.6' or {method: mtp, acceptance: [0.8, 0.6]} in a file"
    if own:
        raise InputError(
            f"{model} has {len(own)} curves of acceptance: {', '.join(c.name for c in own)}; name one, or {state}"
        )
    names = ", ".join(curve.name for curve in every)
    raise InputError(f"no acceptance was measured on {model}, and none is assumed; measured: {names}; {state}")


def check_measured_on(speculation: Speculation, model: str) -> None:
    """Refuse a curve of another model.

    Parameters
    ----------
    speculation, model
        Curve, measured or stated, and name of the model that is to be served with it.

    Returns
    -------
    None
        Where it is a curve of the model, or of none.

    Raises
    ------
    InputError
        Where it was measured on another model; a stated acceptance belongs to none.

    Examples
    --------
    >>> check_measured_on(load_speculation("deepseek_r1_mtp"), "deepseek_v3")
    Traceback (most recent call last):
    disagg_sim.errors.InputError: acceptance 'deepseek_r1_mtp' was measured on deepseek_r1, not on deepseek_v3; ...
    """
    if speculation.model not in ("", model):
        stated = " ".join([speculation.method, *(f"{share:g}" for share in speculation.acceptance)])
        raise InputError(
            f"acceptance {speculation.name!r} was measured on {speculation.model}, not on {model}; to take it all the "
            f"same, state it: {stated!r}"
        )


def asked_speculation(model: str, asked: str, acceptance: str = "") -> Speculation | None:
    """Find the speculation that a command asks for.

    Parameters
    ----------
    model
        Canonical name.
    asked
        ``off``, ``auto`` (every number of drafts is tried), or a number of drafts.
    acceptance
        Name of a curve, or a method and an acceptance; "" = the one curve measured on the model.

    Returns
    -------
    Speculation or None
        None = off.

    Raises
    ------
    InputError
        Another word, an acceptance without use, no curve to take.

    Examples
    --------
    >>> asked_speculation("deepseek_r1", "1").choices, asked_speculation("llama_3_1_8b", "auto", "mtp 0.7 0.5").choices
    ((1,), (0, 1, 2))
    """
    if asked == "off":
        if acceptance:
            raise InputError("--acceptance says what is accepted of drafts; give --speculate auto or a number, too")
        return None
    if asked != "auto" and not (asked.isdigit() and asked.isascii()):
        raise InputError(f"--speculate {quoted(asked)}; allowed: auto, off, or a number of draft tokens")
    found = load_speculation(acceptance) if acceptance else measured_speculation(model)
    return found if asked == "auto" else found.trying((int(asked),))
