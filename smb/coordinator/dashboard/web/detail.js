// One server, buffer or training, in a dialog over the page. Its address is the part after #, so it can be reloaded and shared.

import { Chart } from "./chart.js";
import { badge, el, meter } from "./dom.js";
import * as f from "./format.js";

const STRIPES_SHOWN = 64;
const dialog = document.getElementById("detail");
let open = null; // { kind, name }
let drawn = null; // the content of the dialog

export const link = (kind, name) => `#${kind}=${encodeURIComponent(name)}`;

export function opener(kind, name) {
  return el("a", { href: link(kind, name), class: "open", "aria-haspopup": "dialog" }, name);
}

export function start() {
  addEventListener("hashchange", follow);
  dialog.addEventListener("close", () => {
    open = null;
    if (asked()) history.replaceState(null, "", location.pathname + location.search);
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // the click was beside its content
  });
  follow();
}

export async function refresh() {
  if (!open) return;
  const { kind, name } = open;
  const answer = await fetch(`api/${kind}?name=${encodeURIComponent(name)}`, { cache: "no-cache", signal: AbortSignal.timeout(5000) });
  const found = answer.ok ? await answer.json() : null;
  if (!open || open.kind !== kind || open.name !== name) return;
  if (!found) drawn.body.replaceChildren(el("p", {}, `There is no ${kind} of this name any more.`));
  else keepFocus(() => ({ server, buffer, training })[kind](found));
}

// Elements that are made anew must not take the focus from a user who is using them.
function keepFocus(draw) {
  const href = dialog.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  draw();
  if (href) [...drawn.body.querySelectorAll("a")].find((a) => a.getAttribute("href") === href)?.focus();
}

function asked() {
  const match = /^#(server|buffer|training)=(.*)$/.exec(location.hash);
  return match && { kind: match[1], name: decodeURIComponent(match[2]) };
}

function follow() {
  const wanted = asked();
  if (!wanted) {
    if (dialog.open) dialog.close();
    return;
  }
  open = wanted;
  const close = el("button", { type: "button", class: "close", "aria-label": "Close", autofocus: true, onclick: () => dialog.close() }, "✕");
  const title = el("h2", { id: "detail-title" }, el("span", { class: "quiet" }, `${wanted.kind} `), wanted.name);
  drawn = { body: el("div", {}), chart: null };
  dialog.replaceChildren(el("div", { class: "dialog" }, el("div", { class: "bar" }, title, close), drawn.body));
  if (!dialog.open) dialog.showModal();
  refresh().catch(() => drawn.body.replaceChildren(el("p", {}, "The coordinator does not answer.")));
}

function server(found) {
  const now = found.now;
  const rates = found.rates;
  const facts = list([
    ["state", badge(found.state, ["gone", "left"].includes(found.state) ? `, ${f.ago(found.last_seen, now)}` : "")],
    ["memory", el("span", {}, meter(found.used, found.capacity, "memory used"), ` ${f.bytes(found.used)} of ${f.bytes(found.capacity)}`)],
    ["its host has free", found.memory_free ? f.bytes(found.memory_free) : "not known"],
    ["data address", found.address],
    ["metrics", found.metrics || "none"],
    ["operations", rates ? f.each(rates.operations) : "–"],
    ["in, out", rates ? `${f.rate(rates.in)}, ${f.rate(rates.out)}` : "–"],
    ["combined in place, from buffer to buffer", rates ? f.rate(rates.within) : "–"],
    ["connections", Object.entries(found.connections_by_transport).map(([way, n]) => `${n} ${way}`).join(", ") || "none"],
    ["deferred, waiting", `${found.deferred}, ${found.waiting}`],
    ["repeated changes", f.count(found.replayed_requests)],
    ["weight", String(found.weight)],
  ]);
  if (!drawn.chart) {
    drawn.plot = el("div", { class: "plot" });
    drawn.chart = new Chart(drawn.plot, { title: "Bytes", series: [{ name: "in", kind: "in" }, { name: "out", kind: "out" }], format: f.rate, powers: 1024, least: 1024 });
    drawn.facts = el("div", {});
    drawn.rest = el("div", {});
    drawn.body.replaceChildren(drawn.facts, drawn.plot, drawn.rest);
  }
  drawn.facts.replaceChildren(facts);
  drawn.chart.update(found.history, [found.history.in, found.history.out]);
  const held = found.holds.map((b) => [b.kind === "buffer" ? opener("buffer", b.name) : `${b.kind} ${b.name}`, f.bytes(b.size), badge(b.state === "gone" ? "away" : b.state)]);
  drawn.rest.replaceChildren(
    ...table("Holds", ["What", "Here", "State"], held, found.holds_left_out),
    ...waits(found.waits),
    ...table("Operations since its start", ["Kind", "By", "Number", "Bytes"], found.operations.map((o) => [o.kind, o.transport, f.count(o.count), f.bytes(o.bytes)])),
    ...table("Errors since its start", ["Reason", "In all", "Last minute"], found.errors.map((e) => [e.reason.replaceAll("_", " "), f.count(e.count), f.count(e.recently)])),
  );
}

