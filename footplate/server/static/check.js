// The check of a job before its submission: its problems, its resolved specification, and the request to the backend's service.

import { ask } from "./api.js";
import { el, yaml } from "./dom.js";
import { complain, watch } from "./live.js";

const ALIVE_S = 10;
const BEGINNING = "trainingInput:\n  pythonModule: trainer.task\n  region: us-central1\n  jobDir: runs/my_job\n";

export function checkView(main) {
  const text = (id, props = {}) => el("input", { id, spellcheck: "false", autocomplete: "off", ...props });
  const name = text("job-name", { value: "my_job", required: true });
  const directory = text("package-path", { placeholder: "/home/me/trainer" });
  const modernize = el("input", { type: "checkbox", id: "modernize" });
  const backend = el("select", { id: "backend", onchange: offer });
  const options = el("div", { class: "filters" });
  const config = el("textarea", { id: "config", rows: "14", spellcheck: "false" });
  const found = el("div", { role: "status" });
  // Nothing can be checked before the backends are known.
  const submit = el("button", { class: "main", disabled: true }, "Check");
  config.value = BEGINNING;
  main.append(
    el("nav", { "aria-label": "Breadcrumb" }, el("a", { href: "#/" }, "← All jobs")),
    el("h1", {}, "Check a job"),
    el("form", { class: "check-job", onsubmit: check },
      el("div", { class: "filters" }, el("label", {}, "Name", name), el("label", {}, "Backend", backend),
        el("label", {}, "Package directory on the server's machine", directory),
        el("label", { class: "check" }, modernize, "Replace withdrawn machines")),
      options,
      el("label", {}, "config.yaml", config),
      submit),
    found);

  let places = {};
  const watching = watch(async (signal) => {
    if (backend.childElementCount) await ask("GET", "/jobs?limit=1", { signal });
    else {
      places = await ask("GET", "/backends", { signal });
      backend.append(...Object.keys(places).map((one) => el("option", { value: one }, one)));
      offer();
      submit.disabled = false;
    }
    return ALIVE_S;
  });

  function offer() {
    options.replaceChildren(...Object.entries(places[backend.value]).map(([option, about]) =>
      el("label", {}, option, text(`place-${option}`, { name: option, title: about, placeholder: about }))));
  }

  async function check(event) {
    event.preventDefault();
    const given = [...options.querySelectorAll("input")].map((one) => [one.name, one.value.trim()]);
    const body = {
      jobId: name.value.trim(), config: config.value, modernize: modernize.checked, backend: backend.value,
      place: Object.fromEntries(given.filter(([, value]) => value)), packagePath: directory.value.trim() || null,
    };
    try {
      found.replaceChildren(...answer(await ask("POST", "/check", { body }), body.backend));
    } catch (error) {
      complain(error);
    }
  }

  return watching.end;
}

function answer(found, backend) {
  const said = found.problems.map((one) => [one.place, one.key, one.problem].filter(Boolean).join(": "));
  const half = (title, value) => value && el("section", { class: "spec-one" }, el("h2", {}, title),
    el("pre", { tabindex: "0", role: "region", "aria-label": title }, yaml(value)));
  return [
    el("section", { class: found.valid ? "well" : "wrong" },
      el("h2", {}, found.valid ? "The job is valid" : "The job has problems"),
      list([...said, ...found.notices])),
    half("As resolved", found.resolved),
    half(`Request to ${backend}`, found.request),
  ].filter(Boolean);
}

function list(texts) {
  return texts.length ? el("ul", {}, texts.map((one) => el("li", {}, one))) : null;
}
