// Which view is shown: `#/` the jobs, `#/jobs/NAME` one of them, `#/check` one that isn't submitted yet. A view is a function that fills an element and returns
// what is called when another one takes its place.

import { checkView } from "./check.js";
import { jobView } from "./job.js";
import { listView } from "./list.js";

let leave = () => {};

function route() {
  const [path, query] = location.hash.replace(/^#/, "").split("?");
  if (path && !path.startsWith("/")) return; // the link to the content
  leave();
  const main = document.getElementById("main");
  const found = /^\/jobs\/(\w+)$/.exec(path);
  main.replaceChildren();
  const check = path === "/check";
  document.title = `${found ? found[1] : check ? "Check a job" : "Jobs"} · Footplate`;
  if (check) leave = checkView(main);
  else leave = found ? jobView(main, found[1]) : listView(main, new URLSearchParams(query));
}

addEventListener("hashchange", () => {
  route();
  scrollTo(0, 0);
});
route();
