// A chart: uPlot makes axes, grid and zoom; layers of lines, dots and bands are drawn into it. Mouse, touch and keys reach
// the nearest point; nothing else on the page knows pixels.
"use strict";

const REACH = 40; // of the pointer to a point [CSS px]

class Chart {
  /** `options`: label of the chart; `tip(layer, index)` gives nodes; `pick(layer, index)` is told of a click or Enter. */
  constructor({ label, height = 440, tip = null, pick = null, sync = null }) {
    Object.assign(this, { label, height, tip, pick, sync });
    this.at = null; // layer and index under the pointer or the keys
    this.legend = el("ul", { class: "legend", "aria-label": "Legend" });
    this.stage = el("div", {
      class: "stage",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "chart",
      "aria-label": label,
    });
    this.card = el("div", { class: "tip", hidden: true });
    this.node = el("figure", { class: "chart" }, this.legend, this.stage);
    this.stage.addEventListener("keydown", (event) => this.key(event));
    this.stage.addEventListener("blur", () => this.leave());
    new ResizeObserver(() => this.resize()).observe(this.stage);
  }

  show(picture) {
    this.picture = picture;
    this.at = null;
    this.draw();
    this.legend.replaceChildren(
      ...named(picture.layers).map((layer) =>
        el(
          "li",
          {},
          el("span", {
            class: `key ${layer.kind}`,
            vars: { "--key": layer.colour, "--dash": (layer.dash || []).length ? "dashed" : "solid" },
          }),
          layer.name,
        ),
      ),
    );
  }

  draw() {
    const { x, y, layers } = this.picture;
    if (this.plot) this.plot.destroy();
    const style = getComputedStyle(document.documentElement);
    this.ink = (name) => style.getPropertyValue(`--${name}`).trim();
    const ends = { x: rangeOf(layers, "x", x), y: rangeOf(layers, "y", y) };
    const axis = (name, told) => ({
      stroke: this.ink("soft"),
      font: `12px ${FONT}`,
      labelFont: `12px ${FONT}`,
      label: told.label,
      labelSize: 26,
      grid: { stroke: this.ink("grid"), width: 1 },
      ticks: { show: false },
      size:
        name === "x"
          ? 30
          : (plot, values) => Math.max(46, 14 + 7 * Math.max(0, ...(values || []).map((each) => each.length))),
      gap: 6,
      splits: told.log ? (plot) => logTicks(plot.scales[name].min, plot.scales[name].max) : undefined,
      filter: (plot, ticks) => ticks,
      space: name === "x" ? 64 : 36,
      values: (plot, ticks) => ticks.map((tick) => (told.format || tickText)(tick)),
    });
    const scale = (name, told) => ({ time: false, distr: told.log ? 3 : 1, range: () => ends[name] });
    this.plot = new uPlot(
      {
        width: this.stage.clientWidth || 600,
        height: this.height,
        padding: [14, 18, 0, 0],
        legend: { show: false },
        cursor: {
          x: false,
          y: false,
          points: { show: false },
          drag: { x: true, y: true, uni: 24, dist: 8 },
          sync: this.sync ? { key: this.sync, scales: ["x", null] } : undefined,
        },
        scales: { x: scale("x", x), y: scale("y", y) },
        axes: [axis("x", x), axis("y", y)],
        series: [{}, { paths: () => null, points: { show: false } }],
        hooks: { draw: [(plot) => this.paint(plot)] },
      },
      [ends.x, ends.y],
      this.stage,
    );
    this.ring = el("div", { class: "ring", hidden: true });
    this.pins = el("div", { class: "pins" });
    this.plot.over.append(this.ring, this.pins);
    this.stage.append(this.card);
    let from = null;
    this.plot.over.addEventListener("mousemove", (event) => this.move(event.offsetX, event.offsetY));
    this.plot.over.addEventListener("mouseleave", () => this.leave());
    this.plot.over.addEventListener("mousedown", (event) => {
      from = [event.offsetX, event.offsetY];
    });
    this.plot.over.addEventListener("click", (event) => {
      if (from && Math.hypot(event.offsetX - from[0], event.offsetY - from[1]) > 5) return;
      this.move(event.offsetX, event.offsetY);
      if (this.at && this.pick) this.pick(this.at.layer, this.at.index);
    });
  }

