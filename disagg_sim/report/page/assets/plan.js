// The page of a plan: the answer, its pools, its latencies against the limits, why, what would change it, runners-up.
"use strict";

const ROLE = { colocated: "co-located", ffn: "FFN" };
/** Attention and FFN ranks of a decode instance are the last pools, and fail and are judged together. */
const judgedAs = (role) => (role === "attention" || role === "ffn" ? "decode" : role);
const ofPool = (values, place) => values[Math.min(place, values.length - 1)];
const BOUND = {
  compute: "compute",
  memory: "memory bandwidth",
  communication: "links between GPUs",
  latency: "latencies",
};

const poolWords = (pool, spare = 0) =>
  [
    `${count(pool.instances)}${spare ? ` + ${count(spare)}` : ""} × ${pool.mapping}`,
    pool.chunk_tokens ? `chunks of ${count(pool.chunk_tokens)}` : null,
    pool.draft_tokens ? `draft tokens ${count(pool.draft_tokens)}` : null,
  ]
    .filter(Boolean)
    .join(", ");

function meter(share, words) {
  return el(
    "span",
    {
      class: `meter ${share > 1 ? "over" : ""}`,
      role: "img",
      "aria-label": words,
      title: words,
      vars: { "--share": Number.isFinite(share) ? share : 0 },
    },
    el("i"),
  );
}

function planVerdict(plan) {
  if (!plan.best) return [el("p", { class: "verdict fails" }, "Infeasible"), el("p", {}, plan.binds)];
  const [first, ...rest] = plan.said.verdict;
  return [el("p", { class: "verdict" }, first), rest.map((line) => el("p", {}, line))];
}

function planTiles({ best, assurance: sure, drawn, usd_per_million_tokens: tokens }) {
  const tile = (value, words) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, words));
  const band =
    sure && sure.capacity
      ? `; GPUs hold ${plain(sure.capacity[0] * best.rate_per_s)} to ${plain(sure.capacity[1] * best.rate_per_s)} (80 % band)`
      : "";
  return el(
    "div",
    { class: "tiles" },
    tile(count(best.gpus), "GPUs"),
    tile(`${plain(best.rate_per_s)}/s`, `requests${band}`),
    tile(
      plain(best.output_tokens_per_s),
      `output tokens/s${sure && sure.throughput ? `; ${trustWords(sure.throughput)}` : ""}`,
    ),
    tile(plain(best.output_tokens_per_s / best.gpus), "output tokens/s a GPU"),
    tile(
      known(best.usd_per_million_output_tokens) ? `$${plain(best.usd_per_million_output_tokens)}` : "–",
      `a million output tokens${known(best.usd_per_hour) ? ` ($${plain(best.usd_per_hour)}/h)` : ""}, assumed prices`,
    ),
    drawn
      ? tile(
          plain(drawn.output_tokens_per_drawn_joule),
          `output tokens/J of GPUs that draw ${plain(drawn.watts)} W (${plain(drawn.watts_p10)} to ${plain(drawn.watts_p90)}), ${drawn.rests_on}`,
        )
      : tile(plain(best.output_tokens_per_joule), "output tokens/J, GPUs at TDP"),
    drawn && known(drawn.facility_watts)
      ? tile(`${plain(drawn.facility_watts / 1000)} kW`, "with hosts, network and cooling, assumed")
      : null,
    tokens
      ? tile(
          `$${plain(tokens.input)} in`,
          `${known(tokens.cached) ? `$${plain(tokens.cached)} cached, ` : ""}$${plain(tokens.output)} out, a million tokens each`,
        )
      : null,
    tile(bandwidth(best.kv_bytes_per_s_per_gpu), "KV caches, most of a GPU"),
  );
}

// A mark of latencies that were not simulated, beside those of the answer that were.
function planned(best, design) {
  return best.simulated && !design.simulated ? ", planned" : "";
}

// The band of TTFT, and those of its causes; null where these are not known.
function planCauses(sure, limit) {
  if (!sure.ttft_causes || !sure.ttft_causes.length) return null;
  const words = ([low, high]) =>
    known(high) ? `${seconds(low)} to ${seconds(high)}` : known(low) ? `${seconds(low)} or more` : "no end";
  const causes = sure.ttft_causes.filter((each) => each.band[1] !== 0);
  return el(
    "span",
    {},
    `p${plain(100 * limit.share, 4)} ${words(sure.ttft_s)}`,
    el("small", {}, ` ${causes.map((each) => `${each.cause} ${words(each.band)}`).join(", ")}`),
  );
}

