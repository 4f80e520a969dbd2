// The gain map: disaggregated over the best co-located throughput, a row a case, a column an interactivity.
"use strict";

/** Text of a gain, which may be one-sided. */
function gainText(gain) {
  if (gain === Infinity) return "only";
  if (gain === 0) return "none";
  return Number.isNaN(gain) ? "–" : `${plain(gain, 3)}×`;
}

/** A probability of finitely many samples: never 0 or 100 %. */
const likely = (share) => (share > 0.99 ? "> 99 %" : share < 0.01 ? "< 1 %" : percent(share));

function gainMap(data, titles) {
  const { gains } = data.tables,
    at = data.facts.at;
  if (!gains || !gains.length)
    return {
      node: el("p", { class: "hint" }, "These results have no case with both disaggregated and co-located frontiers."),
      show() {},
    };
  const byCase = new Map();
  for (const row of gains.rows()) {
    if (!byCase.has(row.case)) byCase.set(row.case, new Map());
    byCase.get(row.case).set(Math.round(row.at), row);
  }
  const pays = new Map(data.facts.pays.map((row) => [row.case, row]));
  const cell = (row) => {
    if (!row || Number.isNaN(row.gain)) return el("td", { class: "gain nothing" }, "–");
    const strength = Math.max(-1, Math.min(1, Math.log2(row.gain || 1e-9) / 1.5));
    const sure = known(row.probability)
      ? `, better with ${likely(row.probability)} probability (80 % band ${plain(row.gain_p10)} to ${plain(row.gain_p90)})`
      : "";
    const words =
      row.gain === Infinity
        ? "only disaggregated reaches it"
        : row.gain === 0
          ? "only co-located reaches it"
          : `${plain(row.gain, 3)} times the co-located throughput${sure}`;
    return el(
      "td",
      {
        class: `gain ${strength >= 0 ? "above" : "below"}`,
        title: words,
        vars: { "--strength": Math.round(Math.abs(strength) * 100) + "%" },
      },
      gainText(row.gain),
      known(row.probability) && Number.isFinite(row.gain) && row.gain > 0
        ? el("small", {}, likely(row.probability))
        : null,
    );
  };
  const body = el("tbody");
  const node = el(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": "Gain map" },
    el(
      "table",
      { class: "gains" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "case"),
          at.map((each) => el("th", { scope: "col", class: "number" }, `${each}`)),
          el("th", { scope: "col" }, "pays"),
          el("th", { scope: "col", class: "number" }, "largest"),
        ),
      ),
      body,
    ),
  );
  const show = (visible) =>
    body.replaceChildren(
      ...[...byCase]
        .filter(([name]) => visible.has(name))
        .map(([name, row]) => {
          const told = pays.get(name);
          return el(
            "tr",
            {},
            el("th", { scope: "row" }, titles.get(name) || name),
            at.map((each) => cell(row.get(Math.round(each)))),
            el("td", {}, told ? told.pays : "–"),
            el(
              "td",
              { class: "number" },
              told && told.largest !== null ? `${plain(told.largest)}× at ${plain(told.largest_at)}` : "–",
            ),
          );
        }),
    );
  return { node, show };
}
