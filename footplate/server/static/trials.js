// The trials of a tuning: parallel coordinates, and a table with the best trial first.
//
// The coordinates have an axis for each parameter, and one for the metric. A line is a trial. The better its result, the
// stronger it is drawn. A trial without a result has a dashed line, which ends before the metric.

import { badge, el, number, show } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 260;
const GAP = 170;
const EDGE = { side: 70, top: 34, bottom: 24 };
// More lines than this can't be told apart, and take long to draw.
const MOST = 500;

/** Show the trials of a tuning in an element. */
export function trials(home, tuning) {
  show(home, tuning, () => [
    el("p", { class: "summary" }, summary(tuning)),
    tuning.trials.length > 1 && el("div", { class: "coordinates", tabindex: "0", role: "region",
      "aria-label": "Parallel coordinates of the trials; the table below has the same values" }, coordinates(tuning)),
    tuning.trials.length && table(tuning),
  ].filter(Boolean));
}

function summary(tuning) {
  const done = `${tuning.trials.length} of ${tuning.maxTrials} trials have begun.`;
  const goal = `${tuning.metric} is ${tuning.goal === "MAXIMIZE" ? "maximized" : "minimized"}.`;
  return `${goal} ${done}${tuning.best ? ` The best is ${tuning.best}.` : ""}`;
}

function table(tuning) {
  const names = Object.keys(tuning.trials[0].parameters);
  const heads = ["Trial", "State", tuning.metric, "Step", ...names];
  return el("table", {}, el("caption", { class: "unseen" }, "Trials, the best first"),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, tuning.trials.map((one) => el("tr", {},
      el("th", { scope: "row" }, el("a", { href: `#/jobs/${one.jobId}` }, `trial ${one.trial}`)),
      el("td", { data: { head: "State" }, title: one.cause || null }, badge(one.state)),
      el("td", { data: { head: tuning.metric } }, one.value === null ? "" : number(one.value)),
      el("td", { data: { head: "Step" } }, one.step === null ? "" : number(one.step)),
      names.map((name) => el("td", { data: { head: name } }, text(one.parameters[name])))))));
}

function coordinates(tuning) {
  const names = Object.keys(tuning.trials[0].parameters);
  const axes = [
    ...names.map((name) => axis(name, tuning.trials.map((one) => one.parameters[name]))),
    axis(tuning.metric, tuning.trials.map((one) => one.value)),
  ];
  const width = 2 * EDGE.side + GAP * (axes.length - 1);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
  const x = (index) => EDGE.side + index * GAP;
  const y = (position) => HEIGHT - EDGE.bottom - position * (HEIGHT - EDGE.top - EDGE.bottom);
  const metric = axes.at(-1);
  // The best trial is drawn last, above the others.
  for (const one of tuning.trials.slice(0, MOST).reverse()) {
    const values = [...names.map((name) => one.parameters[name]), one.value];
    const points = values.map((value, index) => value === null ? null : `${x(index)},${y(axes[index].position(value))}`);
    const isBest = one.jobId === tuning.best;
    const rank = one.value === null ? 0 : metric.position(one.value);
    const good = tuning.goal === "MAXIMIZE" ? rank : 1 - rank;
    const line = shape("polyline", {
      points: points.filter(Boolean).join(" "), class: isBest ? "best" : one.value === null ? "open" : "",
      "stroke-opacity": isBest ? 1 : one.value === null ? .4 : .2 + .6 * good,
    });
    line.append(titled(`trial ${one.trial}: ${values.map((value) => value === null ? one.state.toLowerCase() : text(value)).join(", ")}`));
    svg.append(line);
  }
  axes.forEach((one, index) => {
    svg.append(shape("line", { x1: x(index), x2: x(index), y1: y(0), y2: y(1) }));
    svg.append(label(x(index), EDGE.top - 18, one.name, "name"));
    for (const tick of one.ticks) svg.append(label(x(index) + 6, y(one.position(tick)) + 4, text(tick), "tick"));
  });
  return svg;
}

/** An axis: the place of a value from 0 to 1, and the values to write beside it. Positive values over two decades are on a logarithm. */
function axis(name, all) {
  const known = all.filter((value) => value !== null);
  if (known.some((value) => typeof value !== "number")) {
    const values = [...new Set(known.map(String))].sort();
    const position = (value) => values.length < 2 ? .5 : values.indexOf(String(value)) / (values.length - 1);
    return { name, position, ticks: values };
  }
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const scale = low > 0 && high / low >= 100 ? Math.log : (value) => value;
  const span = scale(high) - scale(low);
  const position = (value) => span > 0 ? (scale(value) - scale(low)) / span : .5;
  return { name, position, ticks: known.length ? [...new Set([low, high])] : [] };
}

function label(x, y, content, kind) {
  const made = shape("text", { x, y, class: kind, "text-anchor": kind === "name" ? "middle" : "start" });
  const short = content.length > 22 ? `${content.slice(0, 21)}…` : content;
  made.textContent = short;
  if (short !== content) made.append(titled(content));
  return made;
}

function titled(content) {
  const title = shape("title", {});
  title.textContent = content;
  return title;
}

function shape(tag, facts) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(facts)) made.setAttribute(key, value);
  return made;
}

function text(value) {
  return typeof value === "number" ? number(value) : String(value);
}
