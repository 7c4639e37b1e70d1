// Elements. All text is set by textContent, so a name is always shown literally.

export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Unchanged elements are not touched, so that a selection stays and a screen reader says nothing.
export function text(element, value) {
  if (element.textContent !== value) element.textContent = value;
}

export function classes(element, value) {
  if (element.className !== value) element.className = value;
}

// Brings children into this order. Existing children stay, and keep the focus.
export function arrange(parent, wanted) {
  const keep = new Set(wanted);
  for (const child of [...parent.children]) if (!keep.has(child)) child.remove();
  wanted.forEach((child, i) => {
    if (parent.children[i] !== child) parent.insertBefore(child, parent.children[i] ?? null);
  });
}

export const STATES = {
  alive: ["ok", "●", "alive"],
  ok: ["ok", "●", "ok"],
  trains: ["ok", "●", "trains"],
  idle: ["idle", "○", "nobody trains"],
  late: ["warning", "▲", "late"],
  unheard: ["warning", "▲", "not heard of yet"],
  gone: ["critical", "✕", "gone"],
  left: ["critical", "✕", "stopped"],
  away: ["critical", "✕", "server gone"],
  lost: ["critical", "✕", "memory lost"],
  unknown: ["critical", "✕", "unknown"],
};

// A state as a word and a shape, not only as a colour.
export function badge(state, more = "") {
  const [kind, sign, word] = STATES[state] ?? STATES.unknown;
  return el("span", { class: `badge ${kind}` }, el("span", { "aria-hidden": "true" }, sign), ` ${word}${more}`);
}

export function meter(part, whole, label) {
  const share = whole > 0 ? Math.min(1, part / whole) : 0;
  const fill = el("span", { class: share >= 0.98 ? "fill critical" : share >= 0.9 ? "fill warning" : "fill" });
  fill.style.width = `${100 * share}%`;
  const values = { "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(100 * share) };
  return el("span", { class: "meter", role: "meter", "aria-label": label, ...values }, fill);
}

export const command = (line) => el("pre", { tabindex: 0 }, el("code", {}, line));
