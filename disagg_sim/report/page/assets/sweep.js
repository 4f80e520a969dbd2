// The page of a sweep: filters, the frontier chart with its views, pinned designs, gains, tables, provenance.
"use strict";

class SweepPage {
  constructor(data) {
    Object.assign(this, { data, points: data.tables.points, unit: UNITS[data.facts.unit] || UNITS.gpu, pinned: [] });
    data.unit = this.unit;
    this.views = VIEWS(this.unit);
    this.state = {
      view: this.views[0],
      logX: false,
      logY: false,
      cloud: true,
      bands: this.hasBands(),
      colour: "",
      dash: "",
    };
    this.fields = FILTERS.filter(([name]) => this.points.has(name));
    this.chosen = Object.fromEntries(
      this.fields.map(([name]) => [
        name,
        new Set(ONE_AT_FIRST.includes(name) ? this.points.words(name).slice(0, 1) : this.points.words(name)),
      ]),
    );
    this.state.colour =
      ["system", "model", "precision", "variant", "mode"].find(
        (name) => this.chosen[name] && this.chosen[name].size > 1,
      ) || "mode";
    this.state.dash = this.state.colour === "mode" ? "variant" : "mode";
    this.titles = new Map();
    for (let row = 0; row < this.points.length; row++) {
      const name = this.points.at("case", row);
      if (!this.titles.has(name)) this.titles.set(name, caseTitle(this.points.row(row)));
    }
  }

  hasBands() {
    return (
      this.points.has("frontier_p10") && this.points.numbers("frontier_p10").some((value) => Number.isFinite(value))
    );
  }

  build() {
    const { facts: told } = this.data;
    this.chart = new Chart({
      label:
        "Frontiers. Arrow keys go from point to point and from curve to curve, Enter pins, 0 shows all, Escape leaves.",
      height: innerWidth < 700 ? 380 : 500,
      tip: (layer, index) => designTip(this.points.row(layer.rows[index]), this.unit),
      pick: (layer, index) => this.pin(layer.rows[index]),
    });
    this.cards = el("div", { class: "cards", id: "pinned" });
    this.shown = el("p", { class: "hint", id: "shown" });
    this.filters = el("div", { class: "filters" });
    this.fillFilters();
    this.gains = gainMap(this.data, this.titles);
    this.best = el("div");
    this.table = pointsTable(this.points, this.unit, (row) => this.pin(row));
    const name = () => `${told.name}-${this.state.view.key}`;
    const title = () => `${told.name}: ${this.state.view.words.toLowerCase()} against interactivity`;
    const look = [
      ["mode", "mode"],
      ...this.fields.filter(
        ([field]) => field !== "mode" && field !== "layouts" && this.points.words(field).length > 1,
      ),
    ];
    const tools = el(
      "div",
      { class: "tools" },
      choice(
        "view",
        this.views
          .filter((view) => !view.split || this.points.words("mode").includes("disaggregated"))
          .map((view) => [view.key, view.words]),
        this.state.view.key,
        (key) =>
          this.set(
            "view",
            this.views.find((view) => view.key === key),
          ),
      ),
      toggle("log x", this.state.logX, (on) => this.set("logX", on)),
      toggle("log y", this.state.logY, (on) => this.set("logY", on)),
      toggle("points beside", this.state.cloud, (on) => this.set("cloud", on)),
      this.hasBands() ? toggle("bands of 80 %", this.state.bands, (on) => this.set("bands", on)) : null,
      look.length > 1 ? menu("colour by", look, this.state.colour, (key) => this.set("colour", key)) : null,
      el(
        "span",
        { class: "exports" },
        el("button", { type: "button", on: { click: () => this.chart.reset() } }, "Show all"),
        exportButtons(this.chart, title, name()),
        saveButton("CSV", `${told.name}.csv`, "text/csv", () => this.points.csv(this.visible)),
      ),
    );
    const intro = `${count(told.counts.enumerated)} design points, ${count(told.counts.feasible)} feasible, ${count(told.frontier)} on the frontiers. Click a point to pin its deployment; drag to zoom.`;
    return [
      section(
        "frontier",
        "Frontiers",
        intro,
        el(
          "div",
          { class: "explorer" },
          el("details", { class: "side", open: innerWidth >= 900 }, el("summary", {}, "Filters"), this.filters),
          el("div", { class: "figure" }, tools, this.chart.node, this.shown),
        ),
        this.cards,
      ),
      section(
        "best",
        "Best designs",
        "The highest throughput that gives every user at least so many tokens per second, of the curves shown. Click one to pin it.",
        this.best,
      ),
      section(
        "gains",
        "Gain of disaggregation",
        "Throughput of the disaggregated frontier over the best co-located one, at interactivities of so many tokens/s/user; below it the probability that it is the better one, where error bars were computed.",
        this.gains.node,
      ),
      poolsSection(this.data.tables.pools, this.titles),
      section("points", "Points", "All points of the figure. Sort by a head; click a row to pin it.", this.table.node),
      rejectedSection(this.data.tables.rejected),
      provenanceSection(told.provenance),
    ];
  }

