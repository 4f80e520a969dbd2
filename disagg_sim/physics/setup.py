"""Make a setup: a model on a system in one recipe and profile, with the rates that follow."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagg_sim.facts.engine import EngineSpec
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.facts.load import load_efficiency, load_model, load_profile, load_system, resolve_precision
from disagg_sim.facts.model import ModelSpec
from disagg_sim.facts.precision import Precision
from disagg_sim.facts.profile import ProfileSpec
from disagg_sim.notebook import Shown
from disagg_sim.physics.rates import Rates, resolve_rates


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # holds arrays: the same only as itself
class Setup(Shown):
    """A model on a system in one recipe and profile, with the rates that follow from them. Made by ``setup``."""

    model: ModelSpec
    system: SystemSpec
    precision: Precision
    profile: ProfileSpec
    engine: str  # whose fitted kernels are taken first; "" = the order of the system's fits
    rates: Rates
    overheads: EngineSpec | None = None  # what an engine adds to its kernels; None = kernels and the profile's host

    @property
    def memory_limit(self) -> float:
        """What an engine may fill of one GPU: ``u * M_usable``. [B]"""
        return self.profile.memory_utilisation * self.system.hbm_reported

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
        new = replace(
            self, system=system or self.system, profile=profile or self.profile, overheads=overheads or self.overheads
        )
        rates = resolve_rates(
            new.model, new.system, new.precision, new.profile, load_efficiency(new.system.name), new.engine
        )
        return replace(new, rates=replace(rates, adjust=self.rates.adjust))


def setup(
    model: ModelSpec | str,
    system: SystemSpec | str,
    precision: str,
    profile: ProfileSpec | str = "measured",
    engine: str | None = None,
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
        ``"trtllm"``, ``"vllm"`` or ``"sglang"``: whose fitted kernels are taken first. None = the order of the
        system's own fits.

    Returns
    -------
    Setup
        Specs in SI and rates [FLOP/s, B/s, s]: what every function of physics, search and simulation takes.

    Raises
    ------
    UnknownNameError, InputError
        Unknown names; a recipe that the GPU cannot run; a fitted profile on a system without fits.

    Examples
    --------
    >>> at = setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv")
    >>> at.model.name, at.profile.name, f"{at.memory_limit / 1e9:.1f} GB"
    ('deepseek_r1', 'measured', '178.8 GB')
    """
    model_spec = model if isinstance(model, ModelSpec) else load_model(model)
    system_spec = system if isinstance(system, SystemSpec) else load_system(system)
    profile_spec = profile if isinstance(profile, ProfileSpec) else load_profile(profile)
    recipe = resolve_precision(precision, model_spec, system_spec)
    fits = load_efficiency(system_spec.name)
    return Setup(
        model=model_spec,
        system=system_spec,
        precision=recipe,
        profile=profile_spec,
        engine=engine or "",
        rates=resolve_rates(model_spec, system_spec, recipe, profile_spec, fits, engine or ""),
    )
