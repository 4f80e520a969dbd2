"""Make a setup: a model on a system in one recipe and profile, with the rates that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.efficiency import EfficiencySpec
from disagg_sim.facts.engine import ContextExchange, EngineMemory, EngineSpec
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import (
    load_efficiency,
    load_engine,
    load_model,
    load_profile,
    load_speculation,
    load_system,
    resolve_precision,
)
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.facts.speculation import JOINED, Speculation
from disagg_sim.facts.yaml_files import list_specs
from disagg_sim.notebook import Shown
from disagg_sim.physics.rates import Rates, resolve_rates
from disagg_sim.physics.work import ACTIVATION_BYTES, Numeric
from disagg_sim.techniques.registry import Chosen, chosen_in, stretch_of

#: In place of the name of an engine: bare kernels.
KERNELS = "kernels"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # holds arrays: the same only as itself
class Setup(Shown):
    """A model on a system in one recipe and profile, with the rates that follow from them. Made by ``setup``."""

    model: ModelSpec
    system: SystemSpec
    precision: Precision
    profile: ProfileSpec
    engine: str  # name of the engine; "kernels" or "" = none
    rates: Rates
    kernels: str = ""  # whose fitted kernels are taken first; "" = the order of the system's fits
    overheads: EngineSpec | None = None  # what an engine adds to its kernels; None = kernels and the profile's host
    speculation: Speculation | None = None  # drafter that every instance holds; None = no speculative decoding
    set_aside: float = 0.0  # of each GPU, for prompts that are remembered between requests [B]
    techniques: Chosen = ()  # that act by a hook of the registry, with their values

    def __repr__(self) -> str:
        """By names: its specs and fits are long."""
        timed = self.engine or self.profile.name
        return f"Setup({self.model.name} on {self.system.name}, {self.precision.name}, {timed})"

    @property
    def memory_limit(self) -> float:
        """What may be filled of one GPU: ``u * M_reported``, with the u of the engine if there is one, less what is
        set aside. [B]

        An engine whose servers' memory is known takes its share of what a process sees, and leaves room for what
        lies outside of its budget.
        """
        share = self.profile if self.overheads is None else self.overheads
        if (held := self.server_memory) is None:
            return share.memory_utilisation * self.system.hbm_reported - self.set_aside
        visible = self.system.hbm_visible or self.system.hbm_reported
        return min(share.memory_utilisation * visible, visible - held.outside) - self.set_aside

    @property
    def server_memory(self) -> EngineMemory | None:
        """What a server of the engine holds beside weights and cache; None where it is not known."""
        return None if self.overheads is None else self.overheads.memory

    @property
    def request_host(self) -> float:
        """What the engine spends on a request before its prefill: HTTP, tokenising, scheduling. [s]"""
        return 0.0 if self.overheads is None else self.overheads.request_host

    @property
    def cache_share(self) -> float:
        """Share of what weights and activations leave that the cache may fill. [1]"""
        return 1.0 if self.overheads is None else self.overheads.cache_share

    @property
    def sharing(self) -> ContextExchange:
        """How GPUs that share the tokens of a sequence exchange what they lack."""
        return ContextExchange() if self.overheads is None else self.overheads.sharing

    @property
    def cached_layers(self) -> ModelSpec:
        """The model with every layer that keeps a cache, those of its drafter too: for counts of caches alone."""
        return self.model if self.speculation is None else _served(self.model, self.speculation)

    @property
    def with_draft_layers(self) -> Setup:
        """The model and its draft layers, of its own width, without speculation: what prefill passes and memory holds.

        Itself where it has no speculation, or a ``draft_model``.
        """
        return self if self.speculation is None or self.speculation.drafter is not None else _in_prefill(self)

    @property
    def draft_model(self) -> Setup | None:
        """The draft model on the same GPUs; None without one: no speculation, or draft layers behind the model's."""
        return None if self.speculation is None or self.speculation.drafter is None else _in_prefill(self)

    def steps_ahead(self, mapping: Sharding) -> int:
        """Steps that an instance forms before the one under way has ended; in a pipeline others are under way. [1]"""
        return 0 if self.overheads is None or mapping.pp > 1 else self.overheads.steps_ahead

    def drafts(self, mapping: Sharding) -> Numeric:
        """Draft tokens of a step: those of the mapping, the number 0 where none has any. [token]"""
        drafts = mapping.draft_tokens
        most = float(np.max(drafts)) if np.size(drafts) else 0.0
        if most == 0:
            return 0
        if self.speculation is None:
            raise InputError(f"a mapping has {most:g} draft tokens and its setup no speculation; give setup() one")
        self.speculation.trying((int(most),))
        return drafts

    def handed_bytes(self, isl: float) -> float:
        """Size what a prefill instance hands over of one prompt, each element once: caches, states, to a drafter. [B]

        A drafter takes its own cache and the hidden state of the last token, of three layers for EAGLE-3, of none for a
        draft model. Engines hand over the drafter's cache with that of the model
        (sglang/srt/disaggregation/prefill.py: draft_token_to_kv_pool; vLLM's NIXL connector registers its layers as all
        others).
        """
        cache, asked = self.cached_layers.kv_bytes(isl, self.precision), self.speculation
        if asked is None or asked.drafter is not None:
            return cache
        return cache + (JOINED[asked.method] if asked.layer else 1) * self.model.hidden * ACTIVATION_BYTES

    def accepted_length(self, drafts: Numeric) -> Numeric:
        """Mean tokens that a step emits for a sequence, 1 without a drafter. [token]"""
        return accepted_length(self.speculation, drafts)

    def lengthened(self, time: Numeric, sequences: Numeric) -> Numeric:
        """Find what techniques make of the time of a plain step of so many sequences in decode on all ranks. [s]"""
        return time if not self.techniques else time * stretch_of(self.techniques, sequences)

    def check_context(self, isl: float, osl: float, *, allow_long: bool = False) -> None:
        """Refuse requests that do not fit into the context of the model, or of its draft model."""
        self.model.check_context(isl, osl, allow_long=allow_long)
        if self.speculation is not None and self.speculation.drafter is not None:
            self.speculation.drafter.check_context(isl, osl, allow_long=allow_long)

    def changed(
        self,
        *,
        system: SystemSpec | None = None,
        profile: ProfileSpec | None = None,
        overheads: EngineSpec | None = None,
    ) -> Setup:
        """A copy with another system, profile or overheads, and the rates that follow.

        Use ``dataclasses.replace`` to change the rates themselves; it resolves nothing.
        """
        engine, under = overheads or self.overheads, profile or self.profile
        new = replace(
            self,
            system=system or self.system,
            profile=under,
            overheads=engine if under.with_engine else None,
            engine=overheads.name if overheads else self.engine,
            kernels=overheads.kernels if overheads else self.kernels,
        )
        fits, named = load_efficiency(new.system.name), engine.expert_kernel if engine else ""
        served = _served(new.model, new.speculation)
        rates = resolve_rates(served, new.system, new.precision, new.profile, fits, new.kernels, named)
        return replace(new, rates=replace(rates, adjust=self.rates.adjust))


