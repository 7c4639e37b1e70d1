// A table that is updated in place: rows remain the same elements, so focus and selection stay. A click on a column's head sorts it,
// and a filter narrows it. On a narrow screen style.css makes a card of each row, which would remove the table's roles; therefore
// the roles are set here.

import { arrange, classes, el, text } from "./dom.js";

const BY_TEXT = new Intl.Collator("en", { numeric: true });

// columns: [{ head, cell: (row) => text or element, sort: (row) => number or text, number: true }], the first one names the row.
const FILTER_FROM = 6; // fewer rows need no filter

export class Table {
  constructor(section, { label, columns, key, filter, tint, busiest }) {
    this.columns = columns;
    this.key = key;
    this.tint = tint;
    this.rows = [];
    this.known = new Map(); // key -> { row, element, cells }
    // Sorted by the first column, or by the one named `busiest`, its largest value first.
    const first = busiest ? columns.findIndex((column) => column.head === busiest) : 0;
    this.order = { column: first, down: Boolean(busiest) };
    this.empty = el("div", { class: "empty" });
    this.more = el("p", { class: "quiet", hidden: true });
    this.heads = columns.map((column, i) => this.head(column, i));
    this.body = el("tbody", { role: "rowgroup" });
    const top = el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...this.heads));
    this.table = el("table", { role: "table", "aria-label": label }, top, this.body);
    if (filter) section.querySelector("h2").after(this.filterBox(label));
    section.append(this.table, this.empty, this.more);
  }

  update(rows, { empty, leftOut }) {
    this.rows = rows;
    this.table.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
    if (this.input) this.input.hidden = rows.length < FILTER_FROM && !this.input.value;
    if (rows.length === 0 && this.emptyText !== JSON.stringify(empty.said)) {
      this.emptyText = JSON.stringify(empty.said);
      this.empty.replaceChildren(...empty.make());
    }
    this.leftOut = leftOut;
    this.draw();
  }

  draw() {
    const wanted = (this.input?.value ?? "").trim().toLowerCase();
    const shown = this.rows.filter((row) => !wanted || this.key(row, true).toLowerCase().includes(wanted));
    const { column, down } = this.order;
    const value = this.columns[column].sort;
    shown.sort((a, b) => (down ? -1 : 1) * compare(value(a), value(b)) || BY_TEXT.compare(this.key(a), this.key(b)));
    const seen = new Set();
    const elements = shown.map((row) => {
      const key = this.key(row);
      seen.add(key);
      if (!this.known.has(key)) this.known.set(key, this.makeRow());
      const known = this.known.get(key);
      this.fill(known, row);
      return known.element;
    });
    for (const key of this.known.keys()) if (!seen.has(key)) this.known.delete(key);
    arrange(this.body, elements);
    const notes = [];
    if (wanted && this.rows.length) notes.push(`${shown.length} of ${this.rows.length} match`);
    if (this.leftOut) notes.push(`${this.leftOut.toLocaleString("en")} more are not shown`);
    this.more.hidden = notes.length === 0;
    text(this.more, notes.join("; "));
  }

  head(column, i) {
    const button = el("button", { type: "button", onclick: () => this.sortBy(i) }, column.head);
    const first = i !== this.order.column ? "none" : this.order.down ? "descending" : "ascending";
    return el("th", { role: "columnheader", scope: "col", class: column.number ? "number" : "", "aria-sort": first }, button);
  }

  sortBy(i) {
    const down = this.order.column === i ? !this.order.down : Boolean(this.columns[i].number);
    this.order = { column: i, down };
    this.heads.forEach((head, at) => head.setAttribute("aria-sort", at !== i ? "none" : down ? "descending" : "ascending"));
    this.draw();
  }

  filterBox(label) {
    this.input = el("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${label}`, autocomplete: "off" });
    this.input.addEventListener("input", () => this.draw());
    this.input.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      this.input.value = "";
      this.draw();
    });
    return this.input;
  }

  makeRow() {
    const cells = this.columns.map((column, i) => {
      const role = i === 0 ? "rowheader" : "cell";
      const kind = [column.number && "number", column.wide && "wide", column.half && "half", column.head === "State" && "state"].filter(Boolean).join(" ");
      return el(i === 0 ? "th" : "td", { role, class: kind, "data-head": column.head, scope: i === 0 ? "row" : null });
    });
    return { cells, said: [], element: el("tr", { role: "row" }, ...cells) };
  }

  fill(known, row) {
    classes(known.element, this.tint?.(row) ?? "");
    this.columns.forEach((column, i) => {
      const said = column.said ? JSON.stringify(column.said(row)) : column.cell(row);
      if (known.said[i] === said) return;
      known.said[i] = said;
      known.cells[i].replaceChildren(column.said ? column.cell(row) : said);
    });
  }
}

function compare(a, b) {
  return typeof a === "string" ? BY_TEXT.compare(a, b) : (a ?? -1) - (b ?? -1);
}
