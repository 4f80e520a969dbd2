"""A model on a system in one recipe and profile: names in, specs and rates out."""

from __future__ import annotations

from dataclasses import dataclass

from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_efficiency, load_model, load_profile, load_system, resolve_precision
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.physics.memory import (
    CachedTokens,
    decode_bytes,
    decode_residents,
    memory_limit,
    prefill_bytes,
    prompt_residents,
)
from disagg_sim.physics.phases import Degrees
from disagg_sim.physics.rates import Rates, resolve_rates
from disagg_sim.physics.work import Numeric


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on a system in one recipe and profile, with the rates that follow from them."""

    model: ModelSpec
    system: SystemSpec
    precision: Precision
    profile: ProfileSpec
    rates: Rates
    engine: str

    @property
    def memory_limit(self) -> float:
        """What one GPU may hold. [B]"""
        return memory_limit(self.system, self.profile)

    def decode_bytes(self, degrees: Degrees, batch: Numeric, *, isl: int, osl: int, mla_form: str = "auto") -> Numeric:
        """Bytes on the fullest GPU of a decode instance; see ``physics.memory``. [B]"""
        return self.decode_bytes_of(degrees, batch, decode_residents(isl, osl), mla_form=mla_form)

    def decode_bytes_of(
        self, degrees: Degrees, batch: Numeric, cached: CachedTokens, *, mla_form: str = "auto"
    ) -> Numeric:
        """``decode_bytes`` where each sequence in flight holds ``cached`` tokens. [B]"""
        return decode_bytes(
            self.model, self.precision, self.profile, degrees, batch, cached=cached, expanded=mla_form == "cached"
        )

    def prefill_bytes(
        self, degrees: Degrees, batch: Numeric, *, isl: int, chunk_tokens: Numeric, cached: bool = False
    ) -> Numeric:
        """Bytes on the fullest GPU of a prefill instance; see ``physics.memory``. [B]"""
        return self.prefill_bytes_of(degrees, batch, prompt_residents(isl), chunk_tokens=chunk_tokens, expanded=cached)

    def prefill_bytes_of(
        self, degrees: Degrees, batch: Numeric, prompt: CachedTokens, *, chunk_tokens: Numeric, expanded: bool = False
    ) -> Numeric:
        """``prefill_bytes`` where each prompt has the length ``prompt``. [B]"""
        return prefill_bytes(
            self.model,
            self.precision,
            self.profile,
            degrees,
            batch,
            prompt=prompt,
            chunk_tokens=chunk_tokens,
            expanded=expanded,
        )


def setting(
    model: ModelSpec | str,
    system: SystemSpec | str,
    precision: str,
    profile: str = "measured",
    engine: str | None = None,
) -> Setting:
    """Load what names stand for, and resolve the rates.

    Raises
    ------
    UnknownNameError, InputError
        Unknown names; a recipe that the GPU cannot run; a fitted profile on a system without fits.
    """
    model_spec = model if isinstance(model, ModelSpec) else load_model(model)
    system_spec = system if isinstance(system, SystemSpec) else load_system(system)
    recipe = resolve_precision(precision, model_spec, system_spec)
    profile_spec = load_profile(profile)
    fits = load_efficiency(system_spec.name)
    rates = resolve_rates(model_spec, system_spec, recipe, profile_spec, fits, engine or "")
    return Setting(model_spec, system_spec, recipe, profile_spec, rates, engine or "")
