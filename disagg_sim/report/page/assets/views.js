// What the page of a sweep can show: units, filters, views, and the looks of curves.
"use strict";

const UNITS = {
  gpu: {
    column: "tokens_per_s_per_gpu",
    short: "tokens/s/GPU",
    name: "tokens/s/GPU",
    axis: "output tokens/s/GPU, all GPUs",
  },
  usd: { column: "tokens_per_usd", short: "tokens/USD", name: "tokens/USD", axis: "output tokens per USD, all GPUs" },
  watt: {
    column: "tokens_per_joule",
    short: "tokens/J",
    name: "tokens/J",
    axis: "output tokens per joule, TDP of all GPUs",
  },
  joule: {
    column: "tokens_per_drawn_joule",
    short: "tokens/J drawn",
    name: "tokens/J drawn",
    axis: "output tokens per joule that all GPUs draw",
  },
};
const X = "tokens_per_s_per_user";
const FILTERS = [
  ["model", "model"],
  ["system", "system"],
  ["precision", "precision"],
  ["traffic", "input/output tokens"],
  ["variant", "variant"],
  ["mode", "mode"],
  ["layouts", "layouts"],
];
/** Properties of which a first look shows one value alone: others make too many curves. */
const ONE_AT_FIRST = ["model", "traffic", "variant"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const COLOURS = 8;
const MOST_PINS = 4;

const VIEWS = (unit) => [
  { key: "throughput", words: "Throughput", column: unit.column, label: unit.axis, bands: true },
  {
    key: "kv-out",
    words: "KV out",
    column: "kv_egress_bytes_per_s_per_gpu",
    scale: 1e-9,
    label: "KV caches out of a prefill GPU [GB/s]",
    split: true,
  },
  {
    key: "kv-in",
    words: "KV in",
    column: "kv_ingress_bytes_per_s_per_gpu",
    scale: 1e-9,
    label: "KV caches into a decode GPU [GB/s]",
    split: true,
  },
  {
    key: "ratio",
    words: "P:D ratio",
    column: "ctx_gen_gpu_ratio",
    label: "prefill GPUs / decode GPUs",
    split: true,
    log: true,
    limits: [{ at: 1, label: "equal pools" }],
  },
  { key: "ftl", words: "First token", column: "ftl_s", label: "FTL, without queues [s]", log: true },
  { key: "gpus", words: "GPUs", column: "total_gpus", label: "GPUs of the deployment", log: true },
];

/** Frontiers over further pools, where a sweep has them. */
function poolsSection(pools, titles) {
  if (!pools || !pools.length) return null;
  const column = (key, label, show) => ({ key, label, numeric: true, value: (row) => pools.at(key, row), show });
  const word = (key, label) => ({ key, label, value: (row) => pools.at(key, row) });
  const parts = ["encode", "prefill", "decode", "attention", "ffn"].filter((name) => pools.has(`${name}_gpus`));
  const table = new TableView({
    label: "Designs of all pools",
    columns: [
      ...(pools.words("case").length > 1
        ? [{ key: "case", label: "case", value: (row) => titles.get(pools.at("case", row)) || pools.at("case", row) }]
        : []),
      column(X, "tokens/s/user", (value) => plain(value)),
      column(UNITS.gpu.column, UNITS.gpu.short, (value) => plain(value)),
      ...parts.map((name) => column(`${name}_gpus`, `${name} GPUs`, (value) => count(value))),
      word("prefill", "prefill"),
      word("decode", "decode"),
      column("decode_batch", "batch", (value) => count(value)),
      column("ttl_s", "TTL", (value) => seconds(value)),
      column("ftl_s", "FTL", (value) => seconds(value)),
    ],
    sortBy: UNITS.gpu.column,
    rising: false,
  });
  table.show([...Array(pools.length).keys()]);
  const intro = "Frontiers over encode, prefill, attention and feed-forward pools (pools.csv); the figure above has two pools.";
  return section("pools", "More pools", intro, table.node);
}

/** The table of points; `pick` is told of the row of one. */
function pointsTable(points, unit, pick) {
  const number = (key, label, show = plain) => ({
    key,
    label,
    numeric: true,
    value: (row) => points.at(key, row),
    show: (value) => show(value),
  });
  const text = (key, label) => ({ key, label, value: (row) => points.at(key, row) });
  const columns = [
    text("mode", "mode"),
    text("model", "model"),
    text("system", "system"),
    text("precision", "recipe"),
    text("traffic", "ISL/OSL"),
    number(X, "tokens/s/user"),
    number(unit.column, unit.short),
    number("ttl_s", "TTL", seconds),
    number("ftl_s", "FTL", seconds),
    text("decode", "decode"),
    number("decode_batch", "batch", count),
    ...(points.has("decode_draft_tokens") ? [number("decode_draft_tokens", "drafts", count)] : []),
    text("prefill", "prefill"),
    number("prefill_batch", "batch", count),
    number("total_gpus", "GPUs", count),
    number("ctx_gen_gpu_ratio", "P:D"),
    number("kv_egress_bytes_per_s_per_gpu", "KV out", bandwidth),
    number("kv_ingress_bytes_per_s_per_gpu", "KV in", bandwidth),
    text("decode_bound", "bound by"),
    text("layouts", "layouts"),
  ];
  columns
    .filter((column) => column.key === "prefill_batch")
    .forEach((column) => {
      column.label = "prefill batch";
    });
  return new TableView({
    label: "Points",
    columns,
    sortBy: unit.column,
    rising: false,
    pick,
  });
}