@lru_cache(maxsize=64)
def _served(model: ModelSpec, speculation: Speculation | None) -> ModelSpec:
    """The model with every kind of layer whose rates a setup needs."""
    return model if speculation is None else replace(model, layers=(*model.layers, *speculation.layers_on(model)))


@lru_cache(maxsize=64)
def _in_prefill(at: Setup) -> Setup:
    """What prompts pass of a drafter: the draft model, or the model with the draft layers behind its own."""
    assert at.speculation is not None
    return replace(at, model=at.speculation.drafter or at.cached_layers, speculation=None)


def accepted_length(speculation: Speculation | None, drafts: Numeric) -> Numeric:
    """Find the mean tokens that a step emits for a sequence: ``AL(k) = 1 + sum_{i<=k} m_i``. [token]"""
    if speculation is None:
        return 1.0
    table = np.concatenate([[1.0], 1.0 + np.cumsum(speculation.acceptance)])
    return table[np.asarray(drafts, dtype=np.int64)]


def engine_names() -> tuple[str, ...]:
    """Name every engine: the files of ``hw_specs/engines/``, or ``KERNELS``."""
    return (*list_specs("engine"), KERNELS)


def engine_name(profile: ProfileSpec, system: SystemSpec, engine: str | None) -> str:
    """Name of the engine asked for, or of the system's where the profile counts one; "" = none."""
    return engine or (system.engine if profile.with_engine else "")


