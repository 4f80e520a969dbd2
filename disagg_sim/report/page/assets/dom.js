// Make elements and write numbers. Text enters the page as text nodes alone, so that no name becomes HTML.
"use strict";

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (name === "vars") for (const [key, each] of Object.entries(value)) node.style.setProperty(key, each);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function say(text) {
  document.getElementById("status").textContent = text;
}

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);

/** Three digits, or all digits before the point; thousands apart. */
function plain(value, digits = 3) {
  if (value === Infinity) return "no limit";
  if (!known(value)) return "–";
  const options = Math.abs(value) >= 10 ** digits ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: digits };
  return value.toLocaleString("en", options);
}

function seconds(value) {
  if (!known(value)) return "–";
  if (value >= 1 || value === 0) return `${plain(value)} s`;
  return value >= 1e-4 ? `${plain(value * 1e3)} ms` : `${plain(value * 1e6)} µs`;
}

const gigabytes = (value) => (known(value) ? `${plain(value / 1e9)} GB` : "–");
const bandwidth = (value) => (known(value) ? `${plain(value / 1e9)} GB/s` : "–");
const percent = (value, digits = 2) => (known(value) ? `${plain(value * 100, digits)} %` : "–");
const count = (value) => (known(value) ? Math.round(value).toLocaleString("en") : "–");

/** Times of a band of 80 % as "12.3 (11–14) ms", or the value alone. */
function withBand(format, value, low, high) {
  return known(low) && known(high)
    ? [format(value), el("small", {}, ` ${format(low)} – ${format(high)}`)]
    : [format(value)];
}

function section(id, title, intro, ...children) {
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    intro ? el("p", { class: "intro" }, intro) : null,
    ...children,
  );
}

function facts(pairs) {
  return el(
    "dl",
    { class: "facts" },
    pairs.filter(Boolean).map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
  );
}

/** A plain table; cells are text or nodes, the columns in `numeric` flush right. */
function simpleTable(header, rows, numeric = [], label = "") {
  const kind = (column) => (numeric.includes(column) ? "number" : null);
  return el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": label || header.join(", ") },
    el(
      "table",
      {},
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          header.map((name, column) => el("th", { scope: "col", class: kind(column) }, name)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((row) =>
          el(
            "tr",
            {},
            row.map((cell, column) => el("td", { class: kind(column) }, cell)),
          ),
        ),
      ),
    ),
  );
}

function copied(text) {
  const button = el("button", { class: "quiet", type: "button", "aria-label": `Copy: ${text}` }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Select it";
    }
  });
  return el("p", { class: "command" }, el("code", {}, text), button);
}

/** Hand a file to the reader. */
function download(name, type, content) {
  const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  el("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
  say(`${name} written`);
}
