// Numbers and times for people. Sizes in powers of 1024, as everywhere in smb.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value) {
  let unit = 0;
  while (value >= 999.5 && unit < UNITS.length - 1) {
    value /= 1024;
    unit++;
  }
  return `${digits(value)} ${UNITS[unit]}`;
}

export function count(value) {
  for (const [size, letter] of [[1e9, " G"], [1e6, " M"], [1e4, " k"]]) {
    if (value >= size) return digits(letter === " k" ? value / 1e3 : value / size) + letter;
  }
  return value > 0 && value < 10 ? digits(value) : Math.round(value).toLocaleString("en");
}

export const whole = (value) => Math.round(value).toLocaleString("en");

export const rate = (value) => (value === null || value === undefined ? "–" : value < 0.5 ? "0" : `${bytes(value)}/s`);

export const each = (value) => (value === null || value === undefined ? "–" : value < 0.05 ? "0" : `${count(value)}/s`);

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

export function duration(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export const ago = (at, now) => (at > 0 ? `${duration(now - at)} ago` : "never");

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");

export const shape = (extents) => (extents.length ? extents.map((n) => n.toLocaleString("en")).join(" × ") : "scalar");

export const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

function digits(value) {
  if (value === 0) return "0";
  const shown = value >= 99.95 ? Math.round(value).toString() : value >= 9.995 ? value.toFixed(1) : value.toFixed(2);
  return shown.includes(".") ? shown.replace(/\.?0+$/, "") : shown;
}
