// The page: asks /api/state every two seconds, and updates what it shows in place.

import { Chart } from "./chart.js";
import * as detail from "./detail.js";
import { arrange, badge, classes, command, el, meter, text } from "./dom.js";
import * as f from "./format.js";
import { Table } from "./table.js";

const EVERY_MS = 2000; // as often as servers report; the next request waits for the answer to the last one
const PATIENCE_MS = 5000;
const EVENTS_SHOWN = 12;
const $ = (id) => document.getElementById(id);

let state = null;
let answeredAt = 0; // performance.now() of the last answer
let allEvents = false;
let pending = null; // the timer until the next request, or true while a request runs

const number = (row) => row ?? -1;

const trainings = new Table($("trainings"), {
  label: "trainings",
  key: (row) => row.name,
  filter: true,
  columns: [
    { head: "Training", sort: (t) => t.name, said: (t) => t.name, cell: (t) => detail.opener("training", t.name) },
    { head: "State", sort: (t) => t.stage, said: (t) => t.stage, cell: (t) => badge(t.stage) },
    { head: "Scheme", sort: (t) => t.scheme, cell: (t) => t.scheme },
    { head: "Round", number: true, sort: (t) => t.round, cell: (t) => (t.round ? f.whole(t.round) : "–") },
    { head: "Workers", number: true, sort: (t) => t.workers, cell: (t) => f.count(t.workers) },
    { head: "Samples", number: true, sort: (t) => number(t.samples_per_s), cell: (t) => f.each(t.samples_per_s) },
    { head: "Time", half: true, sort: (t) => t.time?.waiting ?? 0, cell: (t) => t.why || "–" },
    { head: "Staleness", number: true, sort: (t) => t.staleness, cell: (t) => (t.workers ? f.whole(t.staleness) : "–") },
    { head: "Refused", number: true, sort: (t) => t.refused, cell: (t) => (t.workers ? f.whole(t.refused) : "–") },
    { head: "Size", number: true, sort: (t) => t.size, cell: (t) => f.bytes(t.size) },
  ],
});

const states = new Table($("states"), {
  label: "published states",
  key: (row) => row.name,
  filter: true,
  columns: [
    { head: "State", sort: (s) => s.name, said: (s) => s.name, cell: (s) => detail.opener("buffer", s.name) },
    { head: "Memory", sort: (s) => s.state, said: (s) => s.state, cell: (s) => badge(s.state === "gone" ? "away" : s.state) },
    { head: "Published by", half: true, sort: (s) => s.publisher, cell: (s) => s.published_by || "nobody" },
    { head: "Generation", number: true, sort: (s) => s.generation, cell: (s) => (s.generation ? f.whole(s.generation) : "–") },
    { head: "Readers", number: true, sort: (s) => s.readers, cell: (s) => f.count(s.readers) },
    { head: "Furthest behind", number: true, sort: (s) => number(s.behind), cell: (s) => (s.behind === null ? "–" : f.whole(s.behind)) },
    { head: "Size", number: true, sort: (s) => s.size, cell: (s) => f.bytes(s.size) },
  ],
});

const servers = new Table($("servers"), {
  label: "memory servers",
  key: (row) => row.name,
  filter: true,
  tint: (row) => (row.state === "alive" ? "" : row.state === "late" ? "warning" : "critical"),
  columns: [
    { head: "Server", sort: (s) => s.name, said: (s) => s.name, cell: (s) => detail.opener("server", s.name) },
    {
      head: "State",
      sort: (s) => s.state,
      said: (s) => [s.state, s.draining, s.alive ? "" : f.ago(s.last_seen, state.now)],
      cell: (s) => badge(s.state, (s.alive ? "" : `, ${f.ago(s.last_seen, state.now)}`) + (s.draining ? ", draining" : "")),
    },
    {
      head: "Memory",
      wide: true,
      sort: (s) => s.used / s.capacity,
      said: (s) => [s.used, s.capacity],
      cell: (s) => el("span", { class: "amount" }, meter(s.used, s.capacity, "memory used"), el("span", {}, `${f.bytes(s.used)} of ${f.bytes(s.capacity)}`)),
    },
    { head: "Operations", number: true, sort: (s) => number(s.rates?.operations), cell: (s) => f.each(s.rates?.operations) },
    { head: "In", number: true, sort: (s) => number(s.rates?.in), cell: (s) => f.rate(s.rates?.in) },
    { head: "Out", number: true, sort: (s) => number(s.rates?.out), cell: (s) => f.rate(s.rates?.out) },
    { head: "Connections", number: true, sort: (s) => s.connections, cell: (s) => (s.alive ? f.count(s.connections) : "–") },
    { head: "Deferred", number: true, sort: (s) => s.deferred, cell: (s) => (s.alive ? f.count(s.deferred) : "–") },
    { head: "Waiting", number: true, sort: (s) => s.waiting, cell: (s) => (s.alive ? f.count(s.waiting) : "–") },
    { head: "Errors/min", number: true, sort: (s) => s.errors_recently, cell: (s) => (s.alive ? f.count(s.errors_recently) : "–") },
  ],
});

