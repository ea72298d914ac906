// The router: `#/` shows the list of jobs, `#/jobs/NAME` one job, `#/compare/A,B` jobs side by side, `#/check` the check of a job
// before its submission. A view is a function that fills an element, and returns a function that ends the view.

import { checkView } from "./check.js";
import { compareView } from "./compare.js";
import { jobView } from "./job.js";
import { listView } from "./list.js";

let leave = () => {};

function route() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  // The link that skips to the content changes the hash too.
  if (path && !path.startsWith("/")) return;
  leave();
  const main = document.getElementById("main");
  const found = /^\/jobs\/(\w+)$/.exec(path);
  const compared = /^\/compare\/(\w+(?:,\w+)*)$/.exec(path);
  main.replaceChildren();
  const check = path === "/check";
  document.title = `${found ? found[1] : check ? "Check a job" : compared ? "Compare jobs" : "Jobs"} · Footplate`;
  if (check) leave = checkView(main);
  else if (compared) leave = compareView(main, compared[1].split(","));
  else leave = found ? jobView(main, found[1]) : listView(main, new URLSearchParams(query));
}

addEventListener("hashchange", () => {
  route();
  scrollTo(0, 0);
});
route();
