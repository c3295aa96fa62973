// Small helpers to build elements and to write numbers. Text is always set as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "vars") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== ""));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

export function count(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export function millis(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms >= 10000) return `${(ms / 1000).toFixed(1)} s`;
  return ms >= 100 ? `${Math.round(ms)} ms` : `${ms.toFixed(1)} ms`;
}

export const percent = (share) => (Number.isFinite(share) ? `${Math.round(100 * share)} %` : "–");
export const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString();

// A table whose head sorts: `columns` are {title, value(row), show(row)?, number?, class?}.
export class SortedTable {
  constructor(columns, { caption, key, picked }) {
    this.columns = columns;
    this.key = key;
    this.picked = picked;
    this.sort = null;
    this.rows = [];
    this.shown = new Map(); // {row, cells, node} by key, in the order of the table
    this.body = el("tbody");
    this.heads = columns.map((column, index) =>
      el("th", { scope: "col", class: column.number && "number" },
        el("button", { type: "button", onclick: () => this.sortBy(index) }, column.title)));
    this.node = el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, el("tr", {}, this.heads)), this.body);
  }

  sortBy(index) {
    const down = this.sort?.index === index ? !this.sort.down : Boolean(this.columns[index].number);
    this.sort = { index, down };
    this.heads.forEach((head, at) => {
      if (at === index) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    this.show(this.rows);
  }

  show(rows, pickedKey = null) {
    this.rows = rows;
    if (this.sort) {
      const { value } = this.columns[this.sort.index];
      const sign = this.sort.down ? -1 : 1;
      rows = [...rows].sort((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0));
    }
    const focused = this.body.contains(document.activeElement) ? document.activeElement : null;
    const focusedRow = focused?.closest("tr");
    const before = this.shown;
    this.shown = new Map();
    const numbers = new Map(); // of rows with the same key
    for (const row of rows) {
      const key = this.key(row);
      const number = (numbers.get(key) ?? 0) + 1;
      numbers.set(key, number);
      const place = `${number} ${key}`;
      const shown = before.get(place) ?? this.newRow(key);
      this.fillRow(shown, row, key === pickedKey);
      this.shown.set(place, shown);
    }
    for (const [place, { node }] of before) if (!this.shown.has(place)) node.remove();
    this.order();
    if (focused && document.activeElement !== focused) (focused.isConnected ? focused : focusedRow.querySelector("a, button"))?.focus();
  }

  // Only rows that change their place are moved: a click on a row that is moved between press and release is lost.
  order() {
    let next = this.body.firstChild;
    for (const { node } of this.shown.values()) {
      if (next && next !== node && next.nextSibling === node) {
        next.remove(); // it comes further down
        next = node;
      }
      if (next === node) next = node.nextSibling;
      else this.body.insertBefore(node, next);
    }
  }

  newRow(key) {
    const cells = this.columns.map((column) => el("td", { class: [column.number && "number", column.class].filter(Boolean).join(" ") || null }));
    const shown = { row: null, cells, node: el("tr", { "data-key": key }, cells) };
    if (this.picked) shown.node.addEventListener("click", () => this.picked(shown.row));
    return shown;
  }

  // Cells that say the same as before are left alone, and with them focus and selection.
  fillRow(shown, row, isPicked) {
    shown.row = row;
    if (this.picked) setClass(shown.node, isPicked ? "pick picked" : "pick");
    this.columns.forEach((column, index) => {
      const cell = shown.cells[index];
      const content = (column.show ? column.show(row) : column.value(row)) ?? "–";
      if (!(content instanceof Node)) setText(cell, String(content));
      else if (!cell.firstChild?.isEqualNode(content)) cell.replaceChildren(content);
    });
  }
}
