// Tables of a simulation: its runs, and others as they are.
"use strict";

/** The table of runs; `pick` is told of the place of a run. */
function runsTable(runs, pick) {
  const number = (key, label, show = plain) => ({
    key,
    label,
    numeric: true,
    value: (place) => runs[place][key],
    show: (value) => show(value),
  });
  const text = (key, label) => ({ key, label, value: (place) => runs[place][key] });
  const judged = (key, label, limit) => ({
    key,
    label,
    numeric: true,
    value: (place) => runs[place][key],
    show: (value, place) => el("span", { class: value <= runs[place][limit] ? "holds" : "fails" }, seconds(value)),
  });
  return new TableView({
    label: "Runs",
    sortBy: "slo_attainment",
    rising: false,
    pick,
    columns: [
      text("policy", "policy"),
      text("deployment", "deployment"),
      text("trace", "trace"),
      number("rate_scale", "rate"),
      number("slo_attainment", "in the SLO", (value) => percent(value, 4)),
      number("goodput_requests_per_s", "goodput [1/s]"),
      number("ttft_p50_s", "TTFT p50", seconds),
      judged("ttft_p90_s", "TTFT p90", "slo_ttft_s"),
      number("ttft_p99_s", "TTFT p99", seconds),
      number("tpot_p50_s", "TPOT p50", seconds),
      judged("tpot_p90_s", "TPOT p90", "slo_tpot_s"),
      number("tpot_p99_s", "TPOT p99", seconds),
      number("gpu_hours", "GPU-hours"),
      number("utilisation", "utilisation", percent),
    ],
  });
}

/** A section of a table as it is; null where there is none. */
function plainSection(table, name, title, intro) {
  if (!table || !table.length) return null;
  const names = [...table.columns.keys()],
    numeric = names.map((each, place) => (table.words(each) ? -1 : place)).filter((place) => place >= 0);
  return section(
    name,
    title,
    intro,
    simpleTable(
      names,
      table.rows().map((row) => names.map((each) => (typeof row[each] === "number" ? plain(row[each], 4) : row[each]))),
      numeric,
      title,
    ),
  );
}

/** What the policy of a run decided. */
function decisionsOf(table, run) {
  if (!table || !table.length) return [];
  const rows = table
    .rows()
    .filter(
      (row) =>
        row.policy === run.policy &&
        row.deployment === run.deployment &&
        row.trace === run.trace &&
        row.rate_scale === run.rate_scale,
    );
  if (!rows.length) return [];
  return [
    el(
      "details",
      {},
      el("summary", {}, `${count(rows.length)} decisions of the policy`),
      simpleTable(
        ["time", "kind", "wish", "reason"],
        rows.slice(0, 500).map((row) => [seconds(row.tick_s), row.kind, row.wish, row.reason]),
        [0],
        "Decisions",
      ),
    ),
  ];
}
