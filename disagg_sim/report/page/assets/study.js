// The page of a reproduced study: claims with their verdicts, and the pictures.
"use strict";

const VERDICT = { holds: "holds", fails: "fails" };

function studyPage({ facts: told, tables }) {
  const { claims } = tables,
    rows = claims.rows();
  const profiles = [...new Set(rows.map((row) => row.profile))],
    verdicts = [...new Set(rows.map((row) => row.verdict))];
  const counts = simpleTable(
    ["profile", ...verdicts],
    profiles.map((profile) => [
      profile,
      ...verdicts.map((verdict) =>
        count(rows.filter((row) => row.profile === profile && row.verdict === verdict).length),
      ),
    ]),
    verdicts.map((_, place) => place + 1),
    "Verdicts",
  );
  const text = (key, label) => ({ key, label, value: (row) => claims.at(key, row) || "" });
  const table = new TableView({
    label: "Claims",
    sortBy: "id",
    columns: [
      text("id", "claim"),
      text("statement", "statement"),
      text("profile", "profile"),
      {
        ...text("verdict", "verdict"),
        show: (verdict) => el("span", { class: VERDICT[verdict] || "unsure" }, verdict),
      },
      text("value", "found"),
      text("acceptance", "acceptance"),
      text("note", "note"),
    ],
  });
  table.show(rows.map((_, place) => place));
  const parts = [
    section(
      "claims",
      "Claims",
      "Each statement of the paper, tested; a miss stands with what explains it.",
      counts,
      csvTools(told.name, () => claims.csv(rows.map((_, place) => place))),
      table.node,
    ),
    told.pictures.length
      ? section(
          "pictures",
          "Figures",
          null,
          el(
            "div",
            { class: "pictures" },
            told.pictures.map(({ name, png }) =>
              el(
                "figure",
                {},
                el("img", { src: `data:image/png;base64,${png}`, alt: `Figure ${name}`, loading: "lazy" }),
                el("figcaption", { class: "hint" }, name),
              ),
            ),
          ),
        )
      : null,
  ];
  return { parts, ready() {}, redraw() {} };
}