  fillFilters() {
    const counts = (name) => {
      const found = new Map(),
        numbers = this.points.numbers(name),
        words = this.points.words(name),
        rows = this.points.numbers("row");
      for (let row = 0; row < this.points.length; row++)
        if (rows[row] >= 0) found.set(words[numbers[row]], (found.get(words[numbers[row]]) || 0) + 1);
      return found;
    };
    this.filters.replaceChildren(
      ...this.fields.map(([name, label]) => {
        const found = counts(name),
          values = this.points.words(name).filter((value) => found.has(value));
        return filterGroup(label, values, found, this.chosen[name], () => this.update());
      }),
    );
  }

  set(key, value) {
    this.state[key] = value;
    if (key === "colour")
      this.state.dash =
        value === "mode"
          ? ["system", "variant"].find((name) => this.chosen[name] && this.points.words(name).length > 1) || ""
          : "mode";
    if (key === "view") {
      this.state.logY = Boolean(value.log);
      const box = document.querySelectorAll(".toggle input")[1];
      if (box) box.checked = this.state.logY;
    }
    this.update();
  }

  /** Rows that pass all filters, in order. */
  filtered() {
    const tests = this.fields.map(([name]) => {
      const chosen = this.chosen[name],
        pass = Uint8Array.from(this.points.words(name), (word) => (chosen.has(word) ? 1 : 0));
      return [this.points.numbers(name), pass, name];
    });
    const rows = [],
      frontier = this.points.numbers("row");
    for (let row = 0; row < this.points.length; row++)
      if (tests.every(([numbers, pass, name]) => pass[numbers[row]] || (name === "layouts" && frontier[row] < 0)))
        rows.push(row);
    return rows;
  }

  update() {
    const rows = this.filtered(),
      frontier = this.points.numbers("row"),
      split = this.state.view.split;
    const mode = this.points.numbers("mode"),
      apart = this.points.words("mode").indexOf("disaggregated");
    const mine = rows.filter((row) => !split || mode[row] === apart);
    this.front = mine.filter((row) => frontier[row] >= 0);
    this.visible = this.state.cloud ? mine : this.front;
    this.chart.show(this.picture(this.front, this.state.cloud ? mine.filter((row) => frontier[row] < 0) : []));
    this.markPins();
    this.gains.show(new Set(rows.map((row) => this.points.at("case", row))));
    this.bestTable();
    this.table.show(this.visible);
    this.shown.textContent = `${count(this.front.length)} points on ${count(this.lines)} curves${this.visible.length > this.front.length ? `, ${count(this.visible.length - this.front.length)} beside` : ""}.`;
    say(this.shown.textContent);
  }

  colourOf(row) {
    return this.chart.ink(`c${this.points.numbers(this.state.colour)[row] % COLOURS}`);
  }

