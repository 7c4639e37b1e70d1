// A small plot of rates over time, as SVG. Colours come from style.css.

import { classes, el, text } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 150;
const LEFT = 64; // labels of the axis
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;
const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  // series: [{ name, kind }], kind is a class of style.css; format makes text of a value; powers: what a unit grows by; least: the lowest top.
  constructor(place, { title, series, format, powers, least }) {
    Object.assign(this, { title, series, format, powers, least });
    this.values = series.map(() => []);
    this.at = null; // the step under the pointer
    this.svg = svg("svg", { class: "chart", role: "img", tabindex: 0, height: HEIGHT });
    this.figures = series.map(({ name, kind }) => {
      const figure = el("span", { class: "figure" });
      return { figure, item: el("span", { class: "key" }, el("span", { class: `swatch ${kind}` }), `${name} `, figure) };
    });
    this.when = el("span", { class: "quiet when" });
    const head = el("p", { class: "legend" }, el("strong", {}, title), ...this.figures.map(({ item }) => item), this.when);
    place.append(head, this.svg);
    new ResizeObserver(() => this.draw()).observe(place);
    this.svg.addEventListener("pointermove", (event) => this.point(this.stepAt(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  // Nothing is drawn for the time before the coordinator started, because it has no data about it.
  update({ step_s: step, end, started }, values) {
    const first = Math.max(0, values[0].length - Math.floor((end - started) / step));
    Object.assign(this, { step, end, values, first: Math.min(first, values[0].length - 1) });
    this.draw();
  }

  draw() {
    const width = this.svg.parentElement.clientWidth;
    const count = this.values[0].length;
    if (!width || !count) return;
    this.width = width;
    const top = nice(Math.max(...this.values.flat(), this.least), this.powers);
    const x = (i) => LEFT + ((width - LEFT - RIGHT) * i) / (count - 1);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(share * top);
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      parts.push(label(LEFT - 6, at + 4, "end", this.format(share * top)));
    }
    const minutes = Math.round((count * this.step) / 60);
    for (let minute = minutes; minute >= 0; minute--) {
      const at = x(count - 1) - ((width - LEFT - RIGHT) * minute) / minutes;
      const narrow = width < 420 && minute % minutes !== 0;
      if (!narrow) parts.push(label(at, HEIGHT - 5, minute === minutes ? "start" : minute ? "middle" : "end", minute ? `-${minute} min` : "now"));
    }
    this.values.forEach((values, s) => {
      const points = values.map((value, i) => `${x(i).toFixed(1)} ${y(value).toFixed(1)}`).slice(this.first);
      const line = `M${points.join("L")}`;
      const { kind } = this.series[s];
      parts.push(svg("path", { class: `area ${kind}`, d: `${line}L${x(count - 1)} ${y(0)}L${x(this.first)} ${y(0)}Z` }));
      parts.push(svg("path", { class: `line ${kind}`, d: line }));
    });
    if (this.at !== null) parts.push(svg("line", { class: "cursor", x1: x(this.at), x2: x(this.at), y1: TOP, y2: y(0) }));
    this.svg.setAttribute("width", width);
    this.svg.replaceChildren(...parts);
    this.say(count);
  }

  say(count) {
    const at = this.at ?? count - 1;
    this.figures.forEach(({ figure }, s) => text(figure, this.format(this.values[s][at] ?? 0)));
    text(this.when, this.at === null ? "" : `at ${clock(this.end - (count - 1 - at) * this.step)}`);
    classes(this.when, this.at === null ? "quiet when" : "quiet when on");
    const said = this.series.map(({ name }, s) => `${name}: now ${this.format(this.values[s].at(-1))}, most ${this.format(Math.max(...this.values[s]))}`);
    this.svg.setAttribute("aria-label", `${this.title} over the last minutes. ${said.join("; ")}. Left and right arrows read it.`);
  }

  stepAt(offset) {
    const count = this.values[0].length;
    const share = (offset - LEFT) / (this.width - LEFT - RIGHT);
    return Math.max(0, Math.min(count - 1, Math.round(share * (count - 1))));
  }

  point(at) {
    this.at = at;
    this.draw();
  }

  key(event) {
    const last = this.values[0].length - 1;
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === "Escape" && this.at !== null) {
      event.stopPropagation();
      event.preventDefault();
      this.point(null);
    } else if (event.key in moves) {
      event.preventDefault();
      this.point(Math.max(0, Math.min(last, (this.at ?? last) + moves[event.key])));
    }
  }
}

// The next round number above, so that the axis changes seldom.
function nice(value, powers) {
  let unit = 1;
  while (value / unit >= powers) unit *= powers;
  for (const step of [1, 2, 4, 5, 10, 20, 40, 50, 100, 200, 400, 500, 1000]) {
    if (step * unit >= value) return step * unit;
  }
  return powers * unit;
}

function svg(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function label(x, y, anchor, content) {
  const made = svg("text", { x, y, "text-anchor": anchor });
  made.textContent = content;
  return made;
}