// The busiest first. A row moves only once its traffic has about doubled or halved, so that rows do not jump at each update.
const buffers = new Table($("buffers"), {
  label: "buffers",
  key: (row) => row.name,
  filter: true,
  busiest: "Moved",
  columns: [
    { head: "Buffer", sort: (b) => b.name, said: (b) => b.name, cell: (b) => detail.opener("buffer", b.name) },
    { head: "State", sort: (b) => b.state, said: (b) => b.state, cell: (b) => badge(b.state === "gone" ? "away" : b.state) },
    { head: "Shape", half: true, sort: (b) => b.size, cell: (b) => `${f.shape(b.shape)} ${b.dtype}` },
    { head: "Size", number: true, sort: (b) => b.size * b.versions, cell: (b) => f.bytes(b.size) + (b.versions > 1 ? ` × ${b.versions}` : "") },
    { head: "Copies", number: true, sort: (b) => -(b.degraded ?? 0), cell: copies },
    { head: "Moved", number: true, sort: (b) => Math.round(Math.log2(1 + b.rates.bytes)), cell: (b) => f.rate(b.rates.bytes) },
    { head: "Skew", number: true, sort: (b) => b.skew ?? 0, cell: (b) => (b.skew ? `${b.skew.toFixed(1)}×` : "–") },
    { head: "Made", number: true, sort: (b) => -b.created, cell: (b) => f.ago(b.created, state.now) },
    { head: "Striped over", wide: true, sort: (b) => b.servers, said: (b) => [b.parts, b.servers, b.parts.map((p) => known.get(p.server)?.state)], cell: striped },
  ],
});

const clients = new Table($("clients"), {
  label: "clients",
  key: (row, forFilter) => (forFilter ? row.name : row.key),
  filter: true,
  columns: [
    { head: "Client", sort: (c) => c.name, cell: (c) => c.name },
    { head: "Connected", number: true, sort: (c) => -c.since, cell: (c) => (c.since ? `${f.duration(c.connected_s)} ago` : `over ${f.duration(c.connected_s)}`) },
    { head: "Last heard", number: true, sort: (c) => c.silent_s, cell: (c) => `${f.duration(c.silent_s)} ago` },
    { head: "Lease", number: true, sort: (c) => c.lease_left_s, cell: (c) => `${f.duration(c.lease_left_s)} left` },
    { head: "Moved", number: true, sort: (c) => c.rates.bytes, cell: (c) => f.rate(c.rates.bytes) },
    { head: "Locks held", number: true, sort: (c) => c.holds, cell: (c) => f.count(c.holds) },
  ],
});

const waits = new Table($("waits"), {
  label: "locks, and what waits",
  key: (w) => `${w.what} ${w.kind} ${w.name} ${w.server} ${w.what === "shared" ? w.holder_key : ""}`,
  columns: [
    { head: "What", sort: (w) => w.title, cell: (w) => w.title },
    { head: "Held by", half: true, sort: (w) => w.holder ?? "", cell: (w) => w.holder ?? "nobody" },
    { head: "For", number: true, sort: (w) => (w.holder ? w.for_s : -1), cell: (w) => (w.holder ? f.duration(w.for_s) : "–") },
    { head: "Lease", number: true, sort: (w) => w.left_s, cell: (w) => (w.holder ? `${f.duration(w.left_s)} left` : "–") },
    { head: "Waiting", number: true, sort: (w) => w.waiting, cell: (w) => f.count(w.waiting) },
    { head: "At server", sort: (w) => w.server, cell: (w) => w.server },
  ],
});

