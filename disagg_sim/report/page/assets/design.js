// One design: its tooltip, and its card with pools, error bands, breakdown, memory and commands.
"use strict";

/** What a design speculates, behind its batch; nothing where it does not. */
function draftsOf(p) {
  const drafts = p.decode_draft_tokens;
  return drafts
    ? `, ${count(drafts)} draft${drafts > 1 ? "s" : ""} a step (${plain(p.accepted_tokens_per_step)} tokens)`
    : "";
}

/** The pools of a design as [role, words]. */
function poolsOf(p) {
  if (p.mode === "disaggregated") {
    const chunk = p.prefill_chunk_tokens ? `, chunks of ${count(p.prefill_chunk_tokens)}` : "";
    return [
      [
        "prefill",
        `${count(p.prefill_instances)} × ${p.prefill} (${gpus(p.prefill_gpus)} each), batch ${count(p.prefill_batch)}${chunk}`,
      ],
      [
        "decode",
        `${count(p.decode_instances)} × ${p.decode} (${gpus(p.decode_gpus)} each), batch ${count(p.decode_batch)}${draftsOf(p)}`,
      ],
    ];
  }
  const prompts = p.mixed_chunk_tokens
    ? `${count(p.mixed_chunk_tokens)} prompt tokens in ${percent(p.mixed_step_share)} of the steps`
    : `prefill passes of ${count(p.prefill_batch)}`;
  return [["instance", `${p.decode} (${gpus(p.decode_gpus)}), batch ${count(p.decode_batch)}${draftsOf(p)}, ${prompts}`]];
}

const gpus = (number) => `${count(number)} GPU${number === 1 ? "" : "s"}`;
const caseTitle = (p) =>
  [p.model, p.system, p.precision, `${p.traffic} tokens`, p.variant === "-" ? "" : p.variant]
    .filter(Boolean)
    .join(" · ");

function designTip(p, unit) {
  return [
    el("strong", {}, `${plain(p[unit.column])} ${unit.short}`),
    el("span", {}, ` at ${plain(p.tokens_per_s_per_user)} tokens/s/user`),
    el("p", {}, `${p.mode} · ${p.model} · ${p.system}`),
    poolsOf(p).map(([role, words]) => el("p", {}, el("b", {}, `${role} `), words)),
    el("p", {}, `TTL ${seconds(p.ttl_s)} · FTL ${seconds(p.ftl_s)} · ${gpus(p.total_gpus)}`),
    el("p", { class: "hint" }, p.row < 0 ? "beside the frontier" : `layouts: ${p.layouts}; click to pin`),
  ].flat(2);
}

