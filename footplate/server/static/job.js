// One job: its state and cause, its processes, curves, output and specification, and its actions.

import { ask } from "./api.js";
import { charts } from "./charts.js";
import { about, badge, el, number, ordinal, show, time, took, yaml } from "./dom.js";
import { goodput } from "./goodput.js";
import { complain, confirmed, watch } from "./live.js";
import { logs } from "./logs.js";
import { trials } from "./trials.js";
import { Zooms } from "./zooms.js";

const FINAL = ["SUCCEEDED", "FAILED", "CANCELLED"];
const QUIET_S = 10;
const GOODPUT_S = 5;
const PROFILE_STEPS = 10;

export function jobView(main, name) {
  const head = el("div", { class: "head" });
  const facts = section("Facts", "facts");
  const tried = section("Trials", "trials");
  tried.all.hidden = true;
  const history = section("History", "history");
  const replicas = section("Replicas", "replicas");
  const hung = section("Hangs", "hangs");
  hung.all.hidden = true;
  const causes = section("Goodput", "goodput");
  const profiled = section("Profile", "profile");
  profiled.all.hidden = true;
  const training = section("Training", "figures");
  const speed = section("Time and speed", "figures");
  const advice = section("Advice", "advice");
  advice.all.hidden = true;
  const devices = section("Devices", "figures");
  const zooms = new Zooms();
  const output = section("Output", "output");
  const spec = section("Specification", "spec");
  main.append(
    el("nav", { "aria-label": "Breadcrumb" }, el("a", { href: "#/" }, "← All jobs")),
    head, facts.all, tried.all, hung.all, profiled.all, causes.all, training.all, speed.all, advice.all, devices.all, output.all,
    el("div", { class: "pair" }, history.all, replicas.all), spec.all);
  const following = logs(output.home, name);

  async function act(verb, title, text) {
    if (!(await confirmed(title, text, title.split(" ")[0]))) return;
    try {
      await (verb === "delete" ? ask("DELETE", `/jobs/${name}`) : ask("POST", `/jobs/${name}/${verb}`));
      if (verb === "delete") location.hash = "#/";
      else watching.now();
    } catch (error) {
      complain(error);
    }
  }

  async function profile() {
    try {
      await ask("POST", `/jobs/${name}/profile?steps=${PROFILE_STEPS}`);
      profiling = true;
      watching.now();
    } catch (error) {
      complain(error);
    }
  }

  let remaining = null;
  function draw(job) {
    const expected = remaining === null ? queued(job.queue) : about(remaining);
    show(head, [job.state, job.cause, expected], () => title(job, expected, FINAL.includes(job.state), act, profile));
  }

  let drawn = "";
  let counted = 0;
  // The first look finds a profile that was requested before.
  let profiling = true;
  const watching = watch(async (signal) => {
    let job;
    try {
      job = await ask("GET", `/jobs/${name}`, { signal });
    } catch (error) {
      if (error.status !== 404) throw error;
      show(head, "gone", () => [el("h1", {}, name), el("p", { class: "empty" }, "This job doesn't exist.")]);
      for (const one of main.querySelectorAll("section")) one.hidden = true;
      return 60;
    }
    const over = FINAL.includes(job.state);
    if (job.state !== "RUNNING") remaining = null;
    draw(job);
    show(facts.home, [job.state, job.attempt, job.failures, job.losses, job.startTime, job.endTime, job.devices],
      () => factsOf(job));
    show(history.home, job.transitions, () => transitions(job.transitions));
    show(replicas.home, job.processes, () => processes(job));
    tried.all.hidden = !job.tuning;
    if (job.tuning) trials(tried.home, job.tuning);
    hung.all.hidden = !job.hangs.length;
    show(hung.home, job.hangs, () => hangs(job.hangs));
    if (profiling) {
      const latest = await ask("GET", `/jobs/${name}/profile`, { signal });
      profiling = !["idle", "done", "failed"].includes(latest.state);
      profiled.all.hidden = latest.state === "idle";
      show(profiled.home, latest, () => profileOf(latest));
    }
    show(spec.home, [job.submitted, job.resolved], () => specs(job));
    following.know(job);
    const now = over ? `${job.endTime}` : "";
    // The job was resubmitted, here or elsewhere.
    if (drawn && drawn !== now) following.again();
    if (drawn !== now || (!over && Date.now() - counted > GOODPUT_S * 1000) || !counted) {
      counted = Date.now();
      goodput(causes.home, await ask("GET", `/jobs/${name}/goodput`, { signal }));
    }
    if (!over || drawn !== now) {
      drawn = now;
      const found = await ask("GET", `/jobs/${name}/figures`, { signal });
      remaining = job.state === "RUNNING" ? found.remainingSeconds : null;
      draw(job);
      charts(training.home, found.training, found.trainingNote, zooms);
      charts(speed.home, found.time, found.timeNote, zooms);
      charts(devices.home, found.devices, found.devicesNote, zooms);
      advice.all.hidden = !found.advice.length;
      show(advice.home, found.advice, () => el("ul", {}, found.advice.map((one) => el("li", {}, one))));
    }
    return over ? QUIET_S : 2;
  });
  return () => {
    watching.end();
    following.end();
  };
}