function buffer(found) {
  const now = found.now;
  const servers = found.parts.map((part) => part.server);
  const states = new Map(found.segment_list.map((segment) => [segment.server, segment.state]));
  const facts = list([
    ["state", badge(found.state === "gone" ? "away" : found.state)],
    ["shape", f.shape(found.shape)],
    ["dtype", found.dtype],
    ["size", f.bytes(found.size) + (found.versions > 1 ? `, ${found.versions} versions` : "")],
    ["on the wire", found.wire],
    ["stripe, chunk", `${f.bytes(found.stripe)}, ${f.bytes(found.chunk)}`],
    ["made", f.ago(found.created, now)],
    ["moved", f.rate(found.rates.bytes)],
    ["copies", found.degraded ? `1 of ${found.replicas} in ${f.plural(found.degraded, "segment")}` : String(found.replicas)],
    ["skew of its servers", found.skew ? `${found.skew.toFixed(1)}× (the busiest server's traffic over the mean)` : "–"],
    ...(found.training ? [["of training", opener("training", found.training)]] : []),
  ]);
  const stripes = Math.max(1, Math.ceil(found.size / found.stripe));
  const shown = Math.min(stripes, STRIPES_SHOWN);
  const map = el("ol", { class: "stripes", "aria-label": "The first stripes, and the server of each" });
  for (let i = 0; i < shown; i++) {
    const { server: name, state } = found.segment_list[i % found.segment_list.length];
    map.append(el("li", { class: tint(servers.indexOf(name), state), title: `stripe ${i}: ${name}` }, el("span", { class: "hidden" }, name)));
  }
  const total = found.parts.reduce((sum, part) => sum + part.size, 0);
  const parts = found.parts.map((part, i) => [
    el("span", {}, el("span", { class: `cell ${tint(i, states.get(part.server))}`, "aria-hidden": "true" }), " ", opener("server", part.server)),
    f.bytes(part.size),
    f.percent(part.size, total),
    f.rate(part.rate),
    badge(states.get(part.server)),
  ]);
  drawn.body.replaceChildren(
    facts,
    el("h3", {}, "How it is striped"),
    el("p", { class: "quiet" }, `${f.plural(stripes, "stripe")} of ${f.bytes(found.stripe)}, in turn on ${f.plural(found.segment_list.length, "segment")} of ${f.plural(servers.length, "server")}.${stripes > shown ? ` The first ${shown}:` : ""}`),
    map,
    ...table("", ["Server", "Holds", "Share", "Moved", "State"], parts),
    ...secondCopies(found),
    ...readers(found),
    ...mirrors(found),
    ...waits(found.waits),
    ...table("Tensors in it", ["Name", "Shape", "Type"], found.tensors.map((t) => [t.name, f.shape(t.shape), t.dtype]), found.tensors_left_out),
  );
}

// Where the second copies lie, and what is being copied.
function secondCopies(found) {
  const rows = found.copies.map((c) => [opener("server", c.server), f.bytes(c.size), c.copying ? f.bytes(c.copying) : "–", badge(c.state)]);
  return table("Second copies", ["Server", "Holds", "Being copied to it", "State"], rows);
}

// For a published state: its publisher, and how far each reader is.
function readers(found) {
  const row = (role) => (m) => [m.client, role, m.generation ? f.whole(m.generation) : "–", m.behind ? f.whole(m.behind) : "–", m.from, `${f.duration(m.silent_s)} ago`];
  const rows = [...(found.publishers ?? []).map(row("publishes")), ...(found.readers ?? []).map(row("reads"))];
  return table("Who publishes and reads", ["Client", "Does", "Generation", "Behind", "From the mirror", "Heard"], rows, found.readers_left_out);
}

