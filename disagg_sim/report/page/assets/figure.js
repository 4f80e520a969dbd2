// What a chart draws, whatever it draws on: ticks, ranges, layers; and the whole figure with title and legend for a file.
"use strict";

/** Ticks of a logarithmic axis: 1, 2 and 5 times powers of ten, or the powers alone. */
function logTicks(low, high) {
  const steps = high / low > 1e4 ? [1] : high / low < 4 ? [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
    for (const step of steps) {
      const tick = Number((step * 10 ** power).toPrecision(3));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  return ticks;
}

/** A number beside an axis. */
const tickText = (value) => (Math.abs(value) >= 1e6 ? `${plain(value / 1e6)} M` : plain(value, 4));

/** Ends of an axis around its values. */
function rangeOf(layers, name, axis) {
  let low = Infinity,
    high = -Infinity;
  for (const layer of layers)
    for (const values of name === "y" ? [layer.y, layer.low, layer.high] : [layer.x])
      for (let i = 0; values && i < values.length; i++) {
        const value = values[i];
        if (Number.isFinite(value) && (!axis.log || value > 0)) {
          if (value < low) low = value;
          if (value > high) high = value;
        }
      }
  for (const limit of axis.limits || [])
    if (Number.isFinite(limit.at)) {
      low = Math.min(low, limit.at);
      high = Math.max(high, limit.at);
    }
  if (low > high) return axis.log ? [1, 10] : [0, 1];
  if (axis.log) return [low / 1.15, high * 1.15];
  return [Math.min(0, low), axis.top || high * 1.06 || 1];
}

/** Where values fall: a box, and a function for each axis. */
function viewOf(picture, box, ends) {
  const along = (name, start, length) => {
    const log = picture[name].log,
      f = log ? (value) => (value > 0 ? Math.log10(value) : NaN) : (value) => value;
    const low = f(ends[name][0]),
      per = length / (f(ends[name][1]) - low);
    return (value) => start + (f(value) - low) * per;
  };
  return { ...box, x: along("x", box.left, box.width), y: along("y", box.top + box.height, -box.height) };
}

/** Draw all layers; `px` and `py` of a layer keep where its points are. */
function drawLayers(pen, view, picture, ink) {
  const { left, top, width, height } = view;
  pen.within(left, top, width, height, () => {
    for (const layer of picture.layers) {
      const { kind, x, y, colour, dash, width: stroke, size, alpha = 1 } = layer;
      layer.px = Float32Array.from(x, view.x);
      if (kind === "band") {
        pen.area(layer.px, Float32Array.from(layer.low, view.y), Float32Array.from(layer.high, view.y), {
          colour,
          alpha: 0.15,
        });
        continue;
      }
      layer.py = Float32Array.from(y, view.y);
      if (kind === "step") pen.line(...stairs(layer.px, layer.py), { colour, dash, width: stroke, alpha });
      else if (kind !== "dots") pen.line(layer.px, layer.py, { colour, dash, width: stroke, alpha });
      if (kind === "dots" || size)
        pen.dots(layer.px, layer.py, { colour, size: size || 3, alpha, hollow: layer.hollow ? ink("panel") : "" });
    }
    const line = { colour: ink("soft"), width: 1.2, dash: [5, 4] };
    for (const limit of picture.y.limits || []) {
      pen.line([left, left + width], [view.y(limit.at), view.y(limit.at)], line);
      const above = view.y(limit.at) - top > 24 * pen.scale; // or the box would cut the words off
      pen.text(left + width - 6 * pen.scale, view.y(limit.at) + (above ? -9 : 10) * pen.scale, limit.label, {
        colour: ink("soft"),
        size: 11,
        anchor: "end",
      });
    }
    for (const limit of picture.x.limits || []) {
      pen.line([view.x(limit.at), view.x(limit.at)], [top, top + height], line);
      pen.text(view.x(limit.at) + 6 * pen.scale, top + 10 * pen.scale, limit.label, { colour: ink("soft"), size: 11 });
    }
  });
}

function stairs(px, py) {
  const xs = [],
    ys = [];
  for (let i = 0; i < px.length; i++) {
    if (i) {
      xs.push(px[i]);
      ys.push(py[i - 1]);
    }
    xs.push(px[i]);
    ys.push(py[i]);
  }
  return [xs, ys];
}

/** Layers with a name of their own, in order. */
const named = (layers) =>
  layers.filter((layer, place) => layer.name && layers.findIndex((other) => other.name === layer.name) === place);

/** Draw the whole figure by a pen without scale: title, legend, axes, layers. */
function drawFigure(pen, chart, title, [wide, high]) {
  const { picture, ink } = chart,
    legend = named(picture.layers),
    columns = wide > 700 ? 3 : 2;
  const head = 48 + 18 * Math.ceil(legend.length / columns),
    foot = 56,
    side = 78;
  const view = viewOf(
    picture,
    { left: side, top: head, width: wide - side - 20, height: high - head - foot },
    chart.ends,
  );
  pen.box(0, 0, wide, high, ink("panel"));
  pen.text(16, 22, title, { colour: ink("ink"), size: 15, bold: true });
  legend.forEach((layer, place) => {
    const x = 18 + (place % columns) * ((wide - 30) / columns),
      y = 46 + 18 * Math.floor(place / columns);
    pen.line([x, x + 24], [y, y], {
      colour: layer.colour,
      dash: layer.dash,
      width: layer.kind === "dots" || layer.kind === "band" ? 6 : 2.2,
    });
    pen.text(x + 30, y, layer.name, { colour: ink("ink"), size: 12 });
  });
  const told = (name) => picture[name].format || tickText;
  for (const tick of ticksOf(chart, "x")) {
    pen.line([view.x(tick), view.x(tick)], [view.top, view.top + view.height], { colour: ink("grid"), width: 1 });
    pen.text(view.x(tick), view.top + view.height + 14, told("x")(tick), { colour: ink("soft"), anchor: "middle" });
  }
  for (const tick of ticksOf(chart, "y")) {
    pen.line([view.left, view.left + view.width], [view.y(tick), view.y(tick)], { colour: ink("grid"), width: 1 });
    pen.text(view.left - 8, view.y(tick), told("y")(tick), { colour: ink("soft"), anchor: "end" });
  }
  pen.text(view.left + view.width / 2, high - 18, picture.x.label, { colour: ink("soft"), anchor: "middle" });
  pen.text(18, view.top + view.height / 2, picture.y.label, { colour: ink("soft"), anchor: "middle", turn: true });
  drawLayers(pen, view, picture, ink);
}

function ticksOf(chart, name) {
  const [low, high] = chart.ends[name];
  const ticks = chart.picture[name].log ? logTicks(low, high) : chart.plot.axes[name === "x" ? 0 : 1]._splits;
  return ticks.filter((tick) => tick >= low && tick <= high);
}

const SIZE = [960, 600]; // of an exported figure [px]

/** Buttons that write a chart as SVG and as PNG. */
function exportButtons(chart, title, name) {
  const svg = () => {
    const pen = new SvgPen(...SIZE);
    drawFigure(pen, chart, title(), SIZE);
    chart.plot.redraw();
    download(`${name}.svg`, "image/svg+xml", pen.svg);
  };
  const png = () => {
    const canvas = el("canvas", { width: 2 * SIZE[0], height: 2 * SIZE[1] }),
      context = canvas.getContext("2d");
    context.scale(2, 2);
    drawFigure(new CanvasPen(context), chart, title(), SIZE);
    chart.plot.redraw();
    canvas.toBlob((blob) => download(`${name}.png`, "image/png", blob));
  };
  return [
    el("button", { type: "button", on: { click: svg } }, "SVG"),
    el("button", { type: "button", on: { click: png } }, "PNG"),
  ];
}
