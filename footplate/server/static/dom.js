// Elements, and the formats of numbers and times.

/** Make an element: `el("a", {href: "#/"}, "Jobs")`. A key that begins with "on" is a listener. Text is never parsed as HTML. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "data") Object.assign(made.dataset, value);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return made;
}

/** Replace the children of an element if their content has changed. The focus stays on the element with the same data-key. */
export function show(home, shown, make) {
  const now = JSON.stringify(shown);
  if (home.shown === now) return;
  home.shown = now;
  const key = home.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  home.replaceChildren(...[make()].flat().filter(Boolean));
  if (key) home.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
}

/** Format a number of seconds as a duration. */
export function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} days`;
}

/** Format the time that is left, which is an estimate. */
export function about(seconds) {
  if (seconds < 60) return "less than a minute left";
  if (seconds < 3600) return `about ${Math.round(seconds / 60)} min left`;
  if (seconds < 172800) return `about ${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min left`;
  return `about ${Math.round(seconds / 86400)} days left`;
}

/** Format a position: 1st, 2nd, 3rd, 4th. */
export function ordinal(value) {
  const ending = { one: "st", two: "nd", few: "rd", other: "th" };
  return `${value}${ending[new Intl.PluralRules("en", { type: "ordinal" }).select(value)]}`;
}

/** Format a time; another day than today gets its date. */
export function when(text) {
  if (!text) return "";
  const at = new Date(text);
  const day = at.toDateString() === new Date().toDateString();
  const time = at.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
  return day ? time : `${at.toLocaleDateString([], { year: "numeric", month: "short", day: "numeric" })}, ${time}`;
}

/** Make an element of a time, with the full time in its title. */
export function time(text) {
  return el("time", { datetime: text, title: text ? new Date(text).toLocaleString() : null }, when(text));
}

/** Make an element of a duration. If it hasn't ended, the element is updated each second. */
export function took(began, ended) {
  if (!began) return el("span", {}, "");
  const seconds = ((ended ? new Date(ended) : Date.now()) - new Date(began)) / 1000;
  return el("span", ended ? {} : { data: { since: began } }, duration(seconds));
}

setInterval(() => {
  for (const one of document.querySelectorAll("[data-since]")) {
    one.textContent = duration((Date.now() - new Date(one.dataset.since)) / 1000);
  }
}, 1000);

/** Make a badge of a state: a word with a mark. It doesn't depend on its colour. */
export function badge(state) {
  return el("span", { class: `badge ${state.toLowerCase()}` }, state.toLowerCase());
}

/** Format a number with a few digits and its unit. */
export function number(value, unit = "") {
  if (value === null || value === undefined) return "none";
  if (unit === "share") return `${Math.round(value * 100)} %`;
  if (unit === "rate") {
    const step = Math.min(6, Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
    return `${Number((value / 1000 ** step).toPrecision(3))}${["", " k", " M", " G", " T", " P", " E"][step]}`;
  }
  if (unit === "bytes") {
    const step = Math.min(4, Math.floor(Math.log(Math.max(1, value)) / Math.log(1024)));
    return `${Number((value / 1024 ** step).toPrecision(3))} ${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
  }
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(2);
  return `${Number(value.toPrecision(4))}`;
}

const PLAIN = /^[A-Za-z_/.][\w ./@+=-]*$/;
const OTHER = /^(true|false|yes|no|on|off|null|~|\.inf|\.nan)$/i;

/** Format plain values as YAML. */
export function yaml(value, indent = "") {
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    return value.map((one) => `${indent}- ${yaml(one, `${indent}  `).trimStart()}`).join("\n");
  }
  if (value !== null && typeof value === "object") {
    const keys = Object.keys(value);
    if (!keys.length) return "{}";
    return keys.map((key) => `${indent}${scalar(key)}:${after(value[key], indent)}`).join("\n");
  }
  return scalar(value);
}

function after(value, indent) {
  const inner = value !== null && typeof value === "object" && Object.keys(value).length > 0;
  return inner ? `\n${yaml(value, `${indent}  `)}` : ` ${yaml(value)}`;
}

function scalar(value) {
  if (typeof value !== "string") return String(value);
  return PLAIN.test(value) && !OTHER.test(value) && value.trim() === value ? value : JSON.stringify(value);
}