function planLatencies(plan) {
  const { best, question } = plan,
    shares = Object.keys(best.ttft_s);
  const line = (name, found, limit, band) => {
    const at = found[`p${Math.round(100 * limit.share)}`] ?? Math.max(...Object.values(found));
    return [
      el("b", {}, name),
      ...shares.map((share) => seconds(found[share])),
      `${seconds(limit.seconds)} (p${plain(100 * limit.share, 4)})`,
      el(
        "span",
        {},
        meter(at / limit.seconds, `${percent(at / limit.seconds)} of the limit`),
        el("small", {}, percent(at / limit.seconds)),
      ),
      band || "–",
    ];
  };
  const sure = plan.assurance || {},
    times = (of, band) => (band ? `${of} ${plain(band[0])} to ${plain(band[1])} times` : null);
  return simpleTable(
    ["", ...shares, "limit", "of the limit", "80 % band"],
    [
      line("TTFT", best.ttft_s, question.ttft, planCauses(sure, question.ttft) || times("pass", sure.ttft)),
      line("TPOT", best.tpot_s, question.tpot, times("step", sure.tpot)),
    ],
    shares.map((_, place) => place + 1),
    "Latencies",
  );
}

function planPools(plan) {
  const { best, assurance: sure } = plan;
  const checked = new Map(((sure && sure.pools) || []).map((pool) => [pool.role, pool]));
  return simpleTable(
    ["pool", "instances", "GPUs", "recipe, engine", "batch", "load", "memory", "bound by", "time rests on"],
    best.pools.map((pool, place) => {
      const judged = checked.get(judgedAs(pool.role));
      return [
        el("b", {}, ROLE[pool.role] || pool.role),
        poolWords(pool, best.spares ? ofPool(best.spares.counts, place) : 0),
        `${count(pool.gpus)} × ${pool.system}`,
        `${pool.precision}, ${pool.engine}`,
        `${count(pool.batch)}${pool.token_budget ? `, ${count(pool.token_budget)} tokens a step` : ""}`,
        el("span", {}, meter(pool.load, `load ${percent(pool.load)}`), el("small", {}, percent(pool.load))),
        known(pool.memory_bytes) ? gigabytes(pool.memory_bytes) : "–",
        known(pool.idle) ? `waits ${percent(pool.idle)} of a full step` : BOUND[pool.bound] || pool.bound,
        judged
          ? el(
              "span",
              {},
              trustBar(judged.rests_on),
              el(
                "small",
                {},
                `layout ${judged.layout.replace(/;|$/, `${confirmed(judged)}$&`)}`,
              ),
            )
          : "–",
      ];
    }),
    [],
    "Pools",
  );
}

/** What prompts find in each tier, and whether loading it beats computing it again. */
function planTiers(tiers) {
  return simpleTable(
    ["tier", "of prompt tokens", "an instance has room for", "to load", "to compute", "sooner"],
    tiers.map((tier) => [
      el("b", {}, tier.name),
      el("span", {}, meter(tier.share, `${percent(tier.share)} of prompt tokens`), el("small", {}, percent(tier.share))),
      known(tier.holds) ? `${plain(tier.holds / 1e6)} million tokens` : "–",
      tier.load ? seconds(tier.load) : "nothing",
      seconds(tier.recomputed),
      el("span", { class: tier.loads ? "holds" : "fails" }, tier.loads ? "loading" : "computing"),
    ]),
    [2, 3, 4],
    "Prefix caches",
  );
}

/** A share close to 1 with as many digits as tell it from 1. */
const nines = (share) =>
  1 - share < 1e-8 ? "more than 99.999999 %" : percent(share, Math.max(2 - Math.floor(Math.log10(1 - share)), 3));

/** Spare instances of each pool, what they give, and what one failure stops. */
function planSpares(best) {
  const { spares } = best;
  const whole = ({ role }) =>
    best.pools.filter((other) => judgedAs(other.role) === judgedAs(role)).reduce((sum, { gpus }) => sum + gpus, 0);
  return [
    facts([
      ["At full capacity", `${nines(spares.availability)} of the time, at least ${nines(spares.target)} asked for`],
      ["Without spares", `${nines(spares.without)} of the time`],
      ["Expected goodput", `${nines(spares.capacity)} of the load`],
    ]),
    simpleTable(
      ["pool", "instances", "spare", "an instance stops every", "blast radius", "of the pool"],
      best.pools.map((pool, place) => {
        const spare = ofPool(spares.counts, place),
          all = pool.instances + spare,
          gpus = whole(pool) / all,
          mtbf = ofPool(spares.mtbf, place),
          together = ofPool(spares.together, place);
        return [
          el("b", {}, ROLE[pool.role] || pool.role),
          count(pool.instances),
          count(spare),
          known(mtbf) ? `${plain(mtbf / 86400)} days` : "never",
          `${count(together * gpus)} GPUs${together > 1 ? `, ${count(together)} instances` : ""}`,
          percent(together / all),
        ];
      }),
      [1, 2, 3, 4, 5],
      "Availability",
    ),
  ];
}

