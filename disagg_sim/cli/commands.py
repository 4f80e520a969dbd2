"""List the commands: module and function of each, its line in the list of commands, and an example."""

from __future__ import annotations

from typing import ClassVar

from disagg_sim.cli.lazy import CommandEntry, LazyGroup
from disagg_sim.question import EvaluateQuestion, ExplainQuestion, LaunchQuestion, PlanQuestion


class SpecsCommands(LazyGroup):
    """List, show and check systems, models, traffic, precision recipes, profiles and serving policies."""

    table: ClassVar = {
        "list": CommandEntry("specs:list_", "List names and titles of shipped specs.", "specs list model"),
        "show": CommandEntry(
            "specs:show", "Show one spec with units and sources.", "specs show hardware h100_sxm --fits"
        ),
        "check": CommandEntry(
            "specs:check", "Report every fault of spec files.", "specs check my_gpu.yaml my_sweep.yaml"
        ),
        "schema": CommandEntry("specs:schema", "Print the JSON Schema of a command's --json.", "specs schema plan"),
    }


class ModelCommands(LazyGroup):
    """Read models as Hugging Face publishes them."""

    table: ClassVar = {
        "import": CommandEntry(
            "model:import_", "Make a model's file of its config.json.", "model import Qwen3-8B/config.json --out models"
        )
    }


class TraceCommands(LazyGroup):
    """Inspect request traces."""

    table: ClassVar = {
        "stats": CommandEntry(
            "trace:stats", "Print rate, burstiness, lengths, prefix reuse.", "trace stats conv.csv --json"
        )
    }


class Commands(LazyGroup):
    """All commands, in the order of their use."""

    table: ClassVar = {
        "plan": CommandEntry(
            "plan:plan",
            "Answer what to deploy, on one screen.",
            "plan --model llama_3_1_70b --system h200_sxm --isl 4096 --osl 512 --rate 20",
            PlanQuestion,
        ),
        "evaluate": CommandEntry(
            "evaluate:evaluate",
            "Say what a deployment does under a load.",
            "evaluate --model llama_3_1_70b --system h200_sxm --isl 4096 --osl 512 --rate 20 --pool "
            "colocated:tp=2,instances=12",
            EvaluateQuestion,
        ),
        "sweep": CommandEntry(
            "sweep:sweep",
            "Compute frontiers, rate matching and KV bandwidth.",
            "sweep demo --out reports/demo --jobs 2",
        ),
        "simulate": CommandEntry(
            "simulate:simulate",
            "Replay request traces under serving policies.",
            "simulate azure_conv_on_h100 --out results",
        ),
        "explain": CommandEntry(
            "explain:explain",
            "Take one design apart, down to its fits.",
            "explain reports/demo --best --figure best.png",
            ExplainQuestion,
        ),
        "launch": CommandEntry(
            "launch:launch",
            "Write the commands that start a deployment.",
            "launch reports/demo --best --engine vllm --out start",
            LaunchQuestion,
        ),
        "report": CommandEntry(
            "report:report", "Write results as one interactive HTML page.", "report reports/demo --out demo.html"
        ),
        "sensitivity": CommandEntry(
            "sensitivity:sensitivity",
            "Compute elasticities to hardware parameters.",
            "sensitivity demo --out reports/demo",
        ),
        "check": CommandEntry(
            "compare:check",
            "Compare frontiers with a baseline; exit 1 if moved.",
            "check reports/mine --baseline baselines/mine",
        ),
        "compare": CommandEntry(
            "compare:compare",
            "Show how the frontiers of two sweeps differ.",
            "compare reports/mine reports/other --all",
        ),
        "reproduce": CommandEntry(
            "lab/reproduce:reproduce",
            "Reproduce figures and claims of a paper (in a clone).",
            "reproduce beyond-the-buzz --out reports/b",
        ),
        "measure": CommandEntry(
            "lab/measure:measure",
            "Time the kernels of this machine's GPU (in a clone).",
            "measure --out own.csv --system h200_sxm --quick",
        ),
        "mcp": CommandEntry("mcp:mcp", "Serve agents over the Model Context Protocol.", "mcp"),
        "specs": CommandEntry("commands:SpecsCommands", "List, show and check systems, models, policies, ..."),
        "model": CommandEntry("commands:ModelCommands", "Read the config.json of a model."),
        "trace": CommandEntry("commands:TraceCommands", "Print the statistics of a request trace."),
        "calibrate": CommandEntry("lab/commands:CalibrateCommands", "Fit efficiencies to measurements (in a clone)."),
        "validate": CommandEntry(
            "lab/commands:ValidateCommands", "Compare predictions with measurements (in a clone)."
        ),
    }
