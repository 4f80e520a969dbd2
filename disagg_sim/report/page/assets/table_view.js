// A table that sorts and shows some rows at a time, however many there are.
"use strict";

const PAGE = 25; // rows shown at a time

class TableView {
  /** `columns`: {key, label, value(row), show(value, row), numeric}. `pick(row)` is told of a click on a row. */
  constructor({ label, columns, pick = null, sortBy = null, rising = true }) {
    Object.assign(this, { label, columns, pick, key: sortBy, rising, first: 0 });
    this.head = el("tr");
    this.body = el("tbody");
    this.pager = el("p", { class: "pager" });
    this.node = el(
      "div",
      {},
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
        el("table", {}, el("thead", {}, this.head), this.body),
      ),
      this.pager,
    );
  }

  show(rows) {
    this.rows = rows;
    this.first = 0;
    this.sort();
  }

  sort() {
    const column = this.columns.find((each) => each.key === this.key);
    this.sorted = column ? this.inOrder(column) : Array.from(this.rows);
    this.draw();
  }

  /** The rows by a column; those without a number come last. */
  inOrder(column) {
    const rows = Array.from(this.rows),
      keys = rows.map((row) => column.value(row)),
      sign = this.rising ? 1 : -1;
    const texts = new Intl.Collator("en", { numeric: true }),
      last = (key) => (Number.isNaN(key) ? 1 : 0);
    const order = typeof keys[0] === "string" ? texts.compare : (a, b) => a - b;
    const places = Uint32Array.from(rows.keys());
    places.sort((i, j) => last(keys[i]) - last(keys[j]) || sign * order(keys[i], keys[j]));
    return Array.from(places, (place) => rows[place]);
  }

  draw() {
    this.head.replaceChildren(
      ...this.columns.map((column) => {
        const mine = column.key === this.key,
          order = mine ? (this.rising ? "ascending" : "descending") : "none";
        const button = el(
          "button",
          { type: "button", class: "sort", on: { click: () => this.turn(column) } },
          column.label,
          el("span", { "aria-hidden": "true" }, mine ? (this.rising ? " ▲" : " ▼") : ""),
        );
        return el("th", { scope: "col", "aria-sort": order, class: column.numeric ? "number" : null }, button);
      }),
    );
    const page = this.sorted.slice(this.first, this.first + PAGE);
    this.body.replaceChildren(
      ...page.map((row) => {
        const cells = this.columns.map((column) =>
          el(
            "td",
            { class: column.numeric ? "number" : null },
            column.show ? column.show(column.value(row), row) : String(column.value(row)),
          ),
        );
        const line = el("tr", {}, cells);
        if (this.pick) {
          line.tabIndex = 0;
          line.classList.add("picks");
          line.addEventListener("click", () => this.pick(row));
          line.addEventListener("keydown", (event) => {
            if (event.key === "Enter") this.pick(row);
          });
        }
        return line;
      }),
    );
    const total = this.sorted.length,
      last = Math.min(this.first + PAGE, total);
    const go = (to) => () => {
      this.first = to;
      this.draw();
    };
    this.pager.replaceChildren(
      total ? `${count(this.first + 1)} to ${count(last)} of ${count(total)}` : "no rows",
      el(
        "button",
        { type: "button", disabled: this.first === 0, on: { click: go(Math.max(0, this.first - PAGE)) } },
        "Previous",
      ),
      el("button", { type: "button", disabled: last >= total, on: { click: go(this.first + PAGE) } }, "Next"),
    );
  }

  turn(column) {
    this.rising = this.key === column.key ? !this.rising : !column.numeric;
    this.key = column.key;
    this.first = 0;
    this.sort();
  }
}
