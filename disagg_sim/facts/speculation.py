r"""Speculative decoding: which drafter a model is served with, and how many of its tokens the model accepts.

A step verifies k drafts of every sequence and emits the accepted ones and one token of the model's own:

.. math:: AL(k) = 1 + \sum_{i=1}^{k} m_i

with the *marginal* acceptance :math:`m_i`, the share of steps in which the first i drafts are all accepted. It depends
on model, drafter and text, so there is no default: ``speculation/`` holds measured curves, each with its source, and
``Speculation`` takes a curve of one's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any

from disagg_sim.choices import MOST_DRAFTS
from disagg_sim.errors import InputError, nearest, quoted
from disagg_sim.facts.kinds import ATTENTION_KINDS, FFN_KINDS, Count
from disagg_sim.facts.launcher import checkpoint_name
from disagg_sim.facts.layers import NONE, LayerKind
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.schema import NOT_IN_FILE, Line, NotEmpty, OneOf, Range
from disagg_sim.notebook import Shown

#: A module of the model's own kind of layer that is trained with it, a small decoder layer on its hidden states, and
#: a model of its own with the same vocabulary.
MTP, EAGLE3, DRAFT_MODEL = "mtp", "eagle3", "draft_model"
METHODS = (MTP, EAGLE3, DRAFT_MODEL)
#: Hidden states that are joined before a draft layer: embedding and hidden state, or those of three layers. [1]
JOINED = {MTP: 2, EAGLE3: 3}
_Share = Annotated[float, Range(0.0, 1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayer:
    """Decoder layer of an EAGLE-3 head, at the hidden size of its model: grouped queries and a dense FFN."""

    q_heads: Count
    kv_heads: Count
    head_dim: Count
    width: Count  # of the FFN [1]
    vocab: Count  # of its own head [1]

    @property
    def kind(self) -> LayerKind:
        """Its attention and feed-forward part."""
        sizes: dict[str, Any] = {"q_heads": self.q_heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        width: dict[str, Any] = {"width": self.width}
        return LayerKind(ATTENTION_KINDS["gqa"](**sizes), FFN_KINDS["dense"](**width))


@dataclass(frozen=True, kw_only=True)
class Speculation(Shown):
    """A drafter, its measured or stated acceptance, and the numbers of drafts that a search tries."""

    name: Annotated[str, NOT_IN_FILE]
    title: Line
    model: str  # that the curve was measured on
    method: Annotated[str, OneOf(METHODS)]
    acceptance: Annotated[tuple[_Share, ...], NotEmpty]  # marginal, by position, never rising [1]
    layer: DraftLayer | None = None  # of EAGLE-3
    draft_model: str = ""  # name of the model that drafts
    checkpoint: str = ""  # of a head or a draft model, on the hub or a path; "" = none known, or that of the recipe
    drafter: Annotated[ModelSpec | None, NOT_IN_FILE] = None  # the same, loaded
    drafts: Annotated[tuple[int, ...], NOT_IN_FILE] = ()  # numbers of drafts to try; () = none to all positions [token]
    task: str = ""  # text that it was measured on
    thinking: str = ""  # on, off, or not stated
    measured_on: str = ""  # GPU and engine
    measured_lengths: tuple[Annotated[float, Range(1.0, MOST_DRAFTS + 1.0)], ...] = ()  # AL by k, as published [token]
    source: str = ""

    def __post_init__(self) -> None:
        """``ValueError`` unless the acceptance falls, an EAGLE-3 head has a layer, and a draft model a name."""
        if any(later > sooner for sooner, later in pairwise(self.acceptance)):
            shown = ", ".join(f"{share:g}" for share in self.acceptance)
            raise ValueError(
                f"acceptance {shown} rises: position i counts only where all before it were accepted (marginal shares)"
            )
        if len(self.acceptance) > MOST_DRAFTS:
            raise ValueError(f"acceptance has {len(self.acceptance)} positions; allowed: up to {MOST_DRAFTS}")
        if self.checkpoint:
            checkpoint_name(self.checkpoint)
        if self.checkpoint and self.method == MTP:
            raise ValueError("method mtp has no key 'checkpoint': its module lies in that of the model")
        for key, method, given in (
            ("layer", EAGLE3, self.layer is not None),
            ("draft_model", DRAFT_MODEL, bool(self.draft_model)),
        ):
            if given != (self.method == method):
                raise ValueError(f"method {self.method} {'has no' if given else 'needs'} key {key!r}")

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of drafts that a search tries, rising. [token]"""
        return self.drafts or tuple(range(len(self.acceptance) + 1))

    @property
    def words(self) -> str:
        """Method, draft model and acceptance in one line, as ``speculation_in_words`` reads it."""
        shares = (f"{share:.10g}" for share in self.acceptance)
        return " ".join([self.method, *([self.draft_model] if self.draft_model else []), *shares])

    def trying(self, drafts: tuple[int, ...]) -> Speculation:
        """The same drafter with other numbers of drafts to try."""
        most = len(self.acceptance)
        for each in drafts:
            if not 0 <= each <= most:
                raise InputError(
                    f"{each} draft tokens are out of range; allowed: 0 to {most}, the positions of acceptance "
                    f"{self.name!r}"
                )
        return replace(self, drafts=tuple(sorted(set(drafts))))

    def check_model(self, model: ModelSpec) -> None:
        """Refuse another model than that of the curve, and a draft model of another vocabulary."""
        if self.model not in ("", model.name):
            raise InputError(
                f"acceptance {self.name!r} was measured on {self.model}, not on {model.name}; to take it all the same, "
                f"state it: {self.words!r}"
            )
        if self.drafter is not None and self.drafter.vocab != model.vocab:
            raise InputError(
                f"draft model {self.drafter.name} has {self.drafter.vocab} tokens in its vocabulary, {model.name} "
                f"{model.vocab}; allowed: the same, as it drafts tokens of the model"
            )

    def layers_on(self, model: ModelSpec) -> tuple[LayerKind, ...]:
        """Find the draft layers on a model.

        An MTP module repeats the last layer of the model that caches tokens, with the last feed-forward part (arXiv
        2412.19437, section 2.2; hybrid models attend fully in it); EAGLE-3 has a layer of its own, a draft model all
        of its layers.
        """
        if self.drafter is not None:
            return self.drafter.layers
        if self.layer is not None:
            return (self.layer.kind,)
        attending = [kind.attention for kind in model.layers if kind.attention.stores(1.0)]
        feeding = [kind.ffn for kind in model.layers if kind.ffn.kind != NONE]
        return (LayerKind(attending[-1], feeding[-1]),)