function section(title, kind) {
  const home = el("div", { class: kind });
  const id = `title-${title.toLowerCase().replaceAll(" ", "-")}`;
  return { home, all: el("section", { "aria-labelledby": id }, el("h2", { id }, title), home) };
}

/** Describe the place of a job in the queue. */
function queued(place) {
  if (!place) return "";
  return `${ordinal(place.position)} of ${place.length} in the queue; ${place.waitsFor ? `waits for ${place.waitsFor}` : "it starts next"}`;
}

function title(job, expected, over, act, profile) {
  const button = (key, text, kind, onclick) => el("button", { type: "button", class: kind, data: { key }, onclick }, text);
  return [
    el("div", {}, el("h1", {}, job.jobId, " ", badge(job.state)), job.cause && el("p", { class: "cause" }, job.cause),
      expected && el("p", { class: "expected" }, expected)),
    el("div", { class: "buttons" },
      job.state === "RUNNING" && button("profile", "Profile", "", profile),
      !over && job.state !== "CANCELLING" && button("cancel", "Cancel …", "danger", () => act("cancel", `Cancel ${job.jobId}?`,
        "Its processes get a signal to save and exit, and have half a minute for that.")),
      ["FAILED", "CANCELLED"].includes(job.state) && button("resubmit", "Resubmit …", "main", () => act("resubmit",
        `Resubmit ${job.jobId}?`, "It goes into the queue again with the same package, and continues from its newest checkpoint.")),
      over && button("delete", "Delete …", "danger", () => act("delete", `Delete ${job.jobId}?`,
        "This deletes the job and its logs. The files in its job directory stay."))),
  ];
}

function factsOf(job) {
  const holds = [`${number(job.holds.cpus)} vCPU`, job.holds.gpus && `${job.holds.gpus} accelerators`,
    job.holds.memoryGb && `${number(job.holds.memoryGb)} GB`].filter(Boolean).join(", ");
  const all = [
    ["Submitted", time(job.createTime)],
    ["Began", job.startTime ? time(job.startTime) : "not yet"],
    [job.endTime ? "Ran for" : "Running for", job.startTime ? took(job.startTime, job.endTime) : "not yet"],
    ["Attempt", `${job.attempt || "none yet"}`],
    ["Failures, lost machines", `${job.failures}, ${job.losses}`],
    ["Resources", holds],
    job.devices.length && ["Devices", job.devices.join(", ")],
    ["Priority", `${job.priority}`],
    ["Machine", `${job.host} (${job.backend})`],
    ["Job directory", job.jobDir ?? "none"],
    Object.keys(job.labels).length && ["Labels", Object.entries(job.labels).map(([k, v]) => `${k}=${v}`).join(", ")],
  ].filter(Boolean);
  return el("dl", {}, all.map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))));
}

function transitions(found) {
  return el("ol", {}, found.map((one) => el("li", {}, el("span", { class: "at" }, time(one.time)), badge(one.target),
    el("span", { class: "why" }, [one.attempt ? `attempt ${one.attempt}` : "", one.cause].filter(Boolean).join(": ")))));
}

function processes(job) {
  if (!job.processes.length) return el("p", { class: "empty" }, "No process has started yet.");
  const heads = ["Replica", "Attempt", "Ran for", "Outcome", "Process"];
  return el("table", {}, el("caption", { class: "unseen" }, "Processes of the job, attempt by attempt"),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, job.processes.map((one) => {
      const runs = !one.ended && one.attempt === job.attempt && ["RUNNING", "CANCELLING"].includes(job.state);
      return el("tr", {},
        el("th", { scope: "row" }, `${one.role.replaceAll("_", " ")} ${one.index}`),
        el("td", { data: { head: "Attempt" } }, `${one.attempt}`),
        el("td", { data: { head: "Ran for" } }, one.ended || runs ? took(one.began, one.ended) : ""),
        el("td", { data: { head: "Outcome" } }, one.outcome || (runs ? "running" : "lost")),
        el("td", { data: { head: "Process" } }, `${one.pid}`));
    })));
}

function hangs(found) {
  return found.map((one) => el("details", {}, el("summary", {}, `attempt ${one.attempt}: ${one.sentence}`),
    el("pre", { tabindex: "0", role: "region", "aria-label": `The stacks of attempt ${one.attempt}` }, one.stacks)));
}

function profileOf(latest) {
  const text = { waiting: "The profile waits for the next step.", recording: "Steps are being recorded.",
    writing: "The files are being written.", failed: `No profile was made: ${latest.error}.` }[latest.state];
  return text ? el("p", { class: "empty", role: "status" }, text)
    : el("pre", { tabindex: "0", role: "region", "aria-label": "The summary of the profile" }, latest.summary);
}

function specs(job) {
  const half = (title, value) => el("div", {}, el("h3", {}, title),
    el("pre", { tabindex: "0", role: "region", "aria-label": `The specification ${title.toLowerCase()}` }, yaml(value)));
  return [half("As submitted", job.submitted), half("As resolved", job.resolved)];
}
