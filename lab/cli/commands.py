"""List the commands of the groups of the laboratory: as ``disagg_sim.cli.commands`` those of the package."""

from __future__ import annotations

from typing import ClassVar

from disagg_sim.cli.commands import CommandEntry, LazyGroup


class CalibrateCommands(LazyGroup):
    """Fit efficiencies, power, error spreads and engine overheads to measurements."""

    table: ClassVar = {
        "kernels": CommandEntry(
            "lab/calibrate:kernels",
            "Fit the efficiencies of kernels.",
            "calibrate kernels gemm.csv --system h200_sxm --out h200_sxm.yaml",
        ),
        "power": CommandEntry(
            "lab/calibrate:power",
            "Fit the power of kernels.",
            "calibrate power kernel_power.csv --system h200_sxm --out h200_sxm.yaml",
        ),
        "uncertainty": CommandEntry(
            "lab/calibrate:uncertainty",
            "Fit the spreads behind error bars.",
            "calibrate uncertainty gemm.csv --out uncertainty.yaml",
        ),
        "engine": CommandEntry(
            "lab/calibrate:engine",
            "Fit the overheads of an engine.",
            "calibrate engine served.csv --engine vllm --out vllm.yaml",
        ),
        "layouts": CommandEntry(
            "lab/calibrate:layouts",
            "Count the runs behind each kind of layout.",
            "calibrate layouts served.csv --out measured.yaml",
        ),
    }


class ValidateCommands(LazyGroup):
    """Compare predictions with measurements: every row, and errors by group."""

    table: ClassVar = {
        "kernels": CommandEntry(
            "lab/validate:kernels",
            "Predict every row of kernel tables.",
            "validate kernels gemm.csv --out reports/kernels",
        ),
        "passes": CommandEntry(
            "lab/validate:passes",
            "Predict prefills on a cached past.",
            "validate passes forward_pass.parquet --out reports/passes",
        ),
        "serving": CommandEntry(
            "lab/validate_served:validate_serving",
            "Predict every row of served runs.",
            "validate serving served.csv --out reports/serving",
        ),
        "requests": CommandEntry(
            "lab/validate:requests",
            "Replay runs of a real server request by request.",
            "validate requests run.csv --system h100_sxm --out reports/requests",
        ),
        "memory": CommandEntry(
            "lab/validate:memory",
            "Predict the memory of servers.",
            "validate memory vllm_memory.csv --out reports/memory",
        ),
        "ranking": CommandEntry(
            "lab/validate_served:validate_ranking",
            "Judge the configurations that a forecast picks.",
            "validate ranking served.csv --out reports/ranking",
        ),
        "optimum": CommandEntry(
            "lab/validate_served:validate_optimum",
            "Judge what a plan would deploy.",
            "validate optimum served.csv --out reports/optimum",
        ),
    }