/** An argument of a shell. */
const quoted = (text) => (/^[\w./~+:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** The card of a pinned design. `close` takes it away. */
function designCard(number, p, data, close) {
  const { facts: told, tables, unit } = data;
  const command = (verb) => `disagg-sim ${verb} ${quoted(told.directory)} --row ${p.row}`;
  const bands = ["ttl", "ftl"].map((name) => [`${name}_p10_s`, `${name}_p90_s`].map((each) => p[each]));
  const pairs = [
    [unit.name, withBand(plain, p[unit.column], p[`${unit.column}_p10`], p[`${unit.column}_p90`])],
    ["tokens/s/user", withBand(plain, p.tokens_per_s_per_user, 1 / bands[0][1], 1 / bands[0][0])],
    ["TTL", withBand(seconds, p.ttl_s, ...bands[0])],
    ["FTL", withBand(seconds, p.ftl_s, ...bands[1])],
    ...Object.values(UNITS)
      .filter((other) => other !== unit && other.column in p && known(p[other.column]))
      .map((other) => [other.name, plain(p[other.column])]),
    ["requests/s", plain(p.request_rate_per_s)],
    ["GPUs", count(p.total_gpus)],
    p.mode === "disaggregated" && ["prefill : decode GPUs", plain(p.ctx_gen_gpu_ratio)],
    p.mode === "disaggregated" && [
      "KV out, in of a GPU",
      `${bandwidth(p.kv_egress_bytes_per_s_per_gpu)}, ${bandwidth(p.kv_ingress_bytes_per_s_per_gpu)}`,
    ],
    p.mode !== "disaggregated" && ["largest gap", seconds(p.ttl_largest_gap_s)],
    ["decode bound by", p.decode_bound],
    ["engine", p.engine],
  ];
  const apart =
    p.row >= 0 && tables.parts ? tables.parts.rowsWhere("row", p.row).map((row) => tables.parts.row(row)) : [];
  return el(
    "article",
    { class: "design", "aria-label": `Pinned design ${number}` },
    el(
      "header",
      {},
      el("span", { class: "badge" }, String(number)),
      el("h3", {}, p.mode),
      el("span", { class: "where" }, caseTitle(p)),
      el(
        "button",
        { type: "button", class: "quiet", "aria-label": `Unpin design ${number}`, on: { click: close } },
        "✕",
      ),
    ),
    el(
      "ul",
      { class: "pools" },
      poolsOf(p).map(([role, words]) => el("li", {}, el("b", {}, role), " ", words)),
    ),
    facts(pairs),
    known(bands[0][0])
      ? el("p", { class: "hint" }, "Small figures: bands of 80 % (error bars of fits and engine).")
      : el(
          "p",
          { class: "hint" },
          p.row < 0
            ? "A point beside the frontier: neither error bars nor a breakdown are stored."
            : "No error bars in these results; disagg-sim sweep --uncertainty adds them.",
        ),
    apart.length
      ? [
          ["ttl", "TTL"],
          ["ftl", "FTL"],
        ].map(([key, title]) =>
          breakdownBars(
            title,
            apart.filter((part) => part.latency === key),
            told,
          ),
        )
      : null,
    memoryBars(tables.memory, p, told.memory),
    evidenceLines(p),
    p.row >= 0 ? [copied(command("explain")), copied(`${command("launch")} --engine ${p.engine} --out start`)] : null,
  );
}

function evidenceLines(p) {
  const lines = [
    p.rests_on && `The throughput rests on: ${p.rests_on}.`,
    p.evidence && `Layouts: ${p.evidence}.`,
    p.outside && p.outside !== "-" && `Beyond the range of the fits: ${p.outside}.`,
  ].filter(Boolean);
  return lines.length
    ? el(
        "ul",
        { class: "notes" },
        lines.map((line) => el("li", {}, line)),
      )
    : null;
}

/** Parts of a latency as bars, in pieces as long as what their time goes by for. */
function breakdownBars(title, parts, { resources, trust }) {
  if (!parts.length) return null;
  const total = parts.reduce((sum, part) => sum + part.seconds, 0),
    light = parts.reduce((sum, part) => sum + part.ideal_s, 0);
  const longest = Math.max(...parts.map((part) => part.seconds));
  const used = Object.entries(resources).filter(([key]) => parts.some((part) => part[`${key}_s`] > 0.001 * total));
  const bar = (part) =>
    el(
      "span",
      {
        class: "bar",
        role: "img",
        "aria-label": used
          .filter(([key]) => part[`${key}_s`] > 0)
          .map(([key, words]) => `${words} ${seconds(part[`${key}_s`])}`)
          .join(", "),
      },
      used.map(([key, words]) =>
        el("i", {
          class: `r-${key}`,
          title: `${words} ${seconds(part[`${key}_s`])}`,
          vars: { "--share": part[`${key}_s`] / longest },
        }),
      ),
    );
  return el(
    "details",
    { class: "breakdown", open: title === "TTL" },
    el("summary", {}, el("b", {}, `${title} ${seconds(total)}`), ` · ${percent(light / total)} of the speed of light`),
    el(
      "ul",
      { class: "legend" },
      used.map(([key, words]) => el("li", {}, el("span", { class: `key square r-${key}` }), words)),
    ),
    el(
      "table",
      { class: "bars" },
      el(
        "tbody",
        {},
        parts.map((part) =>
          el(
            "tr",
            {
              title: [part.source && `rests on ${part.source}`, part.outside && `outside: ${part.outside}`]
                .filter(Boolean)
                .join("; "),
            },
            el(
              "th",
              { scope: "row" },
              part.part,
              part.outside ? el("abbr", { title: `beyond the range of the fit: ${part.outside}` }, " !") : null,
            ),
            el("td", {}, bar(part)),
            el("td", { class: "number" }, seconds(part.seconds)),
            el("td", { class: "number" }, percent(part.seconds / total)),
            el("td", { class: "trust", title: trust[part.trust] || "" }, part.trust),
          ),
        ),
      ),
    ),
  );
}

function memoryBars(table, p, names) {
  if (p.row < 0 || !table) return null;
  const mine = table.rowsWhere("row", p.row).map((row) => table.row(row)),
    phases = [...new Set(mine.map((part) => part.phase))];
  return phases.map((phase) => {
    const parts = mine.filter((part) => part.phase === phase).sort((a, b) => b.bytes - a.bytes),
      limit = parts[0].limit_bytes;
    const held = parts.reduce((sum, part) => sum + part.bytes, 0);
    return el(
      "div",
      { class: "memory" },
      el(
        "p",
        {},
        el("b", {}, `Memory of a ${phase === "both" ? "" : `${phase} `}GPU`),
        ` ${gigabytes(held)} of ${gigabytes(limit)} (${percent(held / limit)})`,
      ),
      el(
        "span",
        {
          class: "bar whole",
          role: "img",
          "aria-label": parts.map((part) => `${names[part.part] || part.part} ${gigabytes(part.bytes)}`).join(", "),
        },
        parts.map((part) =>
          el("i", {
            class: `m-${part.part}`,
            title: `${names[part.part] || part.part} ${gigabytes(part.bytes)}`,
            vars: { "--share": part.bytes / limit },
          }),
        ),
      ),
      el(
        "p",
        { class: "hint" },
        parts
          .slice(0, 4)
          .map((part) => `${names[part.part] || part.part} ${gigabytes(part.bytes)}`)
          .join(" · "),
      ),
    );
  });
}
