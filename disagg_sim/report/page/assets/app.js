// Unpack the data, build the page of its kind, and switch themes.
"use strict";

const PAGES = { sweep: sweepPage, simulation: simulationPage, plan: planPage, study: studyPage };

async function start() {
  const content = JSON.parse(document.getElementById("content").textContent);
  const tables = await unpackTables(content.tables, document.getElementById("data").textContent.trim());
  const page = PAGES[content.kind]({ facts: content.facts, tables });
  const parts = page.parts.filter(Boolean),
    main = document.getElementById("main");
  main.replaceChildren(...parts);
  const links = parts
    .filter((part) => part.id)
    .map((part) => el("li", {}, el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent)));
  document.getElementById("top").replaceChildren(
    el("div", { class: "title" }, el("p", {}, "disagg-sim"), el("h1", {}, content.title)),
    el("nav", { "aria-label": "Sections" }, el("ul", {}, links)),
    themeSwitch(() => page.redraw()),
  );
  page.ready();
  requestAnimationFrame(() =>
    requestAnimationFrame(() => {
      document.documentElement.dataset.ready = String(Math.round(performance.now()));
    }),
  );
}

start().catch((fault) => {
  document
    .getElementById("main")
    .replaceChildren(el("p", { role: "alert" }, `This page cannot be shown: ${fault.message}`));
  throw fault;
});
