// Curves and areas as SVG: axes with round numbers, a legend with the latest values or the totals, the values at the pointer or the
// cursor, and zoom. A drag, or the keys + and -, zoom the x axis of all charts that share it; a double click, Escape or the button
// shows the whole axis again.

import { duration, el, number, show } from "./dom.js";
import { Zooms } from "./zooms.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 190;
const EDGE = { left: 58, right: 12, top: 10, bottom: 26 };
const COLOURS = 12;
const DRAG_PX = 6; // a shorter drag is a click
const HELP = "Use the arrow keys to move along the curves, plus and minus to zoom, Shift with the arrow keys to move the zoomed part, "
  + "Escape to see everything.";
let clips = 0;

/**
 * Show figures in an element, or a note why there are none. An existing chart gets the new values, and keeps its cursor.
 * Charts with the same `zooms` zoom together.
 */
export function charts(home, figures, note, zooms = (home.zooms ??= new Zooms())) {
  const before = home.charts ?? new Map();
  home.charts = new Map(figures.map((one) => [one.title, before.get(one.title) ?? chart(zooms)]));
  for (const [title, gone] of before) if (!home.charts.has(title)) gone.end();
  for (const one of figures) home.charts.get(one.title).take(one);
  show(home, [figures.map((one) => one.title), note], () => [
    ...figures.map((one) => home.charts.get(one.title).all),
    note && el("p", { class: "empty" }, note),
  ]);
}

function chart(zooms) {
  const caption = el("figcaption");
  const canvas = el("div", { class: "canvas", tabindex: "0", role: "img" });
  const values = el("p", { class: "values", "aria-live": "polite" });
  const state = { figure: null, at: null, drag: null, zooms };
  const reset = el("button", { type: "button", class: "reset", hidden: true, onclick: () => {
    zooms.set(state.figure.x, null);
    canvas.focus();
  } }, "Reset zoom");
  const redraw = () => {
    if (!state.figure) return;
    const range = zooms.get(state.figure.x);
    reset.hidden = !range;
    reset.setAttribute("aria-label", `Reset the zoom of ${state.figure.title}`);
    canvas.setAttribute("aria-label", summary(state.figure, range));
    draw(canvas, values, state);
  };
  const end = zooms.listen(redraw);
  new ResizeObserver(redraw).observe(canvas);
  return {
    all: el("figure", {}, el("div", { class: "caption" }, caption, reset), canvas, values),
    end,
    take(figure) {
      if (JSON.stringify(figure) === JSON.stringify(state.figure)) return;
      state.figure = figure;
      caption.replaceChildren(el("strong", {}, figure.title), inTotal(figure), legend(figure));
      redraw();
    },
  };
}

/** The whole that the shares in the legend of areas are of. */
function inTotal(figure) {
  const seconds = figure.series.reduce((sum, one) => sum + (one.total ?? 0), 0);
  return figure.kind === "stacked" ? el("span", { class: "in-total" }, `${duration(seconds)} in total`) : "";
}

function legend(figure) {
  const areas = figure.kind === "stacked";
  const all = figure.series.reduce((sum, one) => sum + (one.total ?? 0), 0) || 1;
  return el("ul", { class: areas ? "areas" : null }, figure.series.map((one, index) => {
    const latest = one.y.findLast((y) => y !== null);
    const value = areas ? `${(one.total / all * 100).toFixed(1)} %` : number(latest, figure.unit);
    return el("li", { class: colour(one, index), title: areas ? `${duration(one.total)} in total` : null }, `${one.name} `, el("b", {}, value));
  }));
}

function colour(series, index) {
  return `colour-${(series.colour ?? index) % COLOURS}${series.dashed ?? (series.colour == null && index === 1) ? " dashed" : ""}`;
}

/** Describe the curves for screen readers. */
function summary(figure, range) {
  const all = figure.series.reduce((sum, one) => sum + (one.total ?? 0), 0) || 1;
  const each = figure.series.map((one) => {
    if (figure.kind === "stacked") return `${one.name}: ${(one.total / all * 100).toFixed(1)} % in total`;
    const known = one.y.filter((y) => y !== null);
    if (!known.length) return `${one.name}: no values`;
    const say = (y) => number(y, figure.unit);
    return `${one.name}: from ${say(known[0])} to ${say(known.at(-1))}, least ${say(Math.min(...known))}, most ${say(Math.max(...known))}`;
  });
  const zoomed = range ? ` Zoomed to ${position(figure, range[0])} to ${position(figure, range[1])}.` : "";
  return `${figure.title} by ${figure.x}. ${each.join("; ")}.${zoomed} ${HELP}`;
}

/** Name a place on the x axis. */
function position(figure, value) {
  return figure.x === "seconds" ? duration(value) : `step ${step(value)}`;
}

