// Unpack the tables of the page: one compressed block of numbers, columns at their places in it.
"use strict";

const ARRAYS = { u1: Uint8Array, u2: Uint16Array, i4: Int32Array, f4: Float32Array };

class Table {
  constructor(described, bytes) {
    this.length = described.rows;
    this.columns = new Map();
    for (const { name, at, type, words } of described.columns) {
      const numbers = new ARRAYS[type](bytes, at, described.rows);
      this.columns.set(name, { numbers, words });
    }
  }

  has(name) {
    return this.columns.has(name);
  }

  /** Numbers of a column; of words, their places in `words`. */
  numbers(name) {
    return this.columns.get(name).numbers;
  }

  words(name) {
    return this.columns.get(name).words;
  }

  at(name, row) {
    const column = this.columns.get(name);
    if (!column) return undefined;
    const value = column.numbers[row];
    return column.words ? column.words[value] : value;
  }

  /** Rows in which a column has a value, in order. */
  rowsWhere(name, value) {
    const column = this.columns.get(name);
    const rows = [];
    if (!column) return rows;
    const wanted = column.words ? column.words.indexOf(value) : value;
    for (let row = 0; row < this.length; row++) if (column.numbers[row] === wanted) rows.push(row);
    return rows;
  }

  row(number) {
    return Object.fromEntries([...this.columns.keys()].map((name) => [name, this.at(name, number)]));
  }

  rows() {
    return Array.from({ length: this.length }, (_, number) => this.row(number));
  }

  /** Comma-separated values of some rows, numbers with seven digits as they are packed. */
  csv(rows, names = [...this.columns.keys()]) {
    const cell = (value) => {
      const text =
        typeof value === "number" ? (Number.isNaN(value) ? "" : String(Number(value.toPrecision(7)))) : String(value);
      return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const lines = [names.join(",")];
    for (const row of rows) lines.push(names.map((name) => cell(this.at(name, row))).join(","));
    return `${lines.join("\n")}\n`;
  }
}

async function unpackTables(described, base64) {
  const letters = atob(base64),
    packed = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i); // a mapped copy takes many times as long
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = await new Response(stream).arrayBuffer();
  return Object.fromEntries(Object.entries(described).map(([name, table]) => [name, new Table(table, bytes)]));
}