// The mirrors: what each has, and what it received from where.
function mirrors(found) {
  const servers = new Map(found.mirrors.map((mirror) => [mirror.name, mirror.server]));
  const rows = found.mirrors.map((mirror) => [
    opener("server", mirror.server),
    mirror.zone,
    badge(mirror.state),
    `${mirror.version}${mirror.behind === null ? ", lag unknown" : mirror.behind ? `, ${mirror.behind} behind` : ""}`,
    Object.entries(mirror.feeds).sort((a, b) => b[1] - a[1]).map(([name, rate]) => `${servers.get(name) || "the source"} ${f.rate(rate)}`).join(", "),
  ]);
  return table("Mirrors", ["On", "Zone", "State", "Version", "Fed by"], rows);
}

function training(found) {
  const now = found.now;
  const settings = Object.entries(found.settings).map(([name, value]) => `${name}=${value ?? "none"}`);
  const facts = list([
    ["state", badge(found.stage)],
    ["scheme", found.scheme],
    ["settings", settings.join(", ") || "none"],
    ["round", found.round ? f.whole(found.round) : "–"],
    ["model", `${f.count(found.elements)} parameters, ${f.bytes(found.size)}`],
    ["samples", f.each(found.samples_per_s)],
    ["its workers' time", found.why || "not known yet"],
    ["made", f.ago(found.created, now)],
  ]);
  if (!drawn.rounds) {
    drawn.facts = el("div", {});
    drawn.rest = el("div", {});
    const places = [el("div", { class: "plot" }), el("div", { class: "plot" })];
    drawn.rounds = new Chart(places[0], { title: "Rounds", series: [{ name: "closed", kind: "in" }], format: f.whole, powers: 1000, least: 10 });
    drawn.samples = new Chart(places[1], { title: "Samples", series: [{ name: "all workers", kind: "out" }], format: f.each, powers: 1000, least: 10 });
    drawn.body.replaceChildren(drawn.facts, ...places, drawn.rest);
  }
  drawn.facts.replaceChildren(facts);
  drawn.rounds.update(found.history, [found.history.rounds]);
  drawn.samples.update(found.history, [found.history.samples]);
  const workers = found.worker_list.map((w) => [String(w.slot), w.client, w.round ? f.whole(w.round) : "–", f.each(w.samples_per_s), ...["computing", "exchanging", "waiting"].map((part) => (w.time ? f.percent(w.time[part], 1) : "–")), w.samples === null ? "–" : f.count(w.samples), f.whole(w.staleness), f.whole(w.refused)]);
  const fired = found.guard ? [el("h3", {}, "The guard that fired last"), el("p", {}, found.guard)] : [];
  const buffers = found.buffers.map((b) => [opener("buffer", b.name), f.bytes(b.size), f.rate(b.rates.bytes), badge(b.state === "gone" ? "away" : b.state)]);
  drawn.rest.replaceChildren(
    ...(workers.length ? table("Workers", ["Slot", "Client", "Round", "Samples/s", "Computes", "Exchanges", "Waits", "Samples", "Staleness", "Refused"], workers, found.workers - workers.length) : [el("p", {}, "Nobody trains it now.")]),
    ...fired,
    ...waits(found.waits),
    ...table("Its buffers", ["Buffer", "Size", "Moved", "State"], buffers),
  );
}

function waits(rows) {
  const cells = rows.map((w) => [w.title, w.holder ?? "–", w.holder ? f.duration(w.for_s) : "–", String(w.waiting)]);
  return table("Locks, and what waits", ["What", "Held by", "For", "Wait"], cells);
}

// Eight colours that repeat; the table beside the chart tells the servers apart.
export const tint = (i, state) => (state && !["alive", "late", "ok"].includes(state) ? "part bad" : `part t${i % 8}`);

function list(rows) {
  return el("dl", { class: "facts" }, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

function table(title, heads, rows, leftOut = 0) {
  if (!rows.length) return [];
  const head = el("thead", {}, el("tr", {}, ...heads.map((name) => el("th", { scope: "col" }, name))));
  const body = el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell) => el("td", {}, cell)))));
  const made = el("table", { class: "plain", "aria-label": title || heads[0] }, head, body);
  const more = leftOut ? el("p", { class: "quiet" }, `${leftOut} more are not shown`) : null;
  return [title ? el("h3", {}, title) : "", el("div", { class: "sideways" }, made), more].filter(Boolean);
}