def setup(
    model: ModelSpec | str,
    system: SystemSpec | str,
    precision: str,
    profile: ProfileSpec | str = "measured",
    engine: EngineSpec | str | Path | None = None,
    speculation: Speculation | str | Path | None = None,
    techniques: str = "",
) -> Setup:
    """Load the named specs and resolve the rates of every operator.

    Parameters
    ----------
    model, system, profile
        Specs, or names of shipped ones, or paths of YAML files. The profile says how far from the speed of light
        the forecast is made: ``ideal``, ``optimistic`` or ``measured``.
    precision
        Name or path of a recipe of formats; the system must have its arithmetic.
    engine
        Engine (``hw_specs/engines/``) whose kernels are taken first and whose overheads the profile ``measured`` adds
        to them: ``"trtllm"``, ``"vllm"``, ``"sglang"``, or the path of a YAML file. ``"kernels"`` = bare kernels and
        the host time of the profile. None = the system's engine.
    speculation
        Drafter and acceptance: from ``speculation``, or the name or path of a measured curve (``speculation/``).
        None = no speculative decoding.
    techniques
        Techniques of the registry with their values, such as ``"name=64"``, with commas between them; "" = none.

    Returns
    -------
    Setup
        Specs in SI, rates [FLOP/s, B/s, s], and what the engine adds to its kernels: what every function of physics,
        search and simulation takes.

    Raises
    ------
    UnknownNameError, InputError
        Unknown names; a recipe or an engine that does not run on the GPU; a fitted profile on a system without fits.

    Examples
    --------
    >>> at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    >>> at.model.name, at.profile.name, at.engine
    ('deepseek_r1', 'measured', 'trtllm')
    """
    model_spec = model if isinstance(model, ModelSpec) else load_model(model)
    system_spec = system if isinstance(system, SystemSpec) else load_system(system)
    profile_spec = profile if isinstance(profile, ProfileSpec) else load_profile(profile)
    curve = speculation if isinstance(speculation, Speculation | None) else load_speculation(speculation)
    if curve is not None:
        curve.check_model(model_spec)
    recipe = resolve_precision(precision, _served(model_spec, curve), system_spec)
    overheads = engine if isinstance(engine, EngineSpec) else None
    name = overheads.name if overheads else engine_name(profile_spec, system_spec, str(engine or ""))
    if overheads is None and name not in ("", KERNELS):
        overheads = load_engine(name)
    if overheads and overheads.vendors and system_spec.vendor not in overheads.vendors:
        ours = ", ".join(each for each in engine_names() if each == KERNELS or not load_engine(each).vendors)
        runs, asked = f"{overheads.title} runs on systems of {', '.join(overheads.vendors)}", system_spec.vendor
        raise InputError(f"engine {name}: {runs}, and not of {asked}; allowed there: {ours}")
    specs = model_spec, system_spec, recipe, profile_spec, load_efficiency(system_spec.name), overheads, curve
    return _of_specs(_Specs(*specs, engine=overheads.name if overheads else name, techniques=chosen_in(techniques)))


@dataclass(frozen=True)
class _Specs:
    """All that a setup is made of."""

    model: ModelSpec
    system: SystemSpec
    precision: Precision
    profile: ProfileSpec
    fits: EfficiencySpec | None
    overheads: EngineSpec | None
    speculation: Speculation | None
    engine: str
    techniques: Chosen

    def __hash__(self) -> int:
        """Of the names; a system, whose tables are no keys, has no hash of its own."""
        return hash((self.model.name, self.system.name, self.precision.name, self.profile.name, self.engine))


@lru_cache(maxsize=128)
def _of_specs(specs: _Specs) -> Setup:
    """The setup of specs; one object, so that what was computed with it is known to be of the same."""
    model, overheads, profile = specs.model, specs.overheads, specs.profile
    kernels, named = (overheads.kernels, overheads.expert_kernel) if overheads else ("", "")
    served = _served(model, specs.speculation)
    return Setup(
        model=model,
        system=specs.system,
        precision=specs.precision,
        profile=profile,
        engine=specs.engine,
        kernels=kernels,
        rates=resolve_rates(served, specs.system, specs.precision, profile, specs.fits, kernels, named),
        overheads=overheads if profile.with_engine else None,
        speculation=specs.speculation,
        techniques=specs.techniques,
    )
