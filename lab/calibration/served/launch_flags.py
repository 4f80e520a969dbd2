"""Take what runs were launched with in place of what their rows state or leave out, where the launch is known exactly.

A table of launch flags has a line for each measured row (``row_id``): how sure the join is (``match``), and the flags
of its launch script or recipe (``f_...``). Lines with the match ``exact`` count: one commit, one point of its search
space, one set of flags. So do joins ``by date`` to the one set of flags of their day: those to scripts unless the row
states another image, and those to a recipe, or to the script that the config of the day names, that has the row's
workers and GPUs. None counts whose heads do not divide: 21 rows of SGLang on GB200 (December 2025) would get TP24,
their rows state attention DP. A row takes layout, format of the KV cache, token budget of a step, and image.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from disagg_sim.facts.load import load_model
from disagg_sim.physics.blocks import layers_of
from lab.calibration.names import recipe_of
from lab.calibration.served.cells import count, instance, text, value, version_in, yes
from lab.calibration.served.masks import of_image
from lab.calibration.served.rows import MULTIPLIED, Measurement, ServingRow, WorkerGroup

#: Columns that tell a table of launch flags.
MARKS = {"row_id", "match", "kind", "f_engine", "f_prefill_workers"}
#: Columns that only the long table of launch flags has: ranks of vLLM, copies of experts in prefill, the front end, how
#: decode exchanges tokens with experts, and whether steps with decodes are formed ahead.
FURTHER = ["row_id", "dp", "prefill_eplb_slots", "frontend_type", "decode_moe_a2a"]
FURTHER += ["overlap_scheduler", "decode_overlap_scheduler"]
#: The match that counts; for how often a scheduler polls or sends, also the only set of flags of its day.
EXACT, BY_DATE, SCRIPT = "exact", "by date", "script"
#: Engines whose decode workers behind Dynamo give the first token half of the steps late that lie between two sends:
#: 0.50 of them at 22 fitted points of SGLang, 0.4 at 13 points of vLLM that no fit saw; TensorRT-LLM's none, nor do
#: workers behind SGLang's own router. Of 117 rows of SGLang 37 do not name their front end, and count as Dynamo's.
HANDS_ON, OWN_ROUTER = ("sglang", "vllm"), "sglang_router"
#: More in flight than this over the slots of decode: requests wait for one, and TTFT is that wait. [1]
OVER_SLOTS = 1.1


def launched(row: ServingRow, line: Any, further: Any = None) -> ServingRow:
    """The row as its launch says, where it is known exactly, of an image that is not judged with the reason;
    ``further`` is its line of the long table of flags.
    """
    row = row.refused(reason) if (reason := of_image(row, text(line, "image_script"))) else row
    if text(line, "match") in (EXACT, BY_DATE):
        row = replace(
            row,
            poll_steps=max(_steps_between(row, line, further), 1),
            gather_steps=count(line, "f_batch_wait_timeout_iters"),
            held_iters=count(line, "f_adp_timeout_iters"),
            cold=value(line, "f_num_warmups_per_conc") == 0,
            waves=float(count(line, "f_prompts_per_concurrency") or row.waves),
            overlap=_overlap(line, further),
        )
    told = _as_launched(row, line, further) if _known(line) else row
    return told if _starts(told) else row


def _steps_between(row: ServingRow, line: Any, further: Any) -> int:
    """Decode steps from one look at new requests to the next; of split workers, from one sending of tokens. [1]"""
    if text(line, "kind") == SCRIPT:
        return count(line, "f_scheduler_recv_interval")
    late = row.engine in HANDS_ON and text(further, "frontend_type") != OWN_ROUTER
    return count(line, "f_decode_stream_interval") if late else 1


def _overlap(line: Any, further: Any) -> str:
    """Whether steps with decodes are formed ahead; "" where the launch leaves that to the engine."""
    said = text(further, ("decode_" if text(line, "kind") == "recipe" else "") + "overlap_scheduler")
    return said if said in ("on", "off") else ""


def _known(line: Any) -> bool:
    """Whether a row ran with these flags and no others: by its commit, or as the only ones of its day."""
    if text(line, "match") == EXACT:
        return True
    if text(line, "match") != BY_DATE or count(line, "n_flag_sets") != 1:
        return False
    agrees, _, asked = text(line, "layout_agrees").partition("/")
    if text(line, "kind") == SCRIPT:
        return text(line, "image_match").lower() != "false"
    return bool(agrees) and agrees == asked


def _starts(row: ServingRow) -> bool:
    """Whether the heads of the model divide over the TP groups of all workers."""
    groups = [each.mapping.tp_attn for each in (row.workers, row.prefill) if each]
    layers = layers_of(load_model(row.model)) if row.model else ()
    return not any(layer.attention.rejects(each) for layer, _ in layers for each in groups)


def _as_launched(row: ServingRow, line: Any, further: Any) -> ServingRow:
    split = text(line, "kind") == "recipe"
    cache = text(line, "f_decode_kv_dtype" if split else "f_kv_cache_dtype")
    # ``auto`` follows the checkpoint (TensorRT-LLM pull request 16240), and that of gpt-oss says nothing of its cache
    own = cache == "auto" and row.model.startswith("gpt_oss")
    kept = "fp8" if cache.startswith("fp8") else "bf16" * own
    weights = row.recipe.removesuffix("_bf16kv").removesuffix("_fp8kv")
    side, ranks = ("decode_", 0) if split else ("", count(further, "dp"))
    row = replace(
        row,
        workers=_workers(row.workers, line, side, text(line, "f_decode_eplb_slots"), ranks),
        prefill=_workers(row.prefill, line, "prefill_", text(further, "prefill_eplb_slots")),
        recipe=recipe_of(weights, kept, row.model) if kept else row.recipe,
        version=row.version or version_in(text(line, "image_script")),
    )
    if split and row.engine == "sglang" and further is not None and not text(further, "decode_moe_a2a"):
        row = replace(row, workers=_gathering(row.workers))
    row = replace(row, chunk_tokens=_budget(row, line) or row.chunk_tokens)
    row = replace(row, reason="") if row.reason == MULTIPLIED else row
    return _waiting_for_slots(row, line) if split else row


def _workers(stated: WorkerGroup | None, line: Any, side: str, copies: str, ranks: int = 0) -> WorkerGroup | None:
    """Workers of one side with the layout of the launch, where it states one for as many GPUs: ``ranks`` of attention
    of vLLM have TP GPUs each. A source that multiplies TP and EP of the same GPUs states the square of them.
    """
    apart = ranks if text(line, "f_engine") == "vllm" else 0
    gpus = count(line, f"f_{side}gpus_per_worker") or count(line, f"f_{side}tp") * max(apart, 1)
    if stated is None or stated.mapping.gpus not in (gpus, gpus**2):
        return stated
    all_of_them = yes(line, f"f_{side}expert_parallel") or text(line, f"f_{side}ep") == "on"
    ep = gpus if all_of_them else max(count(line, f"f_{side}ep"), 1)
    mapping = instance(gpus, ep=ep, dp=0 if yes(line, f"f_{side}dp_attention") else max(apart, 1))
    told = re.fullmatch(r"redundant (\d+)", copies)
    if mapping.ep > 1:
        slots = int(told[1]) if told else stated.mapping.redundant_slots
        mapping = replace(mapping, redundant_slots=slots)
    return replace(stated, mapping=mapping)


def _gathering(stated: WorkerGroup | None) -> WorkerGroup | None:
    """Workers whose attention ranks gather the tokens of all, as SGLang's do without a backend of all-to-all: they
    count as with experts under TP, which gather so and read as many bytes.
    """
    if stated is None or stated.mapping.dp_attn == 1 or stated.mapping.ep == 1:
        return stated
    mapping = stated.mapping
    return replace(stated, mapping=replace(mapping, ep=1, tp_ffn=mapping.ep * mapping.tp_ffn, redundant_slots=0))


def _budget(row: ServingRow, line: Any) -> int:
    """Tokens of a step of one attention rank; SGLang states them for all ranks of a worker. [token]"""
    side, workers = ("prefill_", row.prefill) if row.prefill else ("", row.workers)
    if row.engine == "sglang" and workers is not None:
        return count(line, f"f_{side}chunked_prefill_tokens") // int(workers.mapping.dp_attn)
    return count(line, f"f_{side}max_num_tokens")


def _waiting_for_slots(row: ServingRow, line: Any) -> ServingRow:
    """The row with the slots of its decode ranks; without its TTFT, where more is in flight than they have."""
    most = count(line, "f_decode_max_batch")
    if row.workers is None or not most:
        return row
    whole = row.engine == "sglang"  # its limit is the worker's; some launchers state a rank's, so none is taken over
    ranks = 1 if whole else int(row.workers.mapping.dp_attn)
    few = row.concurrency <= OVER_SLOTS * most * ranks * row.workers.count
    row = row if whole else replace(row, slots=most)
    if few:
        return row

    def masked(each: Measurement) -> Measurement:
        late = each.name == "ttft" and not each.reason
        return replace(each, reason="more in flight than slots of decode: a wait for one") if late else each

    return replace(row, quantities=tuple(map(masked, row.quantities)))
