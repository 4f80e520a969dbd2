// The page of a simulation: all runs compared, and a run over time.
"use strict";

const runName = (row) => [row.policy, row.deployment, row.trace, `x${plain(row.rate_scale)}`].join(" · ");
const MOST_RUNS = 8; // curves of a chart

class SimulationPage {
  constructor(data) {
    Object.assign(this, { data, runs: data.tables.summary.rows() });
    this.logs = true;
    this.fields = [
      ["policy", "policy"],
      ["deployment", "deployment"],
      ["trace", "trace"],
      ["rate_scale", "rate over the trace's"],
    ];
    const scales = this.valuesOf("rate_scale"),
      scale = scales.includes("1") ? "1" : scales[0];
    this.chosen = Object.fromEntries(
      this.fields.map(([name]) => [
        name,
        new Set(
          name === "policy" ? this.valuesOf(name) : name === "rate_scale" ? [scale] : this.valuesOf(name).slice(0, 1),
        ),
      ]),
    );
    this.run = 0;
  }

  valuesOf(name) {
    return [...new Set(this.runs.map((run) => this.value(run, name)))];
  }

  value(run, name) {
    return name === "rate_scale" ? plain(run[name]) : run[name];
  }

  build() {
    const chart = (label, height = 260, sync = null) =>
      new Chart({
        label: `${label}. Arrow keys go from point to point.`,
        height,
        sync,
        tip: (layer, index) => [
          el("strong", {}, layer.name),
          el("p", {}, `${layer.told(layer.x[index])}: ${layer.says(layer.y[index])}`),
        ],
      });
    this.charts = {
      ttft: chart("Time to first token"),
      tpot: chart("Time per output token"),
      attainment: chart("Requests inside the SLO over the rate"),
      goodput: chart("Goodput over the rate"),
      first: chart("TTFT over time", 240, "time"),
      gap: chart("TPOT over time", 240, "time"),
      gpus: chart("GPUs by role", 220, "time"),
      load: chart("Arrivals and completions", 220, "time"),
      queue: chart("Requests waiting and running", 220, "time"),
      memory: chart("KV blocks in use", 220, "time"),
    };
    const filters = this.fields
      .filter(([name]) => this.valuesOf(name).length > 1)
      .map(([name, label]) => {
        const counts = new Map();
        this.runs.forEach((run) => counts.set(this.value(run, name), (counts.get(this.value(run, name)) || 0) + 1));
        return filterGroup(label, this.valuesOf(name), counts, this.chosen[name], () => this.update());
      });
    this.picker = el("div", { class: "tools" });
    this.heading = el("p", { class: "hint" });
    this.tiles = el("div", { class: "tiles" });
    this.decisions = el("div");
    this.table = runsTable(this.runs, (place) => this.choose(place));
    const figure = (name, title) =>
      el(
        "div",
        {},
        el(
          "div",
          { class: "tools" },
          el("h3", {}, title),
          el(
            "span",
            { class: "exports" },
            exportButtons(
              this.charts[name],
              () => `${this.data.facts.name}: ${title}`,
              `${this.data.facts.name}-${name}`,
            ),
          ),
        ),
        this.charts[name].node,
      );
    const severalRates = this.valuesOf("rate_scale").length > 1;
    return [
      section(
        "latencies",
        "Latencies",
        "Percentiles over all completed requests of each run; the SLO is dashed.",
        el(
          "div",
          { class: filters.length ? "explorer" : "" },
          filters.length
            ? el(
                "details",
                { class: "side", open: innerWidth >= 900 },
                el("summary", {}, "Filters"),
                el("div", { class: "filters" }, filters),
              )
            : null,
          el(
            "div",
            {},
            el(
              "div",
              { class: "tools" },
              toggle("log latency", true, (on) => {
                this.logs = on;
                this.update();
              }),
            ),
            el("div", { class: "pair" }, figure("ttft", "TTFT"), figure("tpot", "TPOT")),
          ),
        ),
      ),
      severalRates
        ? section(
            "rates",
            "Over the rate",
            "All rates of the traces and deployments chosen.",
            el("div", { class: "pair" }, figure("attainment", "requests inside the SLO"), figure("goodput", "goodput")),
          )
        : null,
      section(
        "summary",
        "Runs",
        "A row a run. Sort by a head; click a row to see the run over time.",
        csvTools(this.data.facts.name, () => this.data.tables.summary.csv(this.visible)),
        this.table.node,
      ),
      section(
        "time",
        "A run over time",
        null,
        this.picker,
        this.heading,
        this.tiles,
        el(
          "div",
          { class: "pair" },
          figure("first", "TTFT by arrival"),
          figure("gap", "TPOT by arrival"),
          figure("gpus", "GPUs by role"),
          figure("load", "arrivals and completions"),
          figure("queue", "requests waiting and running"),
          figure("memory", "KV blocks in use"),
        ),
        this.decisions,
      ),
      plainSection(
        this.data.tables.capacity,
        "capacity",
        "Serving capacity",
        "The highest rate at which each policy keeps its aim.",
      ),
      plainSection(this.data.tables.classes, "classes", "Classes of requests", "What each class of requests got."),
      this.data.facts.notes.length
        ? section(
            "notes",
            "Notes",
            null,
            el(
              "ul",
              {},
              this.data.facts.notes.map((line) => el("li", {}, line)),
            ),
          )
        : null,
    ];
  }

