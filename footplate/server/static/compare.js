// Several jobs side by side: their curves in the same charts, and what differs in their specifications and final metrics.

import { ask } from "./api.js";
import { charts } from "./charts.js";
import { badge, duration, el, number, show } from "./dom.js";
import { money, share } from "./goodput.js";
import { watch } from "./live.js";

export const MOST = 8;
const FINAL = ["SUCCEEDED", "FAILED", "CANCELLED"];
const LIVE_S = 5;
const QUIET_S = 30;

export function compareView(main, names) {
  const wanted = [...new Set(names)].slice(0, MOST);
  const facts = el("div", { class: "compared" });
  const spec = el("div", { class: "compared" });
  const curves = el("div", { class: "figures" });
  const metrics = el("div", { class: "compared" });
  const section = (title, id, home) => el("section", { "aria-labelledby": id }, el("h2", { id }, title), home);
  main.append(
    el("nav", { "aria-label": "Breadcrumb" }, el("a", { href: "#/" }, "← All jobs")),
    el("h1", {}, `Compare ${wanted.length === 1 ? "1 job" : `${wanted.length} jobs`}`),
    section("Jobs", "title-jobs", facts),
    section("Differences of the specifications", "title-differences", spec),
    section("Curves", "title-curves", curves),
    section("Final values", "title-values", metrics));
  const watching = watch(async (signal) => {
    const found = await Promise.all(wanted.map((name, index) => load(name, index, signal)));
    const jobs = found.filter((one) => one.job);
    show(facts, found.map((one) => [one.name, one.job?.state, one.job?.attempt, one.job?.endTime, one.goodput?.wallSeconds]), () => [
      ...found.filter((one) => !one.job).map((one) => el("p", { class: "empty" }, `There is no job ${one.name}.`)),
      jobs.length ? table("The jobs", jobs, factsOf(jobs)) : null,
    ]);
    const differing = differences(jobs);
    show(spec, [jobs.map((one) => one.name), differing], () => (differing.length ? table("Differences of the specifications", jobs, differing)
      : el("p", { class: "empty" }, "The specifications are equal.")));
    const figures = overlaid(jobs);
    charts(curves, figures, figures.length ? "" : "The jobs have no curves yet.");
    const values = finalValues(jobs);
    show(metrics, [jobs.map((one) => one.name), values], () => (values.length ? table("Final values", jobs, values)
      : el("p", { class: "empty" }, "The jobs have no metrics yet.")));
    return jobs.every((one) => FINAL.includes(one.job.state)) ? QUIET_S : LIVE_S;
  });
  return watching.end;
}

/** Load a job with its figures and its goodput; `job` is null if it doesn't exist. The colour of a job is that of its place. */
async function load(name, index, signal) {
  try {
    const [job, figures, goodput] = await Promise.all(["", "/figures", "/goodput"].map((part) => ask("GET", `/jobs/${name}${part}`, { signal })));
    return { name, index, job, figures, goodput };
  } catch (error) {
    if (error.status !== 404) throw error;
    return { name, index, job: null };
  }
}

/** Make a table with a row for each key, and a column for each job. `rows` are [key, [value of each job]]. */
function table(caption, jobs, rows) {
  return el("table", {}, el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen" }, "Value")), jobs.map((one) =>
      el("th", { scope: "col", class: `job colour-${one.index}` }, el("a", { href: `#/jobs/${one.name}` }, one.name))))),
    el("tbody", {}, rows.map(([key, values]) => el("tr", {}, el("th", { scope: "row" }, key),
      values.map((value, index) => el("td", { data: { head: jobs[index].name } }, value ?? "—"))))));
}

function factsOf(jobs) {
  const ran = ({ job }) => (job.startTime ? duration((new Date(job.endTime ?? Date.now()) - new Date(job.startTime)) / 1000) : null);
  return [
    ["State", jobs.map((one) => badge(one.job.state))],
    ["Ran for", jobs.map(ran)],
    ["Attempts", jobs.map((one) => `${one.job.attempt}`)],
    ["Goodput", jobs.map(({ goodput }) => (goodput.goodput === null ? null : share(goodput.goodput)))],
    ["Steps trained again", jobs.map(({ goodput }) => `${goodput.lostSteps}`)],
    ["Cost", jobs.map(({ goodput }) => (goodput.usd === null ? null : money(goodput.usd)))],
  ];
}

function differences(jobs) {
  const flat = jobs.map(({ job }) => {
    const { args = [], ...written } = job.submitted.trainingInput ?? {};
    const { jobId, labels, command, jobDir, ...resolved } = job.resolved;
    return { ...flatten(resolved), ...flatten(written), ...flatten({ labels: job.labels }), ...flags(args) };
  });
  const keys = [...new Set(flat.flatMap(Object.keys))].sort();
  return keys.map((key) => [key, flat.map((one) => one[key] ?? null)]).filter(([, values]) => new Set(values).size > 1);
}

/** Flatten plain values to {"replicas.0.count": "1"}. */
function flatten(value, key = "") {
  if (value === null || typeof value !== "object") return { [key]: String(value) };
  return Object.assign({}, ...Object.entries(value).map(([name, inner]) => flatten(inner, key ? `${key}.${name}` : name)));
}

/** Read the arguments of a program: {"--lr": "0.1"}. An argument without a name has its place as its key. */
function flags(args) {
  const found = {};
  for (let index = 0; index < args.length; index++) {
    const [name, ...rest] = args[index].split("=");
    if (!name.startsWith("--")) found[`argument ${index + 1}`] = args[index];
    else if (rest.length) found[name] = rest.join("=");
    else if (index + 1 < args.length && !args[index + 1].startsWith("--")) found[name] = args[++index];
    else found[name] = "given";
  }
  return found;
}

/** Put the curves of figures with the same title into one. Each job has its colour. */
function overlaid(jobs) {
  const merged = new Map();
  for (const one of jobs) {
    for (const figure of [...one.figures.training, ...one.figures.time]) {
      if (figure.kind === "stacked") continue;
      const known = merged.get(figure.title) ?? { ...figure, series: [] };
      merged.set(figure.title, known);
      figure.series.forEach((series, index) => known.series.push({ ...series, name: `${one.name} ${series.name}`,
        colour: one.index, dashed: index > 0 }));
    }
  }
  return [...merged.values()];
}

/** The last value of each metric, and the share of each cause in the time. */
function finalValues(jobs) {
  const rows = new Map();
  const put = (key, index, text) => {
    const values = rows.get(key) ?? jobs.map(() => null);
    rows.set(key, values);
    values[index] = text;
  };
  jobs.forEach((one, index) => {
    for (const figure of one.figures.training) {
      for (const series of figure.series) put(named(series.name, figure), index, number(series.y.findLast((y) => y !== null), figure.unit));
    }
    for (const figure of one.figures.time) {
      const all = figure.series.reduce((sum, series) => sum + (series.total ?? 0), 0) || 1;
      for (const series of figure.series) {
        if (figure.kind === "stacked") put(named(`time: ${series.name}`, figure), index, `${(series.total / all * 100).toFixed(1)} %`);
        else put(named(series.name, figure), index, number(series.y.findLast((y) => y !== null), figure.unit));
      }
    }
  });
  return [...rows];
}

/** A figure of a run below the job directory has the run in its title. */
function named(name, figure) {
  const run = figure.title.split(" · ").slice(1).join(" · ");
  return run ? `${name} · ${run}` : name;
}
