// What a job's processes write, as it comes: all of it, or that of one attempt or process.

import { ask, events } from "./api.js";
import { el, show } from "./dom.js";
import { complain } from "./live.js";

const TAIL = 2000; // lines that are asked for in the beginning
const KEPT = 5000; // lines that stay on the page
const AGAIN_S = 3;
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
  lines.addEventListener("scroll", () => {
    const below = lines.scrollHeight - lines.scrollTop - lines.clientHeight;
    if (below > 40 && !moving) follow.checked = false;
    moving = false;
  });
  let moving = false;
  let stream = new AbortController();
  let last = new Map(); // of each process the line that its next one overwrites

  function end() {
    moving = true;
    lines.scrollTop = lines.scrollHeight;
  }

  function again() {
    stream.abort();
    stream = new AbortController();
    lines.replaceChildren();
    last = new Map();
    run(stream.signal);
  }

  async function run(signal) {
    said.textContent = "reading …";
    let wrong = "cut off; reading again soon";
    try {
      for await (const [kind, data] of events(`/jobs/${name}/events?${query()}&tail=${TAIL}`, signal)) {
        if (kind === "lines") add(data);
        else if (kind === "state") said.textContent = "live";
        else if (kind === "end") {
          said.textContent = lines.childElementCount ? "the end" : "nothing was written";
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

  function add(found) {
    for (const one of found) {
      const who = `${one.attempt}/${one.source}`;
      const text = one.text.replace(COLOURS, "").replace(/[\r\n]+$/, "");
      const line = el("div", {}, el("span", { class: "who" }, one.attempt > 1 ? `${one.source} (${one.attempt})` : one.source),
        el("span", {}, text || " "));
      if (last.has(who)) last.get(who).replaceWith(line);
      else lines.append(line);
      if (one.text.endsWith("\r")) last.set(who, line);
      else last.delete(who);
    }
    while (lines.childElementCount > KEPT) lines.firstElementChild.remove();
    if (follow.checked) end();
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

  /** A browser has six connections to a server, for all tabs together: a tab that nobody sees gives its own back. */
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
      stream.abort();
    },
    /** Offer the attempts and processes that there are. */
    know(job) {
      const attempts = Array.from({ length: job.attempt }, (_, index) => `${index + 1}`);
      const sources = [...new Set(job.processes.map((one) => `${one.role}-${one.index}`)), "prepare"];
      offer(attempt, attempts);
      offer(source, sources);
    },
  };
}

function offer(select, values) {
  const chosen = select.value;
  show(select, values, () => [el("option", { value: "" }, "all"), ...values.map((one) => el("option", { value: one }, one))]);
  select.value = values.includes(chosen) ? chosen : "";
}
