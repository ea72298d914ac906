// The list of jobs with their states, filtered by state, name and label.

import { ask } from "./api.js";
import { MOST } from "./compare.js";
import { badge, el, show, time, took } from "./dom.js";
import { watch } from "./live.js";

const STATES = ["QUEUED", "PREPARING", "RUNNING", "SUCCEEDED", "FAILED", "CANCELLING", "CANCELLED"];
const STEP = 100;

export function listView(main, query) {
  let limit = STEP;
  const state = el("select", { id: "state", onchange: changed }, el("option", { value: "" }, "any"),
    STATES.map((one) => el("option", { value: one, selected: query.get("state") === one }, one.toLowerCase())));
  const name = el("input", { id: "name", type: "search", value: query.get("name") ?? "", spellcheck: "false",
    placeholder: "part of the name", oninput: changed, pattern: "[A-Za-z0-9_*]+", title: "letters, digits, underscores" });
  const label = el("input", { id: "label", type: "search", value: query.get("label") ?? "", spellcheck: "false",
    placeholder: "team=vision", oninput: changed, pattern: "[a-z][a-z0-9_\\-]{0,62}=[a-z0-9_\\-]{0,63}",
    title: "KEY=VALUE" });
  const table = el("div", { class: "jobs" });
  const chosen = new Set();
  const compare = el("a", { class: "compare", hidden: true, "aria-describedby": "compare-how" });
  const how = el("span", { id: "compare-how", class: "said", role: "status" });
  const more = el("div", { class: "more" });
  main.append(
    el("div", { class: "head" }, el("h1", {}, "Jobs"), el("a", { href: "#/check" }, "Check a config.yaml")),
    el("form", { class: "filters", role: "search", "aria-label": "Filter the jobs",
      onsubmit: (event) => event.preventDefault() },
      el("label", {}, "State", state), el("label", {}, "Name", name), el("label", {}, "Label", label),
      el("span", { class: "comparing" }, compare, how)),
    table, more);

  function choose(name, yes) {
    if (yes) chosen.add(name);
    else chosen.delete(name);
    comparing();
  }

  /** Offer the comparison of the chosen jobs. */
  function comparing() {
    const ready = chosen.size >= 2 && chosen.size <= MOST;
    compare.hidden = !ready;
    compare.textContent = ready ? `Compare ${chosen.size} jobs` : "";
    compare.href = `#/compare/${[...chosen].join(",")}`;
    how.textContent = chosen.size === 1 ? "Choose another job to compare." : chosen.size > MOST ? `Choose at most ${MOST} jobs.` : "";
  }

  function wanted() {
    const found = new URLSearchParams();
    for (const one of [state, name, label]) {
      if (one.value.trim() && one.validity.valid) found.set(one.id, one.value.trim());
    }
    return found;
  }

  function changed() {
    const now = wanted().toString();
    history.replaceState(null, "", now ? `#/?${now}` : "#/");
    watching.now();
  }

  const watching = watch(async (signal) => {
    const asked = wanted();
    const found = await ask("GET", `/jobs?${new URLSearchParams({ filter: filter(asked), limit })}`, { signal });
    show(table, found.jobs, () => (found.jobs.length ? rows(found.jobs, chosen, choose) : nothing(asked)));
    show(more, found.more, () => found.more && el("button", { type: "button", data: { key: "more" },
      onclick: () => { limit = Math.min(1000, limit + STEP); watching.now(); } }, "Show more"));
  });
  return watching.end;
}

/** Write the filter in the syntax of `footplate jobs list --filter`. */
function filter(asked) {
  const parts = [];
  if (asked.has("state")) parts.push(`state=${asked.get("state")}`);
  if (asked.has("name")) parts.push(`jobId:*${asked.get("name")}*`);
  if (asked.has("label")) parts.push(`labels.${asked.get("label")}`);
  return parts.join(" AND ");
}

function rows(jobs, chosen, choose) {
  const heads = ["Job", "State", "Submitted", "Ran for", "Attempt", "Labels", "Cause"];
  return el("table", {},
    el("caption", { class: "unseen" }, "Jobs, the newest first"),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "unseen" }, "Compare")),
      heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, jobs.map((job) => el("tr", {},
      el("td", { class: "choice" }, el("input", { type: "checkbox", "aria-label": `Compare ${job.jobId}`,
        checked: chosen.has(job.jobId), data: { key: `choose-${job.jobId}` }, onchange: (event) => choose(job.jobId, event.target.checked) })),
      el("th", { scope: "row" }, el("a", { href: `#/jobs/${job.jobId}`, data: { key: job.jobId } }, job.jobId)),
      el("td", { data: { head: "State" } }, badge(job.state)),
      el("td", { data: { head: "Submitted" } }, time(job.createTime)),
      el("td", { data: { head: "Ran for" } }, took(job.startTime, job.endTime)),
      el("td", { data: { head: "Attempt" } }, job.attempt ? `${job.attempt}` : ""),
      el("td", { data: { head: "Labels" } }, labels(job.labels)),
      el("td", { class: "cause", data: { head: "Cause" } }, job.cause)))));
}

function labels(found) {
  return Object.entries(found).map(([key, value]) => el("span", { class: "label" }, `${key}=${value}`));
}

function nothing(asked) {
  if ([...asked].length) return el("p", { class: "empty" }, "No job matches the filter.");
  return el("div", { class: "empty" }, el("p", {}, "There are no jobs yet. Submit one:"),
    el("pre", {}, "footplate jobs submit training NAME --package-path trainer \\\n    --module-name trainer.task --region us-central1 --job-dir runs/NAME"));
}
