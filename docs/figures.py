"""The pictures of README and docs: ``python docs/figures.py`` computes and draws them into ``docs/img/``.

Every picture is computed from the shipped specs; ``scaling`` alone is drawn from measured times. Equal versions of the
libraries give equal bytes. Those named ``attention_...`` compute a sweep of minutes in ``build/`` first. ``--check``
draws beside them, and names each stored picture that says something else, in its words and numbers or its curves.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the package of this tree

import disagg_sim as ds  # noqa: E402
from disagg_sim.report.roofline import COLOURS, STYLE, blank_figure, breakdown_figure  # noqa: E402
from disagg_sim.report.words import mapping_text  # noqa: E402
from disagg_sim.units import GB, MS  # noqa: E402
from docs import attention_figures, scaling_figure  # noqa: E402
from docs.attention_figures import MARKS, X_LABEL, X  # noqa: E402
from docs.computed import reuse  # noqa: E402
from docs.computed.headline import AT, colocated, disaggregated, gain, gain_band  # noqa: E402

FOLDER = ROOT / "docs" / "img"
Y = "tokens_per_s_per_gpu"
GREY, INK = "#555555", "#222222"
#: Plain SVG: text as paths, no date, and names of elements that do not depend on the process.
SVG = {"svg.fonttype": "path", "svg.hashsalt": "disagg-sim", "figure.facecolor": "white"}


def frontier() -> Any:
    """Frontiers of the headline case, disaggregated and co-located, with 80 % bands and the gain at one speed."""
    found = {"disaggregated": disaggregated(), "co-located": colocated()}
    both = pd.concat([points.assign(mode=mode) for mode, points in found.items()], ignore_index=True)
    band = ds.uncertainty(pd.concat(found.values()), samples=1000, seed=0).frontier(np.arange(8, 132, 3.0))
    band["mode"] = band["mode"].where(band["mode"] == "disaggregated", "co-located")
    figure = blank_figure((9.0, 5.0))
    axes = figure.add_subplot()
    ends = {}
    for mode, colour, line, mark in zip(found, COLOURS, ("-", "--"), MARKS, strict=False):
        front = ds.pareto_front(both[both["mode"] == mode])
        sure = band[band["mode"] == mode].groupby(X)[[f"{Y}_p10", f"{Y}_p90"]].max()
        sure = sure[sure.index >= front[X].min()]
        axes.fill_between(sure.index, sure[f"{Y}_p10"], sure[f"{Y}_p90"], color=colour, alpha=0.13, linewidth=0)
        axes.plot(front[X], front[Y], line + mark, color=colour, markersize=3.5)
        ends[mode] = front[front[X] >= AT].iloc[0] if front[X].is_monotonic_increasing else None
    high, low = (float(ds.curve(both[both["mode"] == mode]).at(AT)) for mode in found)
    axes.annotate("", (AT, high), (AT, low), arrowprops={"arrowstyle": "<->", "color": INK, "linewidth": 1.4})
    least, most = gain_band()
    text = f"{gain():.1f}× the throughput\nat {AT:g} tokens/s/user\n(80 % band: {least:.1f} to {most:.1f}×)"
    axes.annotate(text, (72, 0.5 * high + 0.5 * low), va="center", color=INK, fontsize=10.5)
    best, other = ends["disaggregated"], ends["co-located"]
    design = (
        f"at {AT:g}: prefill {mapping_text(best, 'prefill')}, {best['prefill_instances']:.0f} instances\n"
        f"and decode {mapping_text(best, 'decode')}, batch {best['decode_batch']:,.0f}, one instance"
    )
    axes.annotate("disaggregated", (60, 1290), color=COLOURS[0], fontsize=12.5, fontweight="bold", va="bottom")
    axes.annotate(design, (60, 1270), color=COLOURS[0], fontsize=9.5, va="top")
    axes.annotate("co-located", (3, 300), color=COLOURS[1], fontsize=12.5, fontweight="bold", va="bottom")
    design = f"at {AT:g}: {mapping_text(other, 'decode')}, batch {other['decode_batch']:,.0f}"
    axes.annotate(design, (3, 280), color=COLOURS[1], fontsize=9.5, va="top")
    axes.annotate(
        "shaded: 80 % bands", (1, 1), xycoords="axes fraction", ha="right", va="top", color=GREY, fontsize=9.5
    )
    title = "DeepSeek-R1 (NVFP4) on GB200 NVL72, 16,384 tokens in, 2,048 out, first token within 10 s"
    axes.set_title(title, loc="left", pad=10)
    axes.set(xlabel=X_LABEL, ylabel="throughput [output tokens/s/GPU, all GPUs]", xlim=(0, 130), ylim=(0, None))
    return figure


#: What an operator waits for, in words and colour.
RESOURCES = {
    "hbm": ("HBM bandwidth", COLOURS[0]),
    "compute": ("compute", COLOURS[1]),
    "nvlink": ("NVLink", COLOURS[2]),
    "latency": ("latency of kernels", COLOURS[4]),
    "host": ("host", "#999999"),
}
SHOWN = 10  # operators that have a bar of their own


def breakdown() -> Any:
    """One decode step of the headline design, operator by operator, with the fit behind each time."""
    front = ds.pareto_front(disaggregated())
    best = front[front[X] >= AT].iloc[[0]]
    parts = ds.breakdown(best).latency(best.index[0], "ttl")
    rest = {**parts[SHOWN:].sum(numeric_only=True), "operator": f"{len(parts) - SHOWN} others", "source": ""}
    parts = pd.concat([parts[:SHOWN], pd.DataFrame([rest])], ignore_index=True)
    names = parts["operator"].mask(parts["kind"] == "gemm", "GEMM " + parts["operator"])
    figure = blank_figure((9.0, 4.8))
    axes = figure.add_subplot()
    axes.grid(axis="y", visible=False)
    left = np.zeros(len(parts))
    for resource, (label, colour) in RESOURCES.items():
        width = parts[f"{resource}_s"].to_numpy(dtype=float) / MS
        axes.barh(parts.index, width, left=left, color=colour, label=label, height=0.68)
        left += width
    ideal = parts["ideal_s"].to_numpy(dtype=float) / MS
    axes.plot(ideal, parts.index, "|", color="black", markersize=15, markeredgewidth=2, label="speed of light")
    for row, (time, share, source) in enumerate(zip(left, parts["share"], parts["source"], strict=True)):
        axes.text(
            time + 0.1, row, f"{time:.2f} ms, {share:.0%}".replace("%", " %"), va="center", fontsize=9.5, color=INK
        )
        place = source.partition("; ")[0].rpartition("/")[2].partition(" ")[0]
        axes.text(
            1.0, row, place, va="center", ha="right", fontsize=9, color=GREY, transform=axes.get_yaxis_transform()
        )
    axes.text(
        1.0,
        -0.95,
        "file and line of the fit",
        ha="right",
        fontsize=9,
        color=GREY,
        style="italic",
        transform=axes.get_yaxis_transform(),
    )
    axes.set_yticks(parts.index, names)
    axes.set_xticks(range(0, 9, 2))
    axes.set(xlabel="time in one decode step [ms]", xlim=(0, left.max() * 1.6), ylim=(len(parts) - 0.4, -1.2))
    axes.legend(loc="lower center", bbox_to_anchor=(0.53, 0.02), fontsize=9.5)
    title = f"DeepSeek-R1 on GB200, {mapping_text(best.iloc[0], 'decode')}, batch {best['decode_batch'].iloc[0]:,.0f}"
    axes.set_title(f"{title}: a decode step of {left.sum():.1f} ms", loc="left", pad=8)
    return figure


#: Policies of the picture under load, as its legend names them.
POLICIES = {
    "vllm": "co-located (vLLM)",
    "disaggregated": "disaggregated, static",
    "dynamo_sla": "Dynamo, SLA planner",
    "dopd": "DOPD",
    "arrow": "Arrow",
    "dynaserve": "DynaServe",
}
RATES = (5.4, 10.8, 16.2, 18.9, 21.6, 24.3, 27.0, 29.7, 32.4)  # [request/s]
SLO = ds.Slo(ttft=2.0, tpot=0.05)  # [s]


def policies() -> Any:
    """Attainment and 90 % latencies of serving policies on eight GPUs as the request rate grows."""
    pair = ds.Sharding(tp_attn=2, tp_ffn=2)
    two, four = ((ds.Replicas(mapping=pair, instances=count),) for count in (2, 4))
    at = ds.setup("llama_3_1_70b", "h100_sxm", "fp8")
    eight = ds.ServedDeployment(name="eight", gpus=8, prefill=two, decode=two, colocated=four, pairs=four, setup=at)
    lengths = ds.load_traffic("azure_2023_conversation").cases[0]
    slowest = ds.synthetic_trace(rate=RATES[0], requests=4000, lengths=lengths, seed=0)
    figure = blank_figure((9.0, 6.6))
    top, low = figure.subfigures(2, 1, height_ratios=(1.0, 1.05))
    share, (first, gap) = top.subplots(), low.subplots(1, 2)
    for (name, label), colour, mark in zip(POLICIES.items(), COLOURS, MARKS, strict=False):
        runs = [ds.simulate(eight, slowest.scaled(rate / RATES[0]), name, slo=SLO).summary() for rate in RATES]
        line = "--" if name == "dynamo_sla" else "-"  # so that static disaggregation shows behind it
        look = {"color": colour, "marker": mark, "markersize": 4.5, "label": label, "linestyle": line}
        share.plot(RATES, [100 * run.slo_attainment for run in runs], **look)
        first.plot(RATES, [run.ttft_p90_s for run in runs], **look)
        gap.plot(RATES, [run.tpot_p90_s / MS for run in runs], **look)
    share.set(ylabel="requests inside both limits [%]", ylim=(0, 104))
    share.set_title(
        "Llama-3.1-70B (FP8) on eight H100, lengths of the Azure 2023 conversation trace, Poisson arrivals", loc="left"
    )
    share.legend(loc="lower left")
    first.set(ylabel="TTFT, 90 % of requests below [s]", yscale="log")
    gap.set(ylabel="TPOT, 90 % of requests below [ms]", ylim=(0, None))
    for panel, limit, text in ((first, SLO.ttft, "limit 2 s"), (gap, SLO.tpot / MS, "limit 50 ms")):
        panel.axhline(limit, color=GREY, linewidth=1.2, linestyle=(0, (4, 3)))
        panel.annotate(text, (RATES[0], limit), (2, 4), textcoords="offset points", color=GREY, fontsize=9.5)
    first.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    for panel in (share, first, gap):
        panel.set_xlabel("request rate [requests/s]")
    return figure


class Room(NamedTuple):
    """A room in the picture of the architecture: where its box is, and what it says."""

    left: float
    top: float
    width: float
    height: float
    said: str
    kind: int  # 0: files, 1: knowledge, 2: analytic, 3: simulation, 4: shell, 5: laboratory


TECHNIQUES = sorted(folder.name for folder in Path(ds.__file__).with_name("techniques").glob("[a-z]*"))
#: Every room of the package, in a grid of 12 columns; a room imports only rooms above it; techniques lie across them.
ROOMS = {
    "facts": Room(0, 1, 8, 1, "YAML to frozen specs: systems, fits, models, recipes, profiles", 1),
    "workload": Room(8, 1, 4, 2, "lengths, arrivals, traces", 1),
    "physics": Room(0, 2, 8, 1, "setup; counts of FLOP and bytes; times; memory; KV transfer", 1),
    "search": Room(0, 3, 12, 1, "every mapping and batch as arrays: grids, Pareto frontiers", 2),
    "serving": Room(0, 4, 8, 1, "co-located, piggybacked, disaggregated; rate matching; cost", 2),
    "certainty": Room(0, 5, 8, 1, "operators of a design, error bars, elasticities, extrapolation", 2),
    "simulation": Room(8, 4, 4, 2, "requests one by one:\ncompiled instances, policies", 3),
    "techniques": Room(
        12, 1, 2.6, 6, "availability\ncontext\nencode\nexperts\nprefill_delay\nprefix\nranks\nspeculation\nsplit", 2
    ),
    "planning": Room(0, 6, 12, 1, "one answer: what to deploy, how sure, what would change it", 2),
    "sweep": Room(0, 7, 8, 1, "YAML to cases, blocks, Parquet store, results, gate", 2),
    "scenario": Room(8, 7, 4, 1, "the same for simulations", 3),
    "report": Room(0, 8, 12, 1, "tables, figures, pages: the home of ms, GB and colours", 4),
    "launch": Room(0, 9, 12, 1, "commands and manifests of engines", 4),
    "cli": Room(0, 10, 12, 1, "commands, and the notebook interface: import disagg_sim", 4),
}
#: Beside the package.
LAB = {"lab": Room(0, 11.15, 12, 1, "in a clone: fits to measurements and their errors, claims of published papers", 5)}
FILES = {
    "hw_specs/  models/": Room(0, 0.36, 4.7, 0.62, "", 0),
    "traffic/  traces": Room(8, 0.36, 4, 0.62, "", 0),
    "sweeps/  scenarios/": Room(4.7, 0.36, 3.3, 0.62, "", 0),
}
FILLS = ("#F4F4F4", "#DCEBF5", "#E3F1EA", "#FBE9DA", "#EFE6F0", "#FFFFFF")
EDGES = ("#999999", COLOURS[0], COLOURS[2], COLOURS[1], "#8A5A8F", "#8A5A8F")


def architecture() -> Any:
    """The rooms of the package from facts down to commands."""
    figure = blank_figure((9.0, 8.2))
    axes = figure.add_subplot()
    axes.set(xlim=(-0.75, 14.65), ylim=(12.2, 0.3))
    axes.axis("off")
    for name, room in {**FILES, **ROOMS, **LAB}.items():
        x, y = room.left + 0.06, room.top + 0.12 * bool(room.kind)
        width, height = room.width - 0.12, room.height - 0.14
        box = FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=FILLS[room.kind],
            edgecolor=EDGES[room.kind],
            linewidth=1.1,
            linestyle="--" if room.kind in {0, 5} else "-",
        )
        axes.add_patch(box)
        middle = (x + width / 2, y + height / 2)
        if not room.said:
            axes.text(*middle, name, ha="center", va="center", fontsize=9.5, color=GREY)
            continue
        high = 0.18 + 0.15 * room.said.count("\n")
        axes.text(middle[0], middle[1] - high, name, ha="center", va="center", fontsize=12, fontweight="bold")
        axes.text(middle[0], middle[1] + 0.2, room.said, ha="center", va="center", fontsize=9.2, color=INK)
    arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.4}
    axes.annotate("", (-0.3, 12.05), (-0.3, 0.4), arrowprops=arrow)
    axes.text(-0.52, 5.5, "data flow down, imports go up", rotation=90, va="center", ha="center", color=GREY)
    return figure


def explain() -> Any:
    """The design of the page on ``disagg-sim explain``, taken apart."""
    at, mapping = ds.setup("deepseek_r1", "gb200_nvl72", "nvfp4_fp8kv"), ds.Sharding(dp_attn=32, ep=32)
    grid = ds.decode_grid(at, mapping, ds.lengths(16_384, 2_048), batch=[1024])
    return breakdown_figure(ds.breakdown(grid), 0)


#: Name of each picture's file, and what draws it.
#: Cases of the pictures of prefix reuse.
REUSED = ("DeepSeek-R1, GB200", "Llama-3.1-70B, H200")
WIDEST = {"DeepSeek-R1, GB200": 110.0, "Llama-3.1-70B, H200": 110.0}  # of the axis of speeds [token/s/user]


def reuse_frontiers() -> Any:
    """Frontiers at four cached shares, disaggregated and co-located."""
    figure = blank_figure((10.5, 4.6))
    both = figure.subplots(1, 2)
    for axes, case in zip(both, REUSED, strict=True):
        for share, colour in zip(reuse.SHARES, COLOURS, strict=False):
            found = reuse.modes(case, share)
            apart = ds.pareto_front(found["disaggregated"])
            shared = ds.pareto_front(pd.concat([found["colocated"], found["piggyback"]], ignore_index=True), by=())
            axes.plot(apart[X], apart[Y], "-", color=colour, label=f"{100 * share:.0f} % cached")
            axes.plot(shared[X], shared[Y], "--", color=colour)
        axes.set_title(case, loc="left", pad=8)
        axes.set(xlabel=X_LABEL, xlim=(0, WIDEST[case]), ylim=(0, None))
    both[0].set_ylabel("throughput [output tokens/s/GPU]")
    handles, _ = both[0].get_legend_handles_labels()
    lines = [mpl.lines.Line2D([], [], color=INK, linestyle=line) for line in ("-", "--")]
    both[1].legend([*handles, *lines], [*(h.get_label() for h in handles), "disaggregated", "co-located"], fontsize=9.5)
    return figure


def reuse_ratios() -> Any:
    """What a cached share does to the gain of disaggregation, to the pools and to the links."""
    figure = blank_figure((10.5, 3.9))
    panels = figure.subplots(1, 3)
    places = np.arange(len(reuse.SHARES))
    for (case, colour), mark in zip(zip(reuse.CASES, COLOURS, strict=False), MARKS, strict=False):
        best = [reuse.matched(case, share) for share in reuse.SHARES]
        pays = [reuse.gain_at(case, share) for share in reuse.SHARES]
        egress = [each["kv_egress_bytes_per_s_per_gpu"] / GB for each in best]
        ingress = [each["kv_ingress_bytes_per_s_per_gpu"] / GB for each in best]
        panels[0].plot(places, pays, "-" + mark, color=colour, label=case)
        panels[1].plot(places, [each["ctx_gen_gpu_ratio"] for each in best], "-" + mark, color=colour)
        panels[2].plot(places, egress, "-" + mark, color=colour)
        panels[2].plot(places, ingress, ":" + mark, color=colour, markersize=3.5)
    panels[0].axhline(1.0, color=GREY, linewidth=0.8)
    panels[0].set_ylim(0.9, 2.5)
    panels[0].legend(fontsize=8.5, loc="lower left", bbox_to_anchor=(0.0, 0.1))
    for axes in panels[1:]:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    titles = ("throughput over co-located", "prefill GPUs over decode GPUs", "KV, GB/s: sent (-), taken in (:)")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, loc="left", pad=8, fontsize=11)
        axes.set_xticks(places, [f"{100 * share:.0f} %" for share in reuse.SHARES])
        axes.set_xlabel("cached share of a prompt")
    return figure


FIGURES: dict[str, Callable[[], Any]] = {
    "frontier": frontier,
    "breakdown": breakdown,
    "explain": explain,
    "policies": policies,
    "architecture": architecture,
    "attention_frontiers": attention_figures.frontiers,
    "attention_transfer": attention_figures.transfer,
    "attention_ratio": attention_figures.ratio,
    "attention_gain": attention_figures.gain,
    "reuse_frontiers": reuse_frontiers,
    "reuse_ratios": reuse_ratios,
    "scaling": scaling_figure.scaling,
}


class Said(NamedTuple):
    """What a picture shows."""

    words: list[str]  # titles, labels, numbers at the axes and beside points
    curves: list[list[float]]  # coordinates of each line in the picture, x and y in turn


#: Text is drawn as paths, with the words in a comment before them; data are drawn inside the frame of their axes.
_WORDS, _CURVES = re.compile(r"<!-- (.*?) -->", re.DOTALL), re.compile(r'<path d="([^"]*)" clip-path=')
#: Least distance of curves that differ, as a picture is a few hundred wide. [pt]
APART = 1.0


def said(path: Path) -> Said:
    """Read the words and the curves of a picture."""
    text = path.read_text(encoding="utf-8")
    curves = [[float(word) for word in re.findall(r"-?\d+\.?\d*", found)] for found in _CURVES.findall(text)]
    return Said(words=_WORDS.findall(text), curves=curves)


def changed(name: str) -> list[str]:
    """Draw a picture anew, and say what differs in the stored one; empty where nothing does."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"{name}.svg"
        draw(name, path)
        old, new = said(FOLDER / path.name), said(path)
    if old.words != new.words:
        written = [word for word in old.words if word not in new.words]
        computed = [word for word in new.words if word not in old.words]
        return [f"{path.name}: written {written}, computed {computed}"]
    if [len(curve) for curve in old.curves] != [len(curve) for curve in new.curves]:
        return [f"{path.name}: the curves have other points than computed ones"]
    pairs = zip(np.concatenate(old.curves), np.concatenate(new.curves), strict=True) if old.curves else ()
    far = max((abs(one - other) for one, other in pairs), default=0.0)
    return [f"{path.name}: a curve is {far:.1f} pt away from the computed one"] if far >= APART else []


def draw(name: str, path: Path) -> None:
    """Draw one picture into a file; its ending says whether as SVG or PNG."""
    with mpl.rc_context({**STYLE, **SVG}):
        figure = FIGURES[name]()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})


def main() -> int:
    """Draw or check the pictures that are asked for."""
    parser = argparse.ArgumentParser(description="Compute and draw the pictures of README and docs.")
    parser.add_argument("names", nargs="*", choices=[[], *FIGURES], help="these alone; all by default")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder to draw into (default: docs/img)")
    parser.add_argument("--png", action="store_true", help="draw PNG in place of SVG")
    parser.add_argument("--check", action="store_true", help="draw nothing; exit 1 where a picture says something else")
    asked = parser.parse_args()
    if asked.check:
        lines = [line for name in asked.names or FIGURES for line in changed(name)]
        print("\n".join([*lines, f"{len(lines)} pictures differ"]))
        return int(bool(lines))
    for name in asked.names or FIGURES:
        path = asked.out / f"{name}.{'png' if asked.png else 'svg'}"
        draw(name, path)
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
