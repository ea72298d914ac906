// Polling while the page is visible, the connection status, and dialogs.

const connection = document.getElementById("connection");
const alertBox = document.getElementById("alert");

/**
 * Call `look` now, and again after a pause: the seconds that it returns, or 2. An error is shown, and the call is retried.
 * Returns `now`, which calls `look` at once, and `end`, which stops the polling.
 */
export function watch(look) {
  let over = false;
  let timer = 0;
  let busy = false;
  const ended = new AbortController();
  async function again() {
    if (over || busy || document.hidden) return;
    clearTimeout(timer);
    busy = true;
    let pause = 2;
    try {
      pause = (await look(ended.signal)) ?? 2;
      answers(true);
    } catch (error) {
      if (over) return;
      answers(error.status !== undefined);
      if (error.status !== undefined) complain(error);
      pause = 5;
    } finally {
      busy = false;
    }
    if (!over) timer = setTimeout(again, pause * 1000);
  }
  document.addEventListener("visibilitychange", again);
  again();
  return {
    now: again,
    end() {
      over = true;
      clearTimeout(timer);
      ended.abort();
      document.removeEventListener("visibilitychange", again);
    },
  };
}

/** Show an error until the user closes it. */
export function complain(error) {
  const close = document.createElement("button");
  close.type = "button";
  close.textContent = "Close";
  close.addEventListener("click", () => alertBox.replaceChildren());
  const text = document.createElement("p");
  text.textContent = error.message;
  alertBox.replaceChildren(text, close);
}

/**
 * Ask for confirmation; resolves to true if the user confirms. After Escape the promise stays unresolved, because the dialog's
 * "close" event may come after the next question has been asked.
 */
export function confirmed(title, text, yes) {
  const dialog = document.getElementById("confirm");
  document.getElementById("confirm-title").textContent = title;
  document.getElementById("confirm-text").textContent = text;
  document.getElementById("confirm-yes").textContent = yes;
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.firstElementChild.onsubmit = (event) => resolve(event.submitter.value === "yes");
  });
}

function answers(well) {
  connection.textContent = well ? "live" : "no connection to the server; retrying";
  connection.className = well ? "well" : "away";
}