  colour(run) {
    return this.ink(`c${this.valuesOf("policy").indexOf(run.policy) % COLOURS}`);
  }

  dash(run) {
    return DASHES[
      (this.valuesOf("deployment").indexOf(run.deployment) +
        Math.floor(this.valuesOf("policy").indexOf(run.policy) / COLOURS)) %
        DASHES.length
    ];
  }

  label(run) {
    return this.fields
      .filter(([name]) => this.chosen[name].size > 1 || name === "policy")
      .map(([name]) => (name === "rate_scale" ? `x${this.value(run, name)}` : this.value(run, name)))
      .join(" · ");
  }

  ink(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  }

  update() {
    const passes = (run, but) =>
      this.fields.every(([name]) => name === but || this.chosen[name].has(this.value(run, name)));
    this.visible = this.runs.map((run, place) => (passes(run) ? place : -1)).filter((place) => place >= 0);
    this.table.show(this.visible);
    this.spread("ttft", "ttft_s", "TTFT [s]", seconds, (run) => run.slo_ttft_s);
    this.spread("tpot", "tpot_s", "TPOT [s]", seconds, (run) => run.slo_tpot_s);
    this.overRate("attainment", "slo_attainment", "requests inside the SLO [%]", 100, passes);
    this.overRate("goodput", "goodput_requests_per_s", "goodput [requests/s]", 1, passes);
    if (!this.visible.includes(this.run) && this.visible.length) this.run = this.visible[0];
    this.picker.replaceChildren(
      menu(
        "run",
        this.visible.map((place) => [String(place), runName(this.runs[place])]),
        String(this.run),
        (place) => {
          this.run = Number(place);
          this.overTime();
        },
      ),
    );
    this.overTime();
  }

  choose(place) {
    this.run = place;
    this.picker.querySelector("select").value = String(place);
    this.overTime();
    document.getElementById("time").scrollIntoView();
  }

  /** Latencies at all shares of the requests, a curve a run. */
  spread(name, column, label, format, limit) {
    const table = this.data.tables.spread;
    if (!table) return;
    const layers = this.visible.slice(0, 3 * MOST_RUNS).map((place) => {
      const rows = table.rowsWhere("run", place);
      return {
        kind: "line",
        name: this.label(this.runs[place]),
        colour: this.colour(this.runs[place]),
        dash: this.dash(this.runs[place]),
        width: 1.8,
        x: rows.map((row) => 100 * table.at("share", row)),
        y: rows.map((row) => table.at(column, row)),
        told: (share) => `p${plain(share, 4)}`,
        says: format,
      };
    });
    const at = this.visible.length ? limit(this.runs[this.visible[0]]) : NaN;
    this.charts[name].show({
      x: { label: "percentile of the completed requests", log: false, top: 100 },
      y: { label, log: this.logs, limits: [{ at, label: `SLO ${format(at)}` }], format: (value) => plain(value) },
      layers,
    });
  }