  picture(front, beside) {
    const { view, bands } = this.state,
      x = this.points.numbers(X),
      y = this.points.numbers(view.column),
      scale = view.scale || 1;
    const value = scale === 1 ? (row) => y[row] : (row) => y[row] * scale;
    const style = getComputedStyle(document.documentElement);
    this.chart.ink = (name) => style.getPropertyValue(`--${name}`).trim();
    const layer = (rows, told) => ({
      rows,
      x: Float32Array.from(rows, (row) => x[row]),
      y: Float32Array.from(rows, value),
      ...told,
    });
    const groups = (rows, key) => {
      const found = new Map();
      for (const row of rows) {
        const name = key(row);
        if (!found.has(name)) found.set(name, []);
        found.get(name).push(row);
      }
      return [...found.values()];
    };
    const colours = this.points.numbers(this.state.colour);
    const clouds = groups(beside, (row) => colours[row]).map((rows) =>
      layer(rows, { kind: "dots", colour: this.colourOf(rows[0]), size: 2.2, alpha: 0.28 }),
    );
    const cases = this.points.numbers("case"),
      modes = this.points.numbers("mode");
    const lines = groups(front, (row) => cases[row] * 16 + modes[row]).map((rows) => rows.sort((a, b) => x[a] - x[b]));
    this.lines = lines.length;
    const dash = this.state.dash && this.points.has(this.state.dash) ? this.points.numbers(this.state.dash) : null;
    const words = (row) =>
      [...new Set([this.state.colour, this.state.dash])]
        .filter((name) => name && this.chosen[name] && (this.chosen[name].size > 1 || name === "mode"))
        .map((name) => this.points.at(name, row))
        .join(", ");
    const curves = lines.map((rows) =>
      layer(rows, {
        kind: "line",
        name: words(rows[0]),
        colour: this.colourOf(rows[0]),
        dash: dash ? DASHES[dash[rows[0]] % DASHES.length] : [],
        width: 1.8,
        size: 5,
      }),
    );
    const shaded =
      bands && view.bands && this.hasBands()
        ? curves
            .filter(({ rows }) => rows.some((row) => Number.isFinite(this.points.at("frontier_p10", row))))
            .map((curve) => {
              const rows = curve.rows.filter((row) => Number.isFinite(this.points.at("frontier_p10", row)));
              return {
                kind: "band",
                colour: curve.colour,
                x: Float32Array.from(rows, (row) => x[row]),
                low: Float32Array.from(rows, (row) => this.points.at("frontier_p10", row)),
                high: Float32Array.from(rows, (row) => this.points.at("frontier_p90", row)),
              };
            })
        : [];
    return {
      x: { label: "interactivity [tokens/s/user]", log: this.state.logX },
      y: { label: view.label, log: this.state.logY, limits: view.limits || [] },
      layers: [...clouds, ...shaded, ...curves],
    };
  }

  pin(row) {
    if (this.pinned.includes(row)) this.pinned = this.pinned.filter((each) => each !== row);
    else this.pinned = [...this.pinned, row].slice(-MOST_PINS);
    this.showPins();
    say(
      this.pinned.includes(row)
        ? `pinned: ${this.points.at("mode", row)}, ${plain(this.points.at(X, row))} tokens/s/user`
        : "unpinned",
    );
  }

  showPins() {
    this.cards.replaceChildren(
      ...this.pinned.map((row, place) => designCard(place + 1, this.points.row(row), this.data, () => this.pin(row))),
    );
    this.markPins();
  }

  markPins() {
    const { view } = this.state;
    this.chart.mark(
      this.pinned.map((row, place) => ({
        x: this.points.at(X, row),
        y: this.points.at(view.column, row) * (view.scale || 1),
        name: String(place + 1),
      })),
    );
  }

  bestTable() {
    const x = this.points.numbers(X),
      y = this.points.numbers(this.unit.column),
      cases = this.points.numbers("case"),
      modes = this.points.numbers("mode");
    const groups = new Map();
    for (const row of this.front) {
      const key = cases[row] * 16 + modes[row];
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    }
    const at = [0, 20, 50, 100];
    const cell = (rows, least) => {
      const best = rows
        .filter((row) => x[row] >= least)
        .reduce((found, row) => (found === null || y[row] > y[found] ? row : found), null);
      if (best === null) return "–";
      const p = this.points.row(best);
      return el(
        "button",
        {
          type: "button",
          class: "pick",
          title: poolsOf(p)
            .map(([role, words]) => `${role} ${words}`)
            .join("; "),
          on: { click: () => this.pin(best) },
        },
        plain(y[best]),
      );
    };
    this.best.replaceChildren(
      simpleTable(
        ["case", "mode", "best", ...at.slice(1).map((least) => `≥ ${least} tokens/s/user`)],
        [...groups.values()]
          .slice(0, 100)
          .map((rows) => [
            this.titles.get(this.points.at("case", rows[0])),
            this.points.at("mode", rows[0]),
            ...at.map((least) => cell(rows, least)),
          ]),
        [2, 3, 4, 5],
        `Best designs, ${this.unit.short}`,
      ),
    );
  }
}

function sweepPage(data) {
  const page = new SweepPage(data);
  const parts = page.build();
  return { parts, ready: () => page.update(), redraw: () => page.update() };
}
