"""Every command: where it stands, what a list of commands says of it, and an example."""

from __future__ import annotations

from typing import ClassVar

from disagg_sim.cli.lazy import Entry, LazyGroup


class Calibrate(LazyGroup):
    """Fit what kernels reach of a system's peaks to measurements."""

    table: ClassVar = {
        "kernels": Entry(
            "calibrate_kernels:kernels",
            "Efficiencies of kernels.",
            "calibrate kernels gemm.csv --system h200_sxm --out h200_sxm.yaml",
        ),
        "uncertainty": Entry(
            "calibrate_uncertainty:uncertainty",
            "Spreads behind error bars.",
            "calibrate uncertainty gemm.csv --out uncertainty.yaml",
        ),
        "engine": Entry(
            "calibrate_engine:engine",
            "Host times of an engine.",
            "calibrate engine served.csv --engine vllm --out vllm.yaml",
        ),
    }


class Validate(LazyGroup):
    """Hold predictions against measurements: every row, the errors by group, and pictures."""

    table: ClassVar = {
        "kernels": Entry(
            "validate_kernels:kernels",
            "Predict every row of kernel tables.",
            "validate kernels gemm.csv --out reports/kernels",
        ),
        "serving": Entry(
            "validate_serving:validate_serving",
            "Evaluate every row of served runs.",
            "validate serving served.csv --out reports/serving",
        ),
    }


class Specs(LazyGroup):
    """Shipped systems, models, traffic, precision recipes, profiles and serving policies."""

    table: ClassVar = {
        "list": Entry("specs:list_", "Names and titles of what is shipped.", "specs list model"),
        "show": Entry("specs:show", "One spec with units and sources.", "specs show hardware h100_sxm --fits"),
        "check": Entry("specs:check", "Every fault of spec files.", "specs check my_gpu.yaml my_sweep.yaml"),
    }


class Trace(LazyGroup):
    """Request traces."""

    table: ClassVar = {
        "stats": Entry("trace:stats", "Rate, burstiness, lengths, prefix reuse.", "trace stats conv.csv --json")
    }


class Commands(LazyGroup):
    """All commands, in the order of their use."""

    table: ClassVar = {
        "sweep": Entry(
            "sweep:sweep",
            "Frontiers, rate matching, KV bandwidth of a sweep.",
            "sweep demo --out reports/demo --jobs 2",
        ),
        "simulate": Entry(
            "simulate:simulate", "Replay traces through serving policies.", "simulate azure_conv_on_h100 --out results"
        ),
        "sensitivity": Entry(
            "sensitivity:sensitivity", "Elasticities along every frontier.", "sensitivity demo --out reports/demo"
        ),
        "check": Entry(
            "compare:check", "Hold frontiers against a baseline.", "check reports/mine --baseline baselines/mine"
        ),
        "compare": Entry(
            "compare:compare", "Tell what two frontiers differ in.", "compare reports/mine reports/other --all"
        ),
        "reproduce": Entry(
            "reproduce:reproduce",
            "Figures and claims of a published study.",
            "reproduce beyond-the-buzz --out reports/b",
        ),
        "measure": Entry(
            "measure:measure", "Time the kernels of the GPU at hand.", "measure --out own.csv --system h200_sxm --quick"
        ),
        "specs": Entry("commands:Specs", "Shipped systems, models, traffic, policies."),
        "trace": Entry("commands:Trace", "What a request trace is like."),
        "calibrate": Entry("commands:Calibrate", "Measurements to fitted efficiencies."),
        "validate": Entry("commands:Validate", "Hold predictions against measurements."),
    }
