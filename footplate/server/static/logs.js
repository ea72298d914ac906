// The live output of a job's processes: of all of them, or of one attempt or process. A search shows the lines that contain a text.

import { ask, events } from "./api.js";
import { searching } from "./log_search.js";
import { el, show } from "./dom.js";
import { complain } from "./live.js";

const TAIL = 2000; // the lines that are loaded first
const KEPT = 5000; // the most lines on the page
const AGAIN_S = 3;
const DRAW_MS = 100; // lines that arrive within this time are drawn together
const IDLE = 4; // after drawing, the page is idle for this many times as long
const COLOURS = /\x1b\[[0-9;?]*[A-Za-z]/g;

export function logs(home, name) {
  const attempt = el("select", { id: "attempt", onchange: again });
  const source = el("select", { id: "source", onchange: again });
  const follow = el("input", { type: "checkbox", id: "follow", checked: true, onchange: () => follow.checked && end() });
  const said = el("span", { class: "said", role: "status" });
  const lines = el("div", { class: "lines", tabindex: "0", role: "log", "aria-label": "Output", "aria-live": "off" });
  home.append(
    el("div", { class: "filters" }, el("label", {}, "Attempt", attempt), el("label", {}, "Process", source),
      el("label", { class: "check" }, follow, "Follow"),
      el("button", { type: "button", onclick: download }, "Download"), said),
    lines);
  const search = searching(home, lines, name, query);
  lines.addEventListener("scroll", () => {
    const below = lines.scrollHeight - lines.scrollTop - lines.clientHeight;
    if (below > 40 && !moving) follow.checked = false;
    moving = false;
  });
  let moving = false;
  let stream = new AbortController();
  let last = new Map(); // for each process, the entry that its next line overwrites
  let waiting = []; // entries to append
  let changed = new Set(); // entries on the page whose text has changed
  let timer = 0;
  let pause = DRAW_MS;

  function end() {
    moving = true;
    lines.scrollTop = lines.scrollHeight;
  }

  function again() {
    search.again();
    stream.abort();
    stream = new AbortController();
    forget();
    lines.replaceChildren();
    run(stream.signal);
  }

  async function run(signal) {
    said.textContent = "loading …";
    let wrong = "connection lost; retrying";
    try {
      for await (const [kind, data] of events(`/jobs/${name}/events?${query()}&tail=${TAIL}`, signal)) {
        if (kind === "lines") add(data);
        else if (kind === "state") said.textContent = "live";
        else if (kind === "end") {
          draw();
          said.textContent = lines.childElementCount ? "complete" : "no output";
          return;
        }
      }
    } catch (error) {
      if (error.status === 404) return;
      if (error.status !== undefined) wrong = error.message;
    }
    if (signal.aborted) return;
    said.textContent = wrong;
    setTimeout(() => !signal.aborted && again(), AGAIN_S * 1000);
  }

  /** Add lines. They are drawn together, because drawing thousands of lines a second one by one would block the page. */
  function add(found) {
    for (const one of found) {
      const who = `${one.attempt}/${one.source}`;
      let entry = last.get(who);
      if (!entry) waiting.push((entry = { line: null }));
      else if (entry.line) changed.add(entry);
      entry.one = one;
      if (one.text.endsWith("\r")) last.set(who, entry);
      else last.delete(who);
    }
    if (waiting.length > 2 * KEPT) waiting = waiting.slice(-KEPT);
    timer ||= setTimeout(draw, pause);
  }

  function draw() {
    clearTimeout(timer);
    timer = 0;
    const began = performance.now();
    for (const entry of changed) {
      const before = entry.line;
      before.replaceWith((entry.line = element(entry.one)));
    }
    const added = waiting.slice(-KEPT);
    for (const entry of added) entry.line = element(entry.one);
    for (let excess = lines.childElementCount + added.length - KEPT; excess > 0 && lines.firstElementChild; excess--) {
      lines.firstElementChild.remove();
    }
    lines.append(...added.map((entry) => entry.line));
    waiting = [];
    changed = new Set();
    if (follow.checked) end();
    pause = Math.max(DRAW_MS, IDLE * (performance.now() - began));
  }

  function forget() {
    clearTimeout(timer);
    timer = 0;
    waiting = [];
    changed = new Set();
    last = new Map();
  }

  function query() {
    const asked = new URLSearchParams();
    if (attempt.value) asked.set("attempt", attempt.value);
    if (source.value) asked.set("source", source.value);
    return asked;
  }

  async function download() {
    try {
      const found = await ask("GET", `/jobs/${name}/logs?${query()}`, { as: "blob" });
      const link = el("a", { href: URL.createObjectURL(found), download: `${name}.log` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
    } catch (error) {
      complain(error);
    }
  }

  /** Close the stream of a hidden tab, because a browser has only six connections to a server, for all tabs together. */
  function seen() {
    if (document.hidden && follow.checked) stream.abort();
    else if (!document.hidden && stream.signal.aborted) again();
  }

  document.addEventListener("visibilitychange", seen);
  again();
  return {
    again,
    end() {
      document.removeEventListener("visibilitychange", seen);
      forget();
      search.end();
      stream.abort();
    },
    /** Offer the attempts and processes of the job in the filters. */
    know(job) {
      const attempts = Array.from({ length: job.attempt }, (_, index) => `${index + 1}`);
      const sources = [...new Set(job.processes.map((one) => `${one.role}-${one.index}`)), "prepare"];
      offer(attempt, attempts);
      offer(source, sources);
    },
  };
}

function element(one) {
  const text = one.text.replace(COLOURS, "").replace(/[\r\n]+$/, "");
  return el("div", {}, el("span", { class: "who" }, one.attempt > 1 ? `${one.source} (${one.attempt})` : one.source),
    el("span", {}, text || " "));
}

function offer(select, values) {
  const chosen = select.value;
  show(select, values, () => [el("option", { value: "" }, "all"), ...values.map((one) => el("option", { value: one }, one))]);
  select.value = values.includes(chosen) ? chosen : "";
}