def speculation_in_words(word: str, load_model: Callable[[str], ModelSpec]) -> Speculation:
    """Read a method and its acceptance from one line, the name of ``stated_speculation``."""
    method, *shares = word.split()
    named = method == DRAFT_MODEL and shares and not _is_number(shares[0])
    own = shares.pop(0) if named else ""
    if (method == DRAFT_MODEL and not named) or not all(map(_is_number, shares)):
        raise InputError(
            f"speculation {quoted(word)} is no method and its acceptance, such as 'mtp 0.8 0.6' or "
            "'draft_model llama_3_1_8b 0.8 0.6'"
        )
    acceptance = tuple(float(share) for share in shares)
    return stated_speculation(method, acceptance, drafter=load_model(own) if own else None)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def stated_speculation(method: str, acceptance: tuple[float, ...], drafter: ModelSpec | None = None) -> Speculation:
    """Make the speculation of a stated acceptance."""
    if method not in METHODS:
        raise InputError(
            f"speculation method {method!r} is not timed{nearest(method, METHODS)}; allowed: {', '.join(METHODS)}"
        )
    if not acceptance or not all(0.0 <= share <= 1.0 for share in acceptance):
        shown = ", ".join(f"{share:g}" for share in acceptance)
        raise InputError(f"acceptance [{shown}] is out of range; allowed: shares from 0 to 1, one a position")
    try:
        said = Speculation(
            name="",
            title="acceptance as stated",
            model="",
            method=method,
            acceptance=tuple(float(share) for share in acceptance),
            draft_model=drafter.name if drafter is not None else "",
            drafter=drafter,
            source="stated",
        )
    except ValueError as error:
        raise InputError(str(error)) from None
    return replace(said, name=said.words)
