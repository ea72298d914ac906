// Search in the whole output of a job. The server searches; the page shows the lines that it finds in place of the live output.

import { ask } from "./api.js";
import { el } from "./dom.js";

const TYPING_MS = 300;
const LINE = /^\[(\d+) ([\w-]+):(\d+)\] (.*)$/s;

/**
 * Add a search to the output of a job.
 *
 * `lines` is the live output, and `query` returns the chosen attempt and process. Returns `again`, which repeats the search, and
 * `end`.
 */
export function searching(home, lines, name, query) {
  const input = el("input", { type: "search", id: "search-output", spellcheck: "false", autocomplete: "off", maxlength: "200",
    placeholder: "text, in any case", oninput: typed, onkeydown: pressed });
  const before = el("button", { type: "button", "aria-label": "Previous hit", onclick: () => go(-1) }, "↑");
  const after = el("button", { type: "button", "aria-label": "Next hit", onclick: () => go(1) }, "↓");
  const said = el("span", { class: "said", role: "status" });
  const found = el("div", { class: "lines hits", tabindex: "0", role: "region", "aria-label": "Lines that were found", hidden: true });
  lines.before(el("form", { class: "filters", role: "search", "aria-label": "Search in the output",
    onsubmit: (event) => event.preventDefault() },
  el("label", {}, "Search in all output", input), before, after, said));
  lines.after(found);
  let timer = 0;
  let asking = new AbortController();
  let current = -1;
  show(false);

  function show(yes) {
    found.hidden = !yes;
    lines.hidden = yes;
    before.hidden = after.hidden = !yes;
  }

  function typed() {
    clearTimeout(timer);
    timer = setTimeout(again, TYPING_MS);
  }

  function pressed(event) {
    if (event.key === "Enter") {
      event.preventDefault();
      if (found.hidden) again();
      else go(event.shiftKey ? -1 : 1);
    }
  }

  async function again() {
    clearTimeout(timer);
    asking.abort();
    asking = new AbortController();
    const { signal } = asking;
    const text = input.value;
    if (!text) {
      found.replaceChildren();
      said.textContent = "";
      show(false);
      return;
    }
    said.textContent = "searching …";
    try {
      const asked = query();
      asked.set("search", text);
      const answer = await ask("GET", `/jobs/${name}/logs?${asked}`, { as: "raw", signal });
      const body = await answer.text();
      if (signal.aborted) return;
      draw(body, text, Number(answer.headers.get("X-Footplate-Hits")), answer.headers.get("X-Footplate-Complete") === "true");
    } catch (error) {
      if (!signal.aborted) said.textContent = error.message;
    }
  }

  let whole = "";
  function draw(body, text, count, complete) {
    const parts = body.split("\n").slice(0, -1);
    found.replaceChildren(...parts.map((part) => line(part, text)));
    const last = parts.length < count ? `, the last ${parts.length} are shown` : "";
    whole = `${count} ${count === 1 ? "line" : "lines"}${last}${complete ? "" : "; only the beginning was searched, the output is too long"}`;
    show(true);
    current = -1;
    go(-1);
  }

  function go(by) {
    const count = found.childElementCount;
    found.children[current]?.classList.remove("current");
    if (!count) {
      said.textContent = whole;
      return;
    }
    current = current < 0 ? count - 1 : (current + by + count) % count;
    const there = found.children[current];
    there.classList.add("current");
    // scrollIntoView would scroll the page, too.
    found.scrollTop = there.offsetTop - found.clientHeight / 2;
    said.textContent = `${current + 1} of ${whole}`;
  }

  return {
    again: () => input.value && again(),
    end() {
      clearTimeout(timer);
      asking.abort();
    },
  };
}

function line(text, wanted) {
  const [, attempt, source, number, rest] = LINE.exec(text) ?? ["", "", "", "", text];
  const who = `${attempt > 1 ? `${source} (${attempt})` : source}:${number}`;
  return el("div", {}, el("span", { class: "who" }, who), el("span", {}, marked(rest, wanted)));
}

/** Mark a text wherever it is. The pieces are text, never HTML. */
function marked(text, wanted) {
  const pattern = new RegExp(`(${wanted.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&")})`, "giu");
  return text.split(pattern).map((piece, index) => (index % 2 ? el("mark", {}, piece) : piece));
}