const confirmed = ({ layout, points, error }) => {
  const far = known(error) ? `three quarters within ${Math.round(100 * error)} %` : "compared with no forecast";
  return layout.startsWith("served") && points ? `: ${count(points)} operating points, ${far}` : "";
};

const trustWords = (shares) =>
  Object.entries(shares)
    .filter(([, share]) => share >= 0.02)
    .map(([name, share]) => `${name} ${Math.round(100 * share)} %`)
    .join(", ");

/** Shares of a time by what it rests on: fitted, inherited, assumed. */
function trustBar(shares) {
  const words = trustWords(shares);
  return el(
    "span",
    {},
    el(
      "span",
      { class: "bar whole", role: "img", "aria-label": words, title: words },
      Object.entries(shares).map(([name, share]) => el("i", { class: `t-${name}`, vars: { "--share": share } })),
    ),
    el("small", { class: "block" }, words),
  );
}

function planPage({ facts: told }) {
  const { plan, screen } = told,
    { best, said } = plan;
  const designs = best ? [best, ...plan.runners_up] : [];
  const simulated = plan.simulated && plan.simulated.final;
  const parts = [
    section(
      "answer",
      "Answer",
      plan.said.question,
      planVerdict(plan),
      best
        ? [
            planTiles(plan),
            simulated
              ? el(
                  "p",
                  {},
                  "Simulated: ",
                  el(
                    "span",
                    { class: simulated.holds ? "holds" : "fails" },
                    simulated.holds ? "the limits hold" : "a limit is missed",
                  ),
                  ` in ${count(plan.simulated.simulations)} simulations.`,
                )
              : null,
          ]
        : null,
    ),
    best ? section("pools", "Pools", null, planPools(plan)) : null,
    best
      ? section(
          "latencies",
          "Latencies",
          `Of requests, queueing included${best.simulated ? ", as simulated" : ""}. The band of TTFT is that of the sum of its causes, the band of TPOT that of a step.`,
          planLatencies(plan),
        )
      : null,
    plan.tiers
      ? section(
          "caches",
          "Prefix caches",
          "What prompts find in each tier; times are those of a mean prompt that comes alone.",
          planTiers(plan.tiers),
        )
      : null,
    best && best.spares
      ? section(
          "availability",
          "Availability",
          "Spares keep every pool at what the load needs; a failure stops all GPUs of its blast radius.",
          planSpares(best),
        )
      : null,
    said.why.length
      ? section(
          "why",
          "Why",
          null,
          el(
            "dl",
            { class: "facts" },
            said.why.map(([role, text]) => [el("dt", {}, role), el("dd", {}, text)]),
          ),
        )
      : null,
    said.changes
      ? section(
          "changes",
          "What would change the answer",
          null,
          el(
            "ul",
            {},
            said.changes.map((line) => el("li", {}, line)),
          ),
        )
      : null,
    designs.length > 1
      ? section(
          "runners-up",
          "Runners-up",
          best.simulated
            ? "The answer first. TTFT and TPOT are simulated where they are not marked as planned."
            : "The answer first.",
          simpleTable(
            [
              "mode",
              "pools",
              "systems",
              "GPUs",
              "requests/s",
              "TTFT p90",
              "TPOT p90",
              "tokens/s a GPU",
              "USD a million tokens",
            ],
            designs.map((design) => [
              design.mode_text,
              design.pools.map((pool) => poolWords(pool)).join(" + "),
              [...new Set(design.pools.map((pool) => pool.system))].join(", "),
              count(design.gpus),
              plain(design.rate_per_s),
              seconds(design.ttft_s.p90) + planned(best, design),
              seconds(design.tpot_s.p90) + planned(best, design),
              plain(design.output_tokens_per_s / design.gpus),
              plain(design.usd_per_million_output_tokens),
            ]),
            [3, 4, 5, 6, 7, 8],
            "Runners-up",
          ),
        )
      : null,
    plan.left_out.length
      ? section(
          "left-out",
          "Left out",
          null,
          el(
            "ul",
            {},
            plan.left_out.map((line) => el("li", {}, line)),
          ),
        )
      : null,
    screen
      ? section(
          "screen",
          "As printed",
          null,
          el(
            "details",
            {},
            el("summary", {}, "The screen of disagg-sim plan"),
            el("pre", { tabindex: "0", "aria-label": "The screen of disagg-sim plan" }, screen),
          ),
        )
      : null,
    section(
      "provenance",
      "Provenance",
      `Schema ${plan.schema}. Trust labels: fitted to measurements of this GPU, inherited from another one, or assumed.`,
      el(
        "div",
        { class: "tools" },
        saveButton("JSON", `${told.name}.json`, "application/json", () => JSON.stringify(plan, null, 2)),
      ),
    ),
  ];
  return { parts, ready() {}, redraw() {} };
}
