// Requests to the server. Each carries a header that pages of other sites can't send, and the token, if there is one.

export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Send a request; returns JSON, or the form of `as`. A `body` is sent as JSON. A refusal throws a Problem with the server's message. */
export async function ask(method, path, { as = "json", body, signal } = {}) {
  for (;;) {
    const sent = body === undefined ? {} : { body: JSON.stringify(body) };
    const token = sessionStorage.getItem("token");
    const answer = await fetch(`/api${path}`, { method, headers: headers(body, token), ...sent, signal, cache: "no-store" });
    if (answer.status === 401) {
      // Another request may have asked the user for the token in the meantime.
      const isNewer = token !== sessionStorage.getItem("token");
      if (!isNewer) await askToken(token);
      continue;
    }
    if (!answer.ok) throw new Problem(answer.status, await messageOf(answer));
    if (as === "raw") return answer;
    return answer.status === 204 ? null : answer[as]();
  }
}

/** Iterate over the events of a stream, as [kind, data], until it ends. */
export async function* events(path, signal) {
  const answer = await ask("GET", path, { as: "raw", signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const found = /^event: (\w+)\ndata: (.*)$/s.exec(part);
      if (found) yield [found[1], JSON.parse(found[2])];
    }
  }
}

function headers(body, token) {
  const kind = body === undefined ? {} : { "Content-Type": "application/json" };
  return { "X-Footplate": "1", ...kind, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
}

async function messageOf(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answered with status ${answer.status}.`;
  }
}

let asking = null;

/** Ask the user for the token, once for all waiting requests. If there was a token, say that the server has refused it. */
function askToken(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("ask-token");
    const input = document.getElementById("token");
    input.value = "";
    document.getElementById("token-wrong").textContent = refused ? "The server refused this token. Try again." : "";
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    dialog.addEventListener(
      "close",
      () => {
        sessionStorage.setItem("token", input.value.trim());
        input.value = "";
        asking = null;
        resolve();
      },
      { once: true },
    );
    dialog.showModal();
  });
  return asking;
}
