// The time of a job by cause: a sentence, a bar, a table with shares and money, and the attempts.

import { duration, el, show } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;
const HEIGHT = 26;

/** Show the goodput of a job in an element. */
export function goodput(home, found) {
  show(home, found, () => [
    el("p", { class: "summary" }, found.summary[0].toUpperCase() + found.summary.slice(1)),
    found.causes.length && bar(found),
    found.causes.length && table(found),
    ...found.notes.map((note) => el("p", { class: "note" }, note)),
    found.attempts.length > 1 && attempts(found.attempts),
  ].filter(Boolean));
}

function bar(found) {
  const svg = document.createElementNS(SVG, "svg");
  const label = found.causes.map((one) => `${one.label} ${share(one.share)}`).join(", ");
  const facts = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": `Time by cause: ${label}` };
  for (const [key, value] of Object.entries(facts)) svg.setAttribute(key, value);
  let x = 0;
  for (const one of found.causes) {
    const part = document.createElementNS(SVG, "rect");
    const width = one.share * WIDTH;
    const place = { class: `cause-${one.cause}`, x, y: 0, width, height: HEIGHT };
    for (const [key, value] of Object.entries(place)) part.setAttribute(key, value);
    const title = document.createElementNS(SVG, "title");
    title.textContent = `${one.label}: ${span(one.seconds)}, ${share(one.share)}`;
    part.append(title);
    svg.append(part);
    x += width;
  }
  return svg;
}

function table(found) {
  const priced = found.usd !== null;
  const row = (kind, label, seconds, part, usd) => el("tr", {},
    el("th", { scope: "row", class: kind }, label),
    el("td", { data: { head: "Time" } }, span(seconds)),
    el("td", { data: { head: "Share" } }, share(part)),
    priced && el("td", { data: { head: "Money" } }, money(usd)));
  return el("table", { class: "causes" }, el("caption", { class: "unseen" }, "Time by cause"),
    el("thead", {}, el("tr", {}, ["Cause", "Time", "Share", priced && "Money"].filter(Boolean)
      .map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, found.causes.map((one) => row(`cause-${one.cause}`, one.label, one.seconds, one.share, one.usd)),
      row("all", "all", found.wallSeconds, 1, found.usd)));
}

function attempts(found) {
  const heads = ["Attempt", "Time", "Training", "Steps", "Lost steps"];
  return el("table", {}, el("caption", { class: "unseen" }, "Attempts"),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, found.map((one) => el("tr", {},
      el("th", { scope: "row" }, `attempt ${one.attempt}`),
      el("td", { data: { head: "Time" } }, span((new Date(one.ended) - new Date(one.began)) / 1000)),
      el("td", { data: { head: "Training" } }, span(one.seconds.training ?? 0)),
      el("td", { data: { head: "Steps" } }, one.lastStep === null ? "none reported" : `${one.firstStep} to ${one.lastStep}`),
      el("td", { data: { head: "Lost steps" } }, `${one.lostSteps}`)))));
}

/** Format a share of the time. */
export function share(value) {
  return `${(value * 100).toFixed(1)} %`;
}

/** Format a duration, with a tenth of a second if it is short. */
function span(seconds) {
  return seconds < 10 ? `${seconds.toFixed(1)} s` : duration(seconds);
}

/** Format dollars. A small price keeps two digits. */
export function money(usd) {
  return usd >= .1 || usd < 5e-7 ? `$${usd.toFixed(2)}` : `$${Number(usd.toPrecision(2))}`;
}
