// Curves as SVG: axes with round numbers, a legend with the latest values, and the values at the pointer or the cursor.

import { duration, el, number, show } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const EDGE = { left: 58, right: 12, top: 10, bottom: 26 };
const COLOURS = 6;

/** Show figures in an element, or a note why there are none. An existing chart gets the new values, and keeps its cursor. */
export function charts(home, figures, note) {
  const before = home.charts ?? new Map();
  home.charts = new Map(figures.map((one) => [one.title, before.get(one.title) ?? chart()]));
  for (const one of figures) home.charts.get(one.title).take(one);
  show(home, [figures.map((one) => one.title), note], () => [
    ...figures.map((one) => home.charts.get(one.title).all),
    note && el("p", { class: "empty" }, note),
  ]);
}

function chart() {
  const caption = el("figcaption");
  const canvas = el("div", { class: "canvas", tabindex: "0", role: "img" });
  const values = el("p", { class: "values", "aria-live": "polite" });
  const state = { figure: null, at: null };
  const redraw = () => state.figure && draw(canvas, values, state);
  new ResizeObserver(redraw).observe(canvas);
  return {
    all: el("figure", {}, caption, canvas, values),
    take(figure) {
      if (JSON.stringify(figure) === JSON.stringify(state.figure)) return;
      state.figure = figure;
      caption.replaceChildren(el("strong", {}, figure.title), legend(figure));
      canvas.setAttribute("aria-label", summary(figure));
      redraw();
    },
  };
}

function legend(figure) {
  return el("ul", {}, figure.series.map((one, index) => {
    const latest = one.y.findLast((y) => y !== null);
    return el("li", { class: `colour-${index % COLOURS}` }, `${one.name} `, el("b", {}, number(latest, figure.unit)));
  }));
}

/** Describe the curves for screen readers. */
function summary(figure) {
  const each = figure.series.map((one) => {
    const known = one.y.filter((y) => y !== null);
    if (!known.length) return `${one.name}: no values`;
    const say = (y) => number(y, figure.unit);
    return `${one.name}: from ${say(known[0])} to ${say(known.at(-1))}, least ${say(Math.min(...known))}, most ${say(Math.max(...known))}`;
  });
  return `${figure.title} by ${figure.x}. ${each.join("; ")}. Use the arrow keys to move along the curves.`;
}

function draw(canvas, values, state) {
  const { figure } = state;
  const width = Math.max(220, canvas.clientWidth);
  const xs = figure.series.flatMap((one) => one.x);
  const ys = figure.series.flatMap((one) => one.y).filter((y) => y !== null);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
  canvas.replaceChildren(svg);
  if (!ys.length) return;
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const scale = scaleOf(ys);
  const highest = Math.max(...ys, figure.unit === "share" ? 1 : -Infinity) / scale;
  const ticks = round(figure.unit === "" ? Math.min(...ys) / scale : 0, highest, 4, figure.unit);
  const [low, high] = [ticks[0], ticks.at(-1)];
  const x = (value) => EDGE.left + ((value - left) / (right - left || 1)) * (width - EDGE.left - EDGE.right);
  const y = (value) => HEIGHT - EDGE.bottom - ((value / scale - low) / (high - low || 1)) * (HEIGHT - EDGE.top - EDGE.bottom);
  for (const tick of ticks.map((one) => one * scale).filter(Number.isFinite)) {
    svg.append(shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }));
    svg.append(label(EDGE.left - 7, y(tick) + 4, number(tick, figure.unit), "end"));
  }
  for (const tick of round(left, right, Math.floor(width / 80), figure.x).filter((one) => one >= left && one <= right)) {
    svg.append(label(x(tick), HEIGHT - 7, figure.x === "seconds" ? duration(tick) : number(tick), "middle"));
  }
  figure.series.forEach((one, index) => {
    const path = shape("path", { class: `curve colour-${index % COLOURS}`, d: line(one, x, y) });
    svg.append(path);
    if (one.x.length === 1 && one.y[0] !== null) {
      svg.append(shape("circle", { class: `dot colour-${index % COLOURS}`, cx: x(one.x[0]), cy: y(one.y[0]), r: 3 }));
    }
  });
  pointing(canvas, svg, values, state, { x, y, left, right, width });
}

