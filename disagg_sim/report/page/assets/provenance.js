// What was left out, and where the numbers come from: versions, digests, fits, every value of every file with its source.
"use strict";

const flat = (value) => (value !== null && typeof value === "object" ? JSON.stringify(value) : String(value));

/** A nested value as a table of keys and values, with the source of each key where the file names one. */
function valuesTable(content) {
  const sources = content.sources && typeof content.sources === "object" ? content.sources : {};
  const rows = Object.entries(content)
    .filter(([key]) => key !== "sources")
    .map(([key, value]) => [el("code", {}, key), el("span", { class: "long" }, flat(value)), sources[key] || ""]);
  return simpleTable(["key", "value", "source"], rows, [], "Values");
}

function provenanceSection(told) {
  const digests = [
    ["disagg-sim itself", told.code],
    ...Object.entries(told.specs || {}),
    ...Object.entries(told.tables || {}),
  ].filter(([, digest]) => digest);
  const run = told.run || {};
  return section(
    "provenance",
    "Provenance",
    "What these numbers were made of. The same inputs and sources give the same bytes.",
    facts([
      ...Object.entries(told.versions || {}),
      told.source && ["sweep file", told.source],
      run.wall_seconds && ["last run", `${plain(run.wall_seconds)} s`],
    ]),
    el("details", {}, el("summary", {}, "Options"), valuesTable(told.options || {})),
    el(
      "details",
      {},
      el("summary", {}, `SHA-256 digests of ${digests.length} inputs and tables`),
      simpleTable(
        ["what", "digest"],
        digests.map(([name, digest]) => [name, el("code", {}, digest)]),
      ),
    ),
    el(
      "details",
      {},
      el("summary", {}, `Fits behind each of ${told.cases.length} cases`),
      told.cases.map((each) =>
        el(
          "details",
          {},
          el("summary", {}, each.case),
          el("p", { class: "hint" }, `digest ${each.digest}`),
          el(
            "ul",
            {},
            each.fits.map((fit) => el("li", { class: /inherited/.test(fit) ? "inherited" : null }, fit)),
          ),
        ),
      ),
    ),
    Object.entries(told.inputs || {}).map(([file, content]) =>
      el(
        "details",
        { class: "file" },
        el("summary", {}, el("code", {}, file), content.title ? ` ${flat(content.title)}` : ""),
        valuesTable(content),
      ),
    ),
  );
}

function rejectedSection(rejected) {
  if (!rejected || !rejected.length) return null;
  const text = (key, label) => ({ key, label, value: (row) => rejected.at(key, row) });
  const table = new TableView({
    label: "Rejected points",
    sortBy: "count",
    rising: false,
    columns: [
      text("case", "case"),
      text("mode", "mode"),
      text("phase", "phase"),
      text("reason", "reason"),
      { key: "count", label: "points", numeric: true, value: (row) => rejected.at("count", row), show: count },
      text("detail", "the closest"),
    ],
  });
  table.show(rejected.rows().map((_, row) => row));
  return section(
    "rejected",
    "Rejected points",
    "Why configurations were left out, and how close the nearest one was.",
    table.node,
  );
}
