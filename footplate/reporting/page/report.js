// Draws the charts of a report with plotly.js: when they come into view, in the colours of the page, with the controls.

const CURVE_HEIGHT = 270;
const MOST_MARKERS = 40;
const NARROW = 500;
const MOST_OF_LINE = 4;
const LEGEND_LINE = 14;
const coarse = matchMedia("(pointer: coarse)").matches;
const settings = { smoothing: 0, log: false, axis: "step" };
const figures = [...document.querySelectorAll("figure.chart")].map((figure) => ({
  canvas: figure.querySelector(".canvas"),
  content: JSON.parse(figure.querySelector("script").textContent),
  drawn: false,
}));

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The colour of a name ("c3"); any other value as it is. */
function resolved(value) {
  return /^c\d+$/.test(value ?? "") ? colour(value) : value;
}

/** The moving average of a series, whose first values are not pulled towards zero. */
function smooth(values, weight) {
  let last = 0;
  let total = 0;
  return values.map((value) => {
    if (value === null) return null;
    last = last * weight + (1 - weight) * value;
    total = total * weight + (1 - weight);
    return last / total;
  });
}

function curveTraces(content) {
  const by = settings.axis === "time" ? ["t", "mean_t"] : ["x", "mean_x"];
  return content.curves.flatMap((curve) => {
    const line = { color: colour(curve.colour), dash: curve.dash, width: 2 };
    const few = curve.x.length <= MOST_MARKERS;
    const base = {
      type: "scatter", name: curve.name, line, marker: { color: line.color, size: 5 }, legendgroup: curve.name,
      hovertemplate: "%{y:.5~g}", mode: few ? "lines+markers" : "lines",
    };
    const raw = { ...base, x: curve[by[0]] ?? curve.x, y: curve.y };
    if (!settings.smoothing) return [raw];
    const smoothed = { ...base, x: curve[by[1]] ?? curve.mean_x, y: smooth(curve.mean_y, settings.smoothing), mode: "lines" };
    return [{ ...raw, opacity: 0.3, showlegend: false, hoverinfo: "skip", hovertemplate: undefined }, smoothed];
  });
}

function curveLayout(content) {
  const known = content.curves.some((curve) => curve.t);
  const byTime = settings.axis === "time" && known;
  const shapes = byTime ? [] : content.curves.filter((curve) => curve.broken !== undefined).map((curve) => ({
    type: "line", xref: "x", yref: "paper", x0: curve.broken, x1: curve.broken, y0: 0, y1: 1,
    line: { color: colour("bad"), width: 1, dash: "dot" },
  }));
  return {
    height: CURVE_HEIGHT, shapes, showlegend: true,
    xaxis: { title: { text: byTime ? "minutes of training" : "step" }, hoverformat: byTime ? ".2f" : ",d" },
    yaxis: { type: settings.log ? "log" : "linear" },
  };
}

function figureTraces(content) {
  return content.traces.map((trace) => {
    const copy = { ...trace };
    if (trace.marker) copy.marker = { ...trace.marker, color: resolved(trace.marker.color) };
    if (trace.line) copy.line = { ...trace.line, color: resolved(trace.line.color) };
    if (trace.colorscale === "page") copy.colorscale = [[0, colour("heat-low")], [1, colour("heat-high")]];
    return copy;
  });
}

/** The layout of a chart, in the colours of the page. */
function themed(layout) {
  const axis = {
    gridcolor: colour("line"), linecolor: colour("line"), zerolinecolor: colour("line"), automargin: true,
    tickfont: { size: 11 }, fixedrange: coarse,
  };
  const title = (one) => ({ ...axis, ...one, title: { ...one?.title, font: { size: 12, color: colour("soft") }, standoff: 6 } });
  return {
    height: 290, ...layout,
    xaxis: title(layout.xaxis), yaxis: title(layout.yaxis),
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("text") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 46, r: 12, t: 12, b: 40 }, hovermode: layout.hovermode ?? "x unified",
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("text"), size: 12 } },
    legend: { orientation: "h", y: -0.22, yanchor: "top", x: 0, font: { size: 12 }, traceorder: "normal", ...layout.legend },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("link") },
  };
}

const config = {
  responsive: true, displaylogo: false, doubleClick: "reset", displayModeBar: coarse ? false : "hover",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"], showTips: false,
};

function draw(figure) {
  figure.drawn = true;
  const { canvas, content } = figure;
  const isCurves = content.kind === "curves";
  const traces = isCurves ? curveTraces(content) : figureTraces(content);
  const layout = themed(isCurves ? curveLayout(content) : content.layout);
  // On a phone, a long legend takes several lines.
  if (canvas.clientWidth < NARROW && traces.length > MOST_OF_LINE) layout.height += LEGEND_LINE * traces.length;
  return Plotly.react(canvas, traces, layout, config);
}

function redraw(choose = () => true) {
  for (const figure of figures) if (figure.drawn && choose(figure)) draw(figure);
}

function set(key, value) {
  settings[key] = value;
  redraw((figure) => figure.content.kind === "curves");
}

/** Show the controls, if there are curves. */
function connect() {
  const controls = document.querySelector(".controls");
  const curves = figures.filter((figure) => figure.content.kind === "curves").flatMap((figure) => figure.content.curves);
  if (!controls || !curves.length) return;
  controls.hidden = false;
  const smoothing = document.getElementById("smoothing");
  smoothing.addEventListener("input", () => {
    document.getElementById("smoothing-value").textContent = smoothing.value;
    set("smoothing", Number(smoothing.value));
  });
  document.getElementById("log-axis").addEventListener("change", (event) => set("log", event.target.checked));
  const axis = document.getElementById("x-axis");
  axis.addEventListener("change", () => set("axis", axis.value));
  if (!curves.some((curve) => curve.t)) axis.parentElement.hidden = true;
}

const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    const figure = figures.find((one) => one.canvas === entry.target);
    if (entry.isIntersecting && !figure.drawn) draw(figure);
  }
}, { rootMargin: "600px" });
for (const figure of figures) seen.observe(figure.canvas);

connect();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraw());

// Paper is light, and has everything on it.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const part of folded) part.open = true;
  document.documentElement.dataset.scheme = "light";
  for (const figure of figures) draw(figure);
});
addEventListener("afterprint", () => {
  for (const part of folded) part.open = false;
  delete document.documentElement.dataset.scheme;
  redraw();
});
