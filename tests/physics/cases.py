"""Setups and mappings that the property tests draw from."""

from dataclasses import replace
from functools import cache

from hypothesis import strategies as st

from disagg_sim.domain import Sharding
from disagg_sim.facts.hardware import SystemSpec
from disagg_sim.physics.setup import Setup, setup
from disagg_sim.search.mappings import enumerate_mappings

PROFILES = ("ideal", "optimistic", "measured")
RECIPES = {"gb200_nvl72": "nvfp4_fp8kv", "h100_sxm": "fp8", "a100_sxm_80gb": "bf16"}
MODELS = ("llama_3_1_70b", "deepseek_r1", "gpt_oss_120b", "mixtral_8x7b", "opt_30b")


@cache
def cached_setting(model: str, system: str, profile: str) -> Setup:
    return setup(model, system, RECIPES[system], profile)


@cache
def mappings_of(model: str, system: str, max_gpus: int = 64) -> Sharding:
    return enumerate_mappings(setup(model, system, RECIPES[system]), max_gpus=max_gpus)


@st.composite
def cases(draw, models=MODELS, systems=tuple(RECIPES), profiles=PROFILES) -> tuple[Setup, Sharding]:
    """A setup and one of its mappings."""
    model, system = draw(st.sampled_from(models)), draw(st.sampled_from(systems))
    table = mappings_of(model, system)
    row = draw(st.integers(0, len(table) - 1))
    return cached_setting(model, system, draw(st.sampled_from(profiles))), table[row]


def scaled(system: SystemSpec, what: str, factor: float) -> SystemSpec:
    """A system with one quantity (or every peak) multiplied."""
    if what == "peak_flops":
        return replace(system, peak_flops={name: peak * factor for name, peak in system.peak_flops.items()})
    return replace(system, **{what: getattr(system, what) * factor})