/** Format a step with all of its digits: zoomed, neighbours must differ. */
function step(value) {
  return `${Math.round(value * 1000) / 1000}`;
}

function draw(canvas, values, state) {
  const { figure } = state;
  const width = Math.max(220, canvas.clientWidth);
  const stacked = figure.kind === "stacked";
  const series = stacked ? stack(figure.series) : figure.series;
  const xs = series.flatMap((one) => one.x);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
  canvas.replaceChildren(svg);
  if (!series.some((one) => one.y.some((y) => y !== null))) return;
  const whole = extent(xs);
  const range = state.zooms.get(figure.x);
  const [left, right] = range ?? whole;
  let ys = series.flatMap((one) => shown(one, left, right));
  if (!ys.length) ys = [0, 1];
  const [least, most] = extent(ys);
  const scale = scaleOf(ys);
  const highest = Math.max(most, figure.unit === "share" ? 1 : -Infinity) / scale;
  const ticks = round(figure.unit === "" ? least / scale : 0, highest, 4, figure.unit);
  const [low, high] = [ticks[0], ticks.at(-1)];
  const x = (value) => EDGE.left + ((value - left) / (right - left || 1)) * (width - EDGE.left - EDGE.right);
  const y = (value) => HEIGHT - EDGE.bottom - ((value / scale - low) / (high - low || 1)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const drawn = ticks.map((one) => one * scale).filter(Number.isFinite);
  const labels = drawn.map((tick) => number(tick, figure.unit));
  const distinct = new Set(labels).size === labels.length;
  drawn.forEach((tick, index) => {
    svg.append(shape("line", { class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: y(tick), y2: y(tick) }));
    svg.append(label(EDGE.left - 7, y(tick) + 4, distinct ? labels[index] : `${Number(tick.toPrecision(7))}`, "end"));
  });
  for (const tick of round(left, right, Math.floor(width / 80), figure.x).filter((one) => one >= left && one <= right)) {
    svg.append(label(x(tick), HEIGHT - 7, figure.x === "seconds" ? duration(tick) : step(tick), "middle"));
  }
  const clip = `clip-${++clips}`;
  const window = shape("clipPath", { id: clip });
  window.append(shape("rect", { x: EDGE.left - 2, y: 0, width: width - EDGE.left - EDGE.right + 4, height: HEIGHT }));
  const curves = shape("g", { "clip-path": `url(#${clip})` });
  svg.append(window, curves);
  series.forEach((one, index) => {
    const kind = colour(one, index);
    if (stacked) curves.append(shape("path", { class: `area ${kind}`, d: area(one, x, y) }));
    else curves.append(shape("path", { class: `curve ${kind}`, d: line(one, x, y) }));
    if (!stacked && one.x.length === 1 && one.y[0] !== null) {
      curves.append(shape("circle", { class: `dot ${kind}`, cx: x(one.x[0]), cy: y(one.y[0]), r: 3 }));
    }
  });
  pointing(canvas, svg, values, state, { x, y, left, right, width, whole, stacked });
}

function extent(values) {
  let [least, most] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  return [least, most];
}

/** Add the areas up: each begins where the one below it ends. */
function stack(series) {
  const below = series[0]?.x.map(() => 0) ?? [];
  return series.map((one) => {
    const base = [...below];
    // The shares are rounded, and their sum isn't more than the whole.
    one.y.forEach((y, index) => { below[index] = Math.min(1, below[index] + (y ?? 0)); });
    return { ...one, base, y: one.y.map((y, index) => (y === null ? null : below[index])) };
  });
}

/** Return the values of a curve between two places, with the neighbours to which its line goes. */
function shown(series, left, right) {
  let first = series.x.findIndex((at) => at >= left);
  if (first < 0) first = series.x.length;
  let after = series.x.findLastIndex((at) => at <= right) + 1;
  if (first > 0 && first < series.x.length) first -= 1;
  if (after > 0) after += 1;
  return series.y.slice(first, after).filter((y) => y !== null);
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

/** Make the outline of an area, in pieces where values are missing. */
function area(series, x, y) {
  let path = "";
  let piece = [];
  const close = () => {
    if (piece.length) {
      const at = (index, value) => `${x(series.x[index]).toFixed(1)},${y(value).toFixed(1)}`;
      const above = piece.map((index) => at(index, series.y[index]));
      const back = piece.toReversed().map((index) => at(index, series.base[index]));
      path += `M${[...above, ...back].join("L")}Z`;
    }
    piece = [];
  };
  series.y.forEach((value, index) => (value === null ? close() : piece.push(index)));
  close();
  return path;
}

function pointing(canvas, svg, values, state, { x, y, left, right, width, whole, stacked }) {
  const { figure, zooms } = state;
  const inner = width - EDGE.left - EDGE.right;
  const selection = shape("rect", { class: "selection", y: EDGE.top, height: HEIGHT - EDGE.top - EDGE.bottom, visibility: "hidden" });
  const cursor = shape("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom, visibility: "hidden" });
  const dots = stacked ? [] : figure.series.map((one, index) => shape("circle", { class: `dot ${colour(one, index)}`, r: 3.5, visibility: "hidden" }));
  svg.append(selection, cursor, ...dots);
  const all = [...new Set(figure.series.flatMap((one) => one.x))].filter((at) => at >= left && at <= right).sort((a, b) => a - b);

  function look(value) {
    if (value === undefined) return;
    state.at = value;
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", x(value));
    cursor.setAttribute("x2", x(value));
    const said = figure.series.map((one, index) => {
      const near = nearest(one.x, value);
      const there = one.y[near];
      const inside = there !== null && one.x[near] >= left && one.x[near] <= right;
      dots[index]?.setAttribute("visibility", inside ? "visible" : "hidden");
      if (inside) {
        dots[index]?.setAttribute("cx", x(one.x[near]));
        dots[index]?.setAttribute("cy", y(there));
      }
      return stacked && !there ? "" : `${one.name} ${number(there, figure.unit)}`;
    });
    const shown = said.filter(Boolean).join(", ");
    values.textContent = `${figure.x === "seconds" ? `after ${duration(value)}` : `step ${step(value)}`}: ${shown || "none"}`;
  }

  function hide() {
    state.at = null;
    values.textContent = "";
    for (const one of [cursor, ...dots]) one.setAttribute("visibility", "hidden");
  }

  function select() {
    const [from, to] = state.drag.map(x);
    selection.setAttribute("x", Math.min(from, to));
    selection.setAttribute("width", Math.abs(to - from));
    selection.setAttribute("visibility", "visible");
  }

  /** Zoom all charts with this axis, and say so. */
  function zoom(from, to) {
    const span = to - from;
    if (!(span > (whole[1] - whole[0]) * 1e-6)) return;
    const everything = from <= whole[0] && to >= whole[1];
    zooms.set(figure.x, everything ? null : [from, to]);
    values.textContent = everything ? "Everything is shown." : `Zoomed to ${position(figure, from)} to ${position(figure, to)}.`;
  }

  function place(event) {
    const share = (event.clientX - svg.getBoundingClientRect().left - EDGE.left) / inner;
    return left + Math.min(1, Math.max(0, share)) * (right - left);
  }

  canvas.onpointerdown = (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    state.drag = [place(event), place(event)];
  };
  canvas.onpointermove = (event) => {
    if (state.drag) {
      state.drag[1] = place(event);
      select();
    }
    if (all.length) look(all[nearest(all, place(event))]);
  };
  canvas.onpointerup = () => {
    const drag = state.drag;
    state.drag = null;
    selection.setAttribute("visibility", "hidden");
    if (drag && Math.abs(x(drag[1]) - x(drag[0])) >= DRAG_PX) zoom(Math.min(...drag), Math.max(...drag));
  };
  canvas.onpointercancel = () => {
    state.drag = null;
    selection.setAttribute("visibility", "hidden");
  };
  canvas.ondblclick = () => zooms.set(figure.x, null);
  canvas.onpointerleave = () => state.drag || hide();
  canvas.onblur = hide;
  canvas.onkeydown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { "+": .5, "=": .5, "-": 2 }[event.key];
    const shift = event.shiftKey && { ArrowRight: .25, ArrowLeft: -.25 }[event.key];
    const move = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20, Home: -all.length, End: all.length }[event.key];
    if (event.key === "Escape" || event.key === "0") {
      if (!zooms.get(figure.x)) return;
      zooms.set(figure.x, null);
      values.textContent = "Everything is shown.";
    } else if (by) {
      const middle = state.at ?? (left + right) / 2;
      zoom(Math.max(whole[0], middle - (middle - left) * by), Math.min(whole[1], middle + (right - middle) * by));
    } else if (shift) {
      const span = right - left;
      const from = Math.max(whole[0], Math.min(whole[1] - span, left + shift * span));
      zoom(from, from + span);
    } else if (move !== undefined) {
      const now = state.at === null ? (move > 0 ? -1 : all.length) : nearest(all, state.at);
      look(all[Math.min(all.length - 1, Math.max(0, now + move))]);
    } else return;
    event.preventDefault();
  };
  if (state.drag) select();
  if (state.at !== null) {
    if (all.length && state.at >= left && state.at <= right) look(all[nearest(all, state.at)]);
    else hide();
  }
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