const bytesChart = new Chart($("chart-bytes"), {
  title: "Bytes",
  series: [{ name: "in", kind: "in" }, { name: "out", kind: "out" }],
  format: f.rate,
  powers: 1024,
  least: 1024,
});
const operationsChart = new Chart($("chart-operations"), {
  title: "Operations",
  series: [{ name: "all kinds", kind: "operations" }],
  format: f.each,
  powers: 1000,
  least: 10,
});

let known = new Map(); // servers by name

function copies(buffer) {
  return buffer.degraded ? `1 of ${buffer.replicas} in ${f.plural(buffer.degraded, "segment")}` : String(buffer.replicas ?? 1);
}

function striped(buffer) {
  const bar = el("span", { class: "strip", "aria-hidden": "true" });
  const total = buffer.parts.reduce((sum, part) => sum + part.size, 0);
  buffer.parts.forEach((part, i) => {
    const cell = el("span", { class: detail.tint(i, known.get(part.server)?.state), title: `${part.server}: ${f.bytes(part.size)}` });
    cell.style.flexGrow = part.size / total;
    bar.append(cell);
  });
  return el("span", { class: "amount" }, bar, el("span", {}, buffer.servers === 1 ? buffer.parts[0].server : f.plural(buffer.servers, "server")));
}

function show() {
  known = new Map(state.servers.map((server) => [server.name, server]));
  const { address } = state.coordinator;
  text($("where"), `coordinator ${address}, up ${f.duration(state.now - state.coordinator.started)}`);
  showProblems();
  showTotals();
  bytesChart.update(state.history, [state.history.in, state.history.out]);
  operationsChart.update(state.history, [state.history.operations]);
  servers.update(state.servers, { empty: noServers(address), leftOut: 0 });
  const own = state.buffers.filter((buffer) => !buffer.training); // buffers of a training are shown in its dialog
  trainings.update(state.trainings, { empty: noTrainings(address), leftOut: state.left_out.trainings });
  const published = state.states ?? []; // missing in answers of older coordinators
  for (const part of [$("states"), $("to-states")]) part.hidden = !published.length;
  states.update(published, { empty: noStates, leftOut: state.left_out.states ?? 0 });
  buffers.update(own, { empty: state.of_trainings.buffers ? folded : noBuffers(address), leftOut: state.left_out.buffers });
  clients.update(state.clients, { empty: noClients(address), leftOut: state.left_out.clients });
  const ownWaits = state.waits.filter((wait) => !wait.training);
  waits.update(ownWaits, { empty: state.of_trainings.waits ? folded : noWaits, leftOut: state.left_out.waits });
  text($("n-servers"), state.totals.alive === state.totals.servers ? `${state.totals.servers}` : `${state.totals.alive}/${state.totals.servers}`);
  text($("n-trainings"), String(state.trainings.length + state.left_out.trainings));
  text($("n-states"), String(published.length + (state.left_out.states ?? 0)));
  text($("n-buffers"), counted(own.length + state.left_out.buffers, state.of_trainings.buffers));
  text($("n-events"), String(state.events.length));
  text($("n-clients"), String(state.totals.clients));
  text($("n-waits"), counted(ownWaits.length + state.left_out.waits, state.of_trainings.waits));
  showEvents();
}

// Rows that belong to trainings are shown in their dialogs; this text counts them.
const counted = (own, inside) => (inside ? `${own} + ${inside} in trainings` : String(own));