  resize() {
    const width = this.stage.clientWidth;
    if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.height });
  }

  paint(plot) {
    const { left, top, width, height } = plot.bbox;
    this.view = viewOf(
      this.picture,
      { left, top, width, height },
      { x: [plot.scales.x.min, plot.scales.x.max], y: [plot.scales.y.min, plot.scales.y.max] },
    );
    drawLayers(new CanvasPen(plot.ctx, uPlot.pxRatio), this.view, this.picture, this.ink);
    this.place();
  }

  /** The nearest point that answers to the pointer. */
  nearest(x, y) {
    const ratio = uPlot.pxRatio,
      atX = x * ratio + this.plot.bbox.left,
      atY = y * ratio + this.plot.bbox.top;
    let best = (REACH * ratio) ** 2,
      found = null;
    for (const layer of this.picture.layers) {
      if (layer.silent || layer.kind === "band") continue;
      const { px, py } = layer,
        handicap = layer.kind === "dots" ? 2 : 1; // a frontier goes before the points beside it
      for (let i = 0; i < px.length; i++) {
        const away = ((px[i] - atX) ** 2 + (py[i] - atY) ** 2) * handicap;
        if (away < best) {
          best = away;
          found = { layer, index: i };
        }
      }
    }
    return found;
  }

  move(x, y) {
    const found = this.nearest(x, y);
    if (!found) return this.leave();
    if (!this.at || found.layer !== this.at.layer || found.index !== this.at.index) {
      this.at = found;
      this.tell();
    }
    return undefined;
  }

  leave() {
    this.at = null;
    this.ring.hidden = true;
    this.card.hidden = true;
  }

  position(layer, index) {
    const ratio = uPlot.pxRatio,
      { left, top, width, height } = this.plot.bbox;
    const x = (layer.px[index] - left) / ratio,
      y = (layer.py[index] - top) / ratio;
    return x < -1 || y < -1 || x > width / ratio + 1 || y > height / ratio + 1 ? null : [x, y];
  }

  tell() {
    const { layer, index } = this.at,
      place = this.position(layer, index);
    this.ring.hidden = !place;
    if (!place) return;
    this.ring.style.transform = `translate(${place[0]}px, ${place[1]}px)`;
    this.ring.style.setProperty("--key", layer.colour);
    if (!this.tip) return;
    this.card.replaceChildren(...this.tip(layer, index));
    this.card.hidden = false;
    const over = this.plot.over,
      room = this.stage.clientWidth,
      wide = this.card.offsetWidth,
      high = this.card.offsetHeight;
    const x = place[0] + over.offsetLeft,
      y = place[1] + over.offsetTop;
    const left = x + 16 + wide < room ? x + 16 : Math.max(4, x - 16 - wide);
    this.card.style.transform = `translate(${left}px, ${Math.max(4, Math.min(y - high / 2, this.height - high - 4))}px)`;
  }

  /** Keep rings around points that the page has pinned. */
  mark(marked) {
    this.marked = marked;
    this.place();
  }

  place() {
    if (!this.pins) return;
    this.pins.replaceChildren(
      ...(this.marked || []).map(({ x, y, name }) => {
        const ratio = uPlot.pxRatio,
          { left, top } = this.plot.bbox;
        const at = [(this.view.x(x) - left) / ratio, (this.view.y(y) - top) / ratio];
        if (!at.every(Number.isFinite)) return el("span");
        const pin = el("span", { class: "pin" }, name);
        pin.style.transform = `translate(${at[0]}px, ${at[1]}px)`;
        return pin;
      }),
    );
    if (this.at) this.tell();
  }

  key(event) {
    const lines = this.picture.layers.filter(
      (layer) => !layer.silent && layer.kind !== "dots" && layer.kind !== "band" && layer.x.length,
    );
    if (!lines.length || event.ctrlKey || event.metaKey || event.altKey) return;
    const now = this.at && lines.includes(this.at.layer) ? this.at : null;
    const line = now ? lines.indexOf(now.layer) : 0,
      index = now ? now.index : -1;
    const moves = {
      ArrowRight: () => [line, Math.min(index + 1, lines[line].x.length - 1)],
      ArrowLeft: () => [line, Math.max(index - 1, 0)],
      ArrowDown: () => this.beside(lines, line, index, now ? 1 : 0),
      ArrowUp: () => this.beside(lines, line, index, now ? -1 : 0),
      Home: () => [line, 0],
      End: () => [line, lines[line].x.length - 1],
    };
    if (moves[event.key]) {
      const [chosen, place] = moves[event.key]();
      this.at = { layer: lines[chosen], index: place };
      this.tell();
      say(`${lines[chosen].name || ""} ${this.card.innerText.replaceAll("\n", ", ")}`);
    } else if ((event.key === "Enter" || event.key === " ") && this.at) {
      if (this.pick) this.pick(this.at.layer, this.at.index);
    } else if (event.key === "0") this.reset();
    else if (event.key === "Escape") this.leave();
    else return;
    event.preventDefault();
  }

  /** The point of the next line that is nearest in x. */
  beside(lines, line, index, step) {
    const chosen = (line + step + lines.length) % lines.length,
      x = index < 0 ? -Infinity : lines[line].x[index];
    let best = 0;
    lines[chosen].x.forEach((value, place) => {
      if (Math.abs(value - x) < Math.abs(lines[chosen].x[best] - x)) best = place;
    });
    return [chosen, best];
  }

  reset() {
    this.draw();
  }

  /** What is shown now, zoom included. */
  get ends() {
    const { x, y } = this.plot.scales;
    return { x: [x.min, x.max], y: [y.min, y.max] };
  }
}