  overRate(name, column, label, factor, passes) {
    const groups = new Map();
    this.runs.forEach((run) => {
      if (passes(run, "rate_scale")) {
        const key = `${run.policy}|${run.deployment}|${run.trace}`;
        if (!groups.has(key)) groups.set(key, []);
        groups.get(key).push(run);
      }
    });
    const layers = [...groups.values()].map((runs) => {
      runs.sort((a, b) => a.rate_scale - b.rate_scale);
      return {
        kind: "line",
        name: this.label(runs[0]).replace(/ · x[\d.]+$/, ""),
        colour: this.colour(runs[0]),
        dash: this.dash(runs[0]),
        width: 1.8,
        size: 6,
        x: runs.map((run) => run.rate_scale),
        y: runs.map((run) => factor * run[column]),
        told: (scale) => `rate x ${plain(scale)}`,
        says: (value) => plain(value, 4),
      };
    });
    this.charts[name].show({
      x: { label: "request rate over that of the trace", log: false },
      y: { label, log: false, top: factor === 100 ? 102 : undefined },
      layers,
    });
  }

  overTime() {
    const run = this.runs[this.run],
      { over_time: bins, samples } = this.data.tables;
    if (!run || !bins) return;
    this.heading.textContent = `${runName(run)}; ${count(run.requests)} requests in ${seconds(run.duration_s)}, seed ${run.seed}`;
    const tile = (value, words, kind = "") =>
      el("div", { class: "tile" }, el("b", { class: kind }, value), el("span", {}, words));
    this.tiles.replaceChildren(
      tile(percent(run.slo_attainment, 4), "of the requests inside the SLO"),
      tile(`${plain(run.goodput_requests_per_s)}/s`, "goodput, requests"),
      tile(seconds(run.ttft_p90_s), "TTFT p90", run.ttft_p90_s <= run.slo_ttft_s ? "holds" : "fails"),
      tile(seconds(run.tpot_p90_s), "TPOT p90", run.tpot_p90_s <= run.slo_tpot_s ? "holds" : "fails"),
      tile(plain(run.gpu_hours), "GPU-hours"),
      tile(percent(run.utilisation), "utilisation"),
      tile(count(run.flips), "changes of roles"),
      tile(count(run.preemptions), "preemptions"),
    );
    const series =
      (table, rows, kind) =>
      (column, name, colour, factor = 1, says = (value) => plain(value, 4)) => ({
        kind,
        name,
        colour: this.ink(colour),
        width: 1.8,
        x: rows.map((row) => table.at("time_s", row)),
        y: rows.map((row) => factor * table.at(column, row)),
        told: seconds,
        says,
      });
    const inBins = series(bins, bins.rowsWhere("run", this.run), "line"),
      sampled = samples.rowsWhere("run", this.run),
      steps = series(samples, sampled, "step"),
      lines = series(samples, sampled, "line");
    const time = { label: "time [s]", log: false };
    const latency = (name) =>
      ["p50", "p90", "p99"].map((share, place) => inBins(`${name}_${share}_s`, share, `c${place}`, 1, seconds));
    const limit = (at) => [{ at, label: `SLO ${seconds(at)}` }];
    this.charts.first.show({
      x: time,
      y: { label: "TTFT [s]", log: this.logs, limits: limit(run.slo_ttft_s) },
      layers: latency("ttft"),
    });
    this.charts.gap.show({
      x: time,
      y: { label: "TPOT [s]", log: this.logs, limits: limit(run.slo_tpot_s) },
      layers: latency("tpot"),
    });
    this.charts.gpus.show({
      x: time,
      y: { label: "GPUs", log: false },
      layers: [
        steps("prefill_gpus", "prefill", "c0"),
        steps("decode_gpus", "decode, or both", "c1"),
        { ...steps("gpus", "held", "soft"), dash: [3, 3] },
      ],
    });
    this.charts.load.show({
      x: time,
      y: { label: "requests/s", log: false },
      layers: [inBins("arrivals_per_s", "arrive", "c0"), inBins("finished_per_s", "finish", "c1")],
    });
    this.charts.queue.show({
      x: time,
      y: { label: "requests", log: false },
      layers: [lines("queued", "wait for prefill", "c1"), lines("running", "run", "c0")],
    });
    this.charts.memory.show({
      x: time,
      y: { label: "KV blocks in use [%]", log: false },
      layers: [lines("kv_use", "KV blocks", "c2", 100)],
    });
    this.decisions.replaceChildren(...decisionsOf(this.data.tables.decisions, run));
  }
}

function simulationPage(data) {
  const page = new SimulationPage(data),
    parts = page.build();
  return { parts, ready: () => page.update(), redraw: () => page.update() };
}