function showProblems() {
  const { problems } = state;
  const shown = problems.map(problem);
  if (!shown.length) {
    const word = state.totals.servers ? `Nothing: ${f.plural(state.totals.alive, "server")} alive.` : "Nothing, but there is no memory server yet.";
    shown.push(["fine", () => el("p", { class: "fine" }, el("span", { "aria-hidden": "true" }, "✓ "), word), word]);
  }
  const list = $("problem-list");
  const there = new Map([...list.children].map((child) => [child.dataset.key, child]));
  arrange(list, shown.map(([key, make, said]) => {
    const before = there.get(key);
    if (before?.dataset.said === said) return before;
    const made = make();
    Object.assign(made.dataset, { key, said });
    if (before?.open) made.open = true;
    const focused = before?.contains(document.activeElement);
    before?.replaceWith(made);
    if (focused) made.querySelector("summary")?.focus();
    return made;
  }));
  const grave = problems.reduce((sum, p) => sum + (p.severity === "note" ? 0 : (p.count ?? 1)), 0);
  document.title = `${grave ? `(${grave}) ` : ""}Soft Memory Box`;
}

// The first problems are open; each can be closed.
function problem({ severity, title, detail: more, action, about, since, count = 1, members = [] }, i) {
  const sign = { critical: "✕", warning: "▲", note: "●" }[severity];
  const when = since ? `, ${f.ago(since, state.now)}` : "";
  const make = () => {
    const head = el("summary", {}, el("span", { class: `badge ${severity}` }, el("span", { "aria-hidden": "true" }, sign), ` ${severity}`), ` ${title}`, el("span", { class: "quiet" }, when));
    const parts = [more ? el("p", {}, more) : null, action ? el("p", {}, el("strong", {}, "What to do: "), action) : null];
    if (about[0]) parts.push(el("p", {}, "See ", detail.opener(about[0], about[1])));
    if (members.length) parts.push(el("ul", {}, ...members.map(member)));
    if (count > members.length && members.length) parts.push(el("p", { class: "quiet" }, `${f.count(count - members.length)} more are not shown`));
    return el("details", { class: `problem ${severity}`, open: i < 3 && severity !== "note" }, head, ...parts);
  };
  return [`${about.join(" ")} ${title.replace(/[\d,]+/g, "")}`, make, JSON.stringify([title, more, action, when, members])];
}

// One problem of many that are one row.
function member({ title, about }) {
  const at = about[0] ? title.indexOf(about[1]) : -1;
  const parts = at < 0 ? [title] : [title.slice(0, at), detail.opener(about[0], about[1]), title.slice(at + about[1].length)];
  return el("li", {}, ...parts);
}

function showTotals() {
  const { totals } = state;
  const within = totals.rates.within >= 0.5;
  const inTrainings = state.of_trainings.buffers;
  if (within) $("in-place").hidden = false; // and it stays, so that nothing moves when a round ends
  const tiles = [
    ["Servers", `${totals.alive}`, totals.alive === totals.servers ? "alive" : `of ${totals.servers} alive`],
    ["Memory", f.bytes(totals.used), `of ${f.bytes(totals.capacity)}, ${f.percent(totals.used, totals.capacity)}`],
    ["Operations", f.each(totals.rates.operations), ""],
    ["In", f.rate(totals.rates.in), within ? `+ ${f.rate(totals.rates.within)} in place` : ""],
    ["Out", f.rate(totals.rates.out), ""],
    ["Buffers", f.count(totals.buffers), `${f.bytes(totals.buffer_bytes)}${inTrainings ? `; ${f.count(inTrainings)} in trainings` : ""}`],
    ["Clients", f.count(totals.clients), f.plural(totals.connections, "connection")],
    ["Waiting", f.count(totals.waiting), totals.deferred ? `${f.count(totals.deferred)} deferred` : ""],
  ];
  const list = $("totals");
  if (!list.children.length) list.append(...tiles.map(([name]) => el("div", {}, el("dt", {}, name), el("dd", {}), el("dd", { class: "quiet" }))));
  tiles.forEach(([, value, more], i) => {
    text(list.children[i].children[1], value);
    text(list.children[i].children[2], more);
  });
}

// A text in which the quoted names of known servers, buffers and trainings are links to them.
function linked(words, known) {
  return words.split(/("[^"]*")/).flatMap((part) => {
    const name = part.slice(1, -1);
    return part.startsWith('"') && known.has(name) ? ['"', detail.opener(known.get(name), name), '"'] : [part];
  });
}