/**
 * The divisor of values before they are drawn: 1, unless the numbers are so large or so small that their differences and steps
 * leave the range of a double.
 */
function scaleOf(values) {
  const largest = Math.max(...values.map(Math.abs));
  if (largest > 1e290) return 1e200;
  return largest > 0 && largest < 1e-290 ? 1e-200 : 1;
}

/** Make a path, with a gap where a value is missing. */
function line(series, x, y) {
  let pen = "M";
  let path = "";
  series.x.forEach((at, index) => {
    const value = series.y[index];
    if (value === null) pen = "M";
    else {
      path += `${pen}${x(at).toFixed(1)},${y(value).toFixed(1)}`;
      pen = "L";
    }
  });
  return path;
}

function pointing(canvas, svg, values, state, { x, y, left, right, width }) {
  const { figure } = state;
  const cursor = shape("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
  const dots = figure.series.map((_, index) => shape("circle", { class: `dot colour-${index % COLOURS}`, r: 3.5, visibility: "hidden" }));
  svg.append(cursor, ...dots);
  const all = [...new Set(figure.series.flatMap((one) => one.x))].sort((a, b) => a - b);

  function look(value) {
    state.at = value;
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", x(value));
    cursor.setAttribute("x2", x(value));
    const said = figure.series.map((one, index) => {
      const near = nearest(one.x, value);
      const there = one.y[near];
      dots[index].setAttribute("visibility", there === null ? "hidden" : "visible");
      if (there !== null) {
        dots[index].setAttribute("cx", x(one.x[near]));
        dots[index].setAttribute("cy", y(there));
      }
      return `${one.name} ${number(there, figure.unit)}`;
    });
    values.textContent = `${figure.x === "seconds" ? `after ${duration(value)}` : `step ${number(value)}`}: ${said.join(", ")}`;
  }

  function hide() {
    state.at = null;
    values.textContent = "";
    for (const one of [cursor, ...dots]) one.setAttribute("visibility", "hidden");
  }

  canvas.onpointermove = (event) => {
    const share = (event.clientX - svg.getBoundingClientRect().left - EDGE.left) / (width - EDGE.left - EDGE.right);
    look(all[nearest(all, left + Math.min(1, Math.max(0, share)) * (right - left))]);
  };
  canvas.onpointerleave = hide;
  canvas.onblur = hide;
  canvas.onkeydown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -all.length, End: all.length }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const now = state.at === null ? (step > 0 ? -1 : all.length) : all.indexOf(state.at);
    look(all[Math.min(all.length - 1, Math.max(0, now + step))]);
  };
  if (state.at !== null) look(all[nearest(all, state.at)]);
}

function nearest(sorted, value) {
  let best = 0;
  sorted.forEach((one, index) => {
    if (Math.abs(one - value) < Math.abs(sorted[best] - value)) best = index;
  });
  return best;
}

/** Choose round numbers around a range, about `count` of them, in the usual steps of seconds and bytes. */
function round(low, high, count, unit) {
  if (low === high) high = low + (Math.abs(low) || 1);
  const rough = (high - low) / Math.max(1, count);
  const steps = unit === "seconds" ? [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800] : [];
  const base = unit === "bytes" ? 1024 ** Math.floor(Math.log(rough) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(rough / base));
  const step = steps.find((one) => one >= rough) ?? base * power * [1, 2, 2.5, 5, 10].find((one) => base * one * power >= rough * 0.999);
  const first = Math.floor(low / step + 1e-9) * step;
  const found = [];
  for (let tick = first; found.length < 50; tick += step) {
    found.push(Number(tick.toPrecision(12)));
    if (tick >= high - step * 1e-9) break;
  }
  return found;
}

function shape(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function label(x, y, text, anchor) {
  const made = shape("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}
