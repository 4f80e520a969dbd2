// Switches above the figures: one of a few, yes or no, and groups of boxes that filter.
"use strict";

/** One of a few, as radio buttons; `change` is told of the new value. */
function choice(label, options, value, change) {
  const name = `choice-${label.replaceAll(/\W+/g, "-")}`;
  return el(
    "fieldset",
    { class: "choice" },
    el("legend", {}, label),
    options.map(([key, words]) =>
      el(
        "label",
        {},
        el("input", { type: "radio", name, value: key, checked: key === value, on: { change: () => change(key) } }),
        el("span", {}, words),
      ),
    ),
  );
}

/** A button that saves a file; its text is made at the click. */
function saveButton(words, name, type, text) {
  return el("button", { type: "button", id: "csv", on: { click: () => download(name, type, text()) } }, words);
}

/** The same for a table as CSV, alone above the table. */
function csvTools(name, text) {
  const button = saveButton("CSV", `${name}.csv`, "text/csv", text);
  return el("div", { class: "tools" }, el("span", { class: "exports" }, button));
}

function toggle(label, value, change) {
  return el(
    "label",
    { class: "toggle" },
    el("input", { type: "checkbox", checked: value, on: { change: (event) => change(event.target.checked) } }),
    label,
  );
}

function menu(label, options, value, change) {
  return el(
    "label",
    { class: "menu" },
    label,
    el(
      "select",
      { on: { change: (event) => change(event.target.value) } },
      options.map(([key, words]) => el("option", { value: key, selected: key === value }, words)),
    ),
  );
}

/** Boxes for the values of one property; `chosen` is a set that the boxes change. */
function filterGroup(label, values, counts, chosen, change) {
  const boxes = values.map((value) => {
    const box = el("input", { type: "checkbox", checked: chosen.has(value), "data-value": value });
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(value);
      else chosen.delete(value);
      change();
    });
    return [
      box,
      el("label", {}, box, el("span", { class: "value" }, value), el("small", {}, count(counts.get(value) || 0))),
    ];
  });
  const all = (on) => () => {
    boxes.forEach(([box], place) => {
      box.checked = on;
      if (on) chosen.add(values[place]);
      else chosen.delete(values[place]);
    });
    change();
  };
  const quick =
    values.length > 1 &&
    el(
      "span",
      { class: "quick" },
      el("button", { type: "button", class: "quiet", "aria-label": `${label}: all`, on: { click: all(true) } }, "all"),
      el(
        "button",
        { type: "button", class: "quiet", "aria-label": `${label}: none`, on: { click: all(false) } },
        "none",
      ),
    );
  return el(
    "fieldset",
    { class: "filter", "data-filter": label },
    el("legend", {}, label),
    quick,
    boxes.map(([, node]) => node),
  );
}

const THEMES = ["auto", "light", "dark"];

/** Light, dark, or as the system says; `changed` draws again. */
function themeSwitch(changed) {
  const stored = () => {
    try {
      return localStorage.getItem("disagg-sim-theme");
    } catch {
      return null;
    }
  };
  const set = (theme) => {
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("disagg-sim-theme", theme);
    } catch {
      /* a browser may refuse storage to a file */
    }
    changed();
  };
  const first = THEMES.includes(stored()) ? stored() : "auto";
  document.documentElement.dataset.theme = first;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  return choice(
    "theme",
    THEMES.map((theme) => [theme, theme]),
    first,
    set,
  );
}