function showEvents() {
  const list = $("event-list");
  // Events of buffers and locks that belong to trainings are left out like their rows, unless all are asked for.
  const inside = (event) => event.level === "info" && state.trainings.some((training) => event.text.includes(`"${training.name}/`));
  const shown = allEvents ? state.events : state.events.filter((event) => !inside(event)).slice(0, EVENTS_SHOWN);
  const known = new Map(["server", "buffer", "training"].flatMap((kind) => state[`${kind}s`].map((row) => [row.name, kind]))); // a training's weights open it
  const said = JSON.stringify([shown.length, shown[0], state.events.length, [...known.keys()]]);
  if (list.dataset.said === said) return;
  list.dataset.said = said;
  const focused = list.contains(document.activeElement) ? document.activeElement : null;
  list.replaceChildren(...shown.map((event) => el("li", { class: event.level }, el("time", { datetime: new Date(event.at * 1000).toISOString() }, f.clock(event.at)), " ", event.level === "info" ? "" : el("strong", {}, `${event.level}: `), ...linked(event.text, known))));
  const same = (link) => link.href === focused.href && link.parentElement.textContent === focused.parentElement.textContent;
  if (focused) [...list.querySelectorAll("a")].find(same)?.focus();
  if (!shown.length) list.append(el("li", { class: "quiet" }, "Nothing since the coordinator started."));
  $("more-events")?.remove();
  if (shown.length < state.events.length) {
    const more = () => {
      allEvents = true;
      showEvents();
    };
    list.after(el("button", { type: "button", id: "more-events", onclick: more }, `Show all ${state.events.length}`));
  }
}

// Hints that are shown while something is missing.

const noServers = (address) => ({
  said: address,
  make: () => [el("p", {}, "No memory server has registered yet. Start one on each host that lends memory:"), command(`smb-memserver --coordinator ${address} --capacity 1GiB`)],
});

const noTrainings = (address) => ({
  said: address,
  make: () => [el("p", {}, "No training. In a PyTorch script, after the optimizer was made:"), command(`import smb.torch\nshared = smb.torch.join(model, optimizer, "my-model", scheme="diloco", every=50, coordinator="${address}")`)],
});

const noStates = { said: 0, make: () => [el("p", {}, "No published state.")] };

const folded = { said: 1, make: () => [el("p", {}, "None but those of trainings: click on one above.")] };

const noWaits = { said: 0, make: () => [el("p", {}, "No lock is held, and nobody waits.")] };

const noBuffers = (address) => ({
  said: address,
  make: () => [el("p", {}, "No buffer yet. Make one from a shell, or with client.create in Python:"), command(`smb create weights --shape 1000,1000 --coordinator ${address}`)],
});

const noClients = (address) => ({
  said: address,
  make: () => [el("p", {}, "No client is connected. In Python:"), command(`import smb\nclient = smb.connect("${address}")`)],
});

// The repeated requests.

async function ask() {
  pending = true;
  try {
    const answer = await fetch("api/state", { cache: "no-cache", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(`it answers ${answer.status}: ${(await answer.text()).slice(0, 200)}`);
    state = await answer.json();
    answeredAt = performance.now();
    show();
    await detail.refresh();
    connected(null);
  } catch (error) {
    connected(error);
  }
  pending = setTimeout(ask, EVERY_MS);
}

function connected(error) {
  const lost = Boolean(error);
  document.body.classList.toggle("stale", lost);
  text($("live"), lost ? "no answer" : "live");
  classes($("live"), lost ? "live lost-live" : "live on");
  $("lost").hidden = !lost;
  if (!lost) return;
  const reason = error.message.startsWith("it answers") ? error.message : "it does not answer";
  const since = answeredAt ? ` What you see is ${f.duration((performance.now() - answeredAt) / 1000)} old. Work on opened buffers goes on without it.` : "";
  text($("lost"), `The coordinator is lost: ${reason}.${since} Trying again every ${EVERY_MS / 1000} s.`);
}

document.addEventListener("visibilitychange", () => {
  if (pending === true) return;
  clearTimeout(pending);
  if (!document.hidden) ask();
});
detail.start();
ask();
