"""Find the kind of spec that a file holds, and check it."""

from __future__ import annotations

from pathlib import Path

from disagg_sim.facts.load import load_spec
from disagg_sim.facts.yaml_files import DIRECTORIES, read_mapping, spec_error

#: Kind -> keys that only such a file has.
MARKS = {
    "hardware": {"peak_flops", "hbm_capacity", "hbm_bandwidth", "nvlink_domain", "nic_bandwidth"},
    "efficiency": {"system", "inherits", "gemm", "decode_attention", "collectives", "alltoall"},
    "power": {"system", "inherits", "limit", "idle", "laws"},
    "precision": {"attention_projection", "cache", "dispatch_bytes", "combine_bytes"},
    "profile": {"fitted", "gemm_t0", "host", "elementwise_efficiency"},
    "engine": {"step_host", "request_host", "chunk_tokens", "mixed_steps"},
    "scheduler": {"admission", "watermark", "prefix_found", "keeps_preempted", "budget_per_rank", "rank_choice"},
    "model": {"hidden", "vocab", "layers", "max_context"},
    "traffic": {"cases"},
    "speculation": {"method", "acceptance", "measured_lengths"},
    "uncertainty": {"assumed", "per_doubling", "kinds", "served"},
    "layout": {"attention_groups", "expert_groups", "weight_block"},
    "evidence": {"kinds", "source"},
    "failures": {"gpu_mtbf", "node_mtbf", "link_mtbf", "restart"},
    "launcher": {"options", "image", "version"},
    "sweep": {"models", "systems", "limits", "modes"},
    "scenario": {"deployments", "slo", "trace"},
    "checkpoint": {"models", "source"},
}


def kind_of(path: Path) -> str:
    """Kind of a file: by its directory when that is one of ours, else by its keys."""
    parents = path.resolve().parent.as_posix()
    for kind, directory in sorted(DIRECTORIES.items(), key=lambda item: -len(item[1])):
        if parents.endswith(f"/{directory}"):
            return kind
    keys = set(read_mapping(path))
    kind = max(MARKS, key=lambda name: len(MARKS[name] & keys))
    if not MARKS[kind] & keys:
        raise spec_error(path, [f"keys of no known kind of file; known kinds: {', '.join(DIRECTORIES)}"])
    return kind


def check_file(path: Path) -> str:
    """Load a file of facts and return its kind; sweeps and scenarios, whose forms another room knows, are not
    loaded.
    """
    kind = kind_of(path)
    if kind not in ("sweep", "scenario"):
        load_spec(kind, path)
    return kind
