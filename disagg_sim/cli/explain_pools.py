"""``disagg-sim explain --phase attention_ffn|encode``: take a step over two pools, or the encoding of images, apart."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import typer

from disagg_sim.certainty.pool_parts import encode_parts, encode_spent, split_parts, split_spent
from disagg_sim.choices import ENCODE
from disagg_sim.cli.plan_inputs import images_of
from disagg_sim.cli.tables import INFEASIBLE, print_table
from disagg_sim.domain import Sharding
from disagg_sim.errors import InputError
from disagg_sim.facts.profile import profile_and_skew
from disagg_sim.physics.setup import Setup
from disagg_sim.question import TECHNIQUES, ExplainQuestion, changed_flags
from disagg_sim.report.breakdown import entries_of, time_text, too_full
from disagg_sim.report.words import records, text_of
from disagg_sim.techniques.encode.physics import encode_step
from disagg_sim.techniques.registry import clashes
from disagg_sim.techniques.split.physics import Split
from disagg_sim.techniques.split.search import ffn_mapping
from disagg_sim.units import GB, MB
from disagg_sim.workload.lengths import Lengths

HEADER = ("pool", "part", "time", "waited for", "share", "label", "rests on")


def explain_pool(asked: ExplainQuestion, at: Setup, mapping: Sharding, lengths: Lengths) -> None:
    """Print what a step over both pools waits for, or what encoding a request takes, perhaps in joules, too."""
    if flags := changed_flags(asked, "as_json", "figure", TECHNIQUES):
        raise InputError(f"{', '.join(flags)}: only prefill, decode and instances of both take it")
    fields = {
        "prefix": ("cached",),
        "context": ("dcp", "pcp"),
        "ranks": ("rank_imbalance",),
        "speculation": ("speculate",),
        "prefill_delay": ("hold_prompts",),
        "availability": ("availability",),
    }
    flags_of = {name: ", ".join(changed_flags(asked, *names)) for name, names in fields.items()}
    flags_of["experts"] = "--profile" if profile_and_skew(asked.profile)[1] else ""
    pool = "encode" if asked.phase == ENCODE else "split"
    if faults := [*clashes({name: flags for name, flags in flags_of.items() if flags} | {pool: "--phase"}, "explain")]:
        raise InputError("; ".join(faults))
    if asked.phase == ENCODE:
        _explain_encode(at, asked.images, energy=asked.energy)
        return
    batch, gpus, micro = asked.batch, asked.ffn_gpus, asked.microbatches
    attention = Sharding(tp_attn=mapping.tp_attn, dp_attn=mapping.dp_attn, tp_ffn=mapping.tp_attn, ep=mapping.dp_attn)
    if attention.gpus != mapping.gpus:
        raise InputError("--phase attention_ffn takes --tp and --dp of attention, and --ffn-gpus; no other degrees")
    sequences, left = divmod(batch, int(attention.dp_attn) * micro)
    if left or not sequences:
        whole = int(attention.dp_attn) * micro
        raise InputError(
            f"--batch {batch}: {attention.dp_attn} DP ranks of {micro} micro-batches; give n times {whole}"
        )
    if not gpus:
        raise InputError("--phase attention_ffn needs --ffn-gpus, those of the feed-forward pool")
    ffn = ffn_mapping(at, gpus)
    found = split_parts(at, Split(attention, ffn, micro), lengths, float(sequences))
    step = found.step
    experts = text_of(replace(ffn, dp_attn=1)) if at.model.is_moe else text_of(ffn)
    if full := too_full(dict(zip(("attention", "FFN"), found.memory, strict=True))):
        typer.echo(f"{full}; the times below are those of GPUs with room for it\n")
    name = f"attention {text_of(replace(attention, ep=1))}, FFN {experts}"
    typer.echo(
        f"{at.model.name} on {at.system.name}, {at.precision.name} ({at.profile.name}): decode over {name}, {micro} "
        f"micro-batches, batch {batch}, {lengths.context:,.0f} cached tokens each"
    )
    typer.echo(f"\nTTL {time_text(float(step.ttl))} = {1 / float(step.ttl):.4g} tokens/s/user")
    typer.echo(f"attention ranks wait {float(step.attention_idle):.0%} of it, FFN ranks {float(step.ffn_idle):.0%}")
    rows = [
        (row["kind"], row["layers"], *(time_text(row[name]) for name in ("attention", "ffn", "crossings", "period")))
        for row in records(found.layers)
    ]
    typer.echo("\na layer, one micro-batch; and what a layer of all micro-batches adds to TTL")
    print_table(rows, header=("layer", "layers", "attention", "FFN", "crossings", "adds"), numeric=(1, 2, 3, 4, 5))
    typer.echo("\nall layers, one micro-batch; and what TTL waits for")
    rest = [
        ("", name, "", time_text(seconds), f"{seconds / float(step.ttl):.1%}")
        for name, seconds in (("host", found.host), ("copies between pools", found.links))
    ]
    print_table([*_rows(found.parts), *rest], header=HEADER, numeric=(2, 3, 4))
    typer.echo("\nmemory of a GPU")
    cells = [
        (pool, f"{held / GB:.1f} GB", f"of {limit / GB:.1f} GB", f"{held / limit:.0%}")
        for pool, (held, limit) in zip(("attention", "FFN"), found.memory, strict=True)
    ]
    print_table(cells, numeric=(1, 3))
    if asked.energy:
        split = Split(attention, ffn, micro)
        spent = split_spent(at, at, split, lengths, float(sequences))
        rows = [
            (pool, f"{float(one.joules / one.seconds):.0f} W", f"{float(one.joules):.3g} J")
            for pool, one in zip(("attention", "FFN"), spent, strict=True)
        ]
        step_j = sum(int(pool.gpus) * float(one.joules) for pool, one in zip((attention, ffn), spent, strict=True))
        typer.echo(f"\nenergy of a step: {step_j:,.3g} J of all GPUs, {step_j / batch:.3g} J an output token")
        print_table(rows, header=("a GPU", "power", "energy"), numeric=(1, 2))
    if full:
        raise typer.Exit(INFEASIBLE)


def _explain_encode(at: Setup, text: str, *, energy: bool) -> None:
    if not text:
        raise InputError("--phase encode needs --images, such as 2x1120x1120")
    images = images_of(text)
    step = encode_step(at, images=images.images, height=images.height, width=images.width, cached=images.cached)
    found = encode_parts(step, images.height, images.width)
    typer.echo(
        f"{at.model.name} on {at.system.name} ({at.profile.name}): encoding {images.images} images of {images.height} "
        f"x {images.width} on one GPU, {step.tokens:,} tokens, {step.embedding_bytes / MB:.0f} MB of embeddings"
    )
    typer.echo(
        f"\nadded to FTL: {time_text(step.latency)}, of it {time_text(step.transfer)} to send the embeddings; a GPU "
        f"encodes {step.request_rate:.4g} requests/s"
    )
    print_table(_rows(found.parts), header=HEADER, numeric=(2, 3, 4))
    if energy:
        spent = encode_spent(step)
        typer.echo(f"energy: {spent.joules:.3g} J a request, {spent.joules / spent.seconds:.0f} W of the GPU")
    typer.echo("no encoder was measured: all parts are timed at fitted rates of bf16 GEMMs, attention among them")


def _rows(parts: pd.DataFrame) -> list[tuple[str, ...]]:
    ordered = parts.sort_values("waited", ascending=False, kind="stable")
    return [
        (
            row["pool"],
            row["operator"],
            time_text(row["seconds"]),
            time_text(row["waited"]) if row["waited"] else "hidden",
            f"{row['share']:.1%}",
            row["trust"],
            entries_of(row["source"]),
        )
        for row in records(ordered)
    ]
