// Two pens with the same strokes: one draws on a canvas, one writes SVG, so that a figure is exported as it is shown.
"use strict";

class CanvasPen {
  constructor(context, scale = 1) {
    this.context = context;
    this.scale = scale;
  }

  box(x, y, width, height, colour) {
    this.context.fillStyle = colour;
    this.context.fillRect(x, y, width, height);
  }

  line(xs, ys, { colour, width = 1.5, dash = [], alpha = 1 }) {
    const { context, scale } = this;
    context.save();
    context.strokeStyle = colour;
    context.lineWidth = width * scale;
    context.globalAlpha = alpha;
    context.lineJoin = "round";
    context.setLineDash(dash.map((each) => each * scale));
    context.beginPath();
    let down = false;
    for (let i = 0; i < xs.length; i++) {
      if (!Number.isFinite(ys[i]) || !Number.isFinite(xs[i])) {
        down = false;
        continue;
      }
      if (down) context.lineTo(xs[i], ys[i]);
      else context.moveTo(xs[i], ys[i]);
      down = true;
    }
    context.stroke();
    context.restore();
  }

  area(xs, lows, highs, { colour, alpha }) {
    const { context } = this;
    context.save();
    context.fillStyle = colour;
    context.globalAlpha = alpha;
    context.beginPath();
    for (let i = 0; i < xs.length; i++) context.lineTo(xs[i], highs[i]);
    for (let i = xs.length - 1; i >= 0; i--) context.lineTo(xs[i], lows[i]);
    context.fill();
    context.restore();
  }

  dots(xs, ys, { colour, size, alpha = 1, hollow = "" }) {
    const { context, scale } = this;
    const side = size * scale;
    context.save();
    context.fillStyle = colour;
    context.globalAlpha = alpha;
    if (size <= 3) {
      for (let i = 0; i < xs.length; i++) context.fillRect(xs[i] - side / 2, ys[i] - side / 2, side, side);
    } else {
      context.strokeStyle = colour;
      context.lineWidth = 1.4 * scale;
      if (hollow) context.fillStyle = hollow;
      for (let i = 0; i < xs.length; i++) {
        if (!Number.isFinite(ys[i])) continue;
        context.beginPath();
        context.arc(xs[i], ys[i], side / 2, 0, 2 * Math.PI);
        context.fill();
        if (hollow) context.stroke();
      }
    }
    context.restore();
  }

  text(x, y, words, { colour, size = 12, anchor = "start", turn = false, bold = false }) {
    const { context, scale } = this;
    context.save();
    context.fillStyle = colour;
    context.font = `${bold ? "600 " : ""}${size * scale}px ${FONT}`;
    context.textAlign = anchor === "middle" ? "center" : anchor;
    context.textBaseline = "middle";
    context.translate(x, y);
    if (turn) context.rotate(-Math.PI / 2);
    context.fillText(words, 0, 0);
    context.restore();
  }

  within(x, y, width, height, draw) {
    this.context.save();
    this.context.beginPath();
    this.context.rect(x, y, width, height);
    this.context.clip();
    draw();
    this.context.restore();
  }
}

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const escaped = (text) =>
  String(text).replace(/[<>&"]/g, (letter) => ({ "<": "&lt;", ">": "&gt;", "&": "&amp;", '"': "&quot;" })[letter]);
const short = (value) => Number(value.toFixed(1));

class SvgPen {
  constructor(width, height) {
    this.width = width;
    this.height = height;
    this.scale = 1;
    this.parts = [];
    this.clips = 0;
  }

  put(tag, attributes, words = "") {
    const told = Object.entries(attributes)
      .map(([name, value]) => ` ${name}="${escaped(value)}"`)
      .join("");
    this.parts.push(`<${tag}${told}>${escaped(words)}</${tag}>`);
  }

  path(xs, ys) {
    let path = "",
      down = false;
    for (let i = 0; i < xs.length; i++) {
      if (!Number.isFinite(ys[i]) || !Number.isFinite(xs[i])) {
        down = false;
        continue;
      }
      path += `${down ? "L" : "M"}${short(xs[i])} ${short(ys[i])}`;
      down = true;
    }
    return path;
  }

  box(x, y, width, height, colour) {
    this.put("rect", { x: short(x), y: short(y), width: short(width), height: short(height), fill: colour });
  }

  line(xs, ys, { colour, width = 1.5, dash = [], alpha = 1 }) {
    this.put("path", {
      d: this.path(xs, ys),
      fill: "none",
      stroke: colour,
      "stroke-width": width,
      "stroke-dasharray": dash.join(" "),
      opacity: alpha,
    });
  }

  area(xs, lows, highs, { colour, alpha }) {
    const back = (values) => Array.from(values).reverse();
    this.put("path", {
      d: `${this.path([...xs, ...back(xs)], [...highs, ...back(lows)])}Z`,
      fill: colour,
      opacity: alpha,
    });
  }

  dots(xs, ys, { colour, size, alpha = 1, hollow = "" }) {
    let path = "";
    for (let i = 0; i < xs.length; i++) if (Number.isFinite(ys[i])) path += `M${short(xs[i])} ${short(ys[i])}h0`;
    const round = { d: path, fill: "none", "stroke-linecap": "round", opacity: alpha };
    this.put("path", { ...round, stroke: colour, "stroke-width": size });
    if (hollow) this.put("path", { ...round, stroke: hollow, "stroke-width": size - 2.4 });
  }

  text(x, y, words, { colour, size = 12, anchor = "start", turn = false, bold = false }) {
    const place = turn ? { transform: `translate(${short(x)} ${short(y)}) rotate(-90)` } : { x: short(x), y: short(y) };
    this.put(
      "text",
      {
        ...place,
        fill: colour,
        "font-size": size,
        "font-weight": bold ? 600 : 400,
        "text-anchor": anchor,
        "dominant-baseline": "central",
      },
      words,
    );
  }

  within(x, y, width, height, draw) {
    const name = `clip${this.clips++}`;
    this.parts.push(
      `<clipPath id="${name}"><rect x="${x}" y="${y}" width="${width}" height="${height}"/></clipPath><g clip-path="url(#${name})">`,
    );
    draw();
    this.parts.push("</g>");
  }

  get svg() {
    const { width, height } = this;
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="${escaped(FONT)}">${this.parts.join("\n")}</svg>\n`;
  }
}
