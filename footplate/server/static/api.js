// What the server is asked. A request has a header that no other site's page can send, and the token, if there is one.

export class Problem extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask for JSON, or, with `as`, another form; a `body` is sent as JSON. A refusal is a Problem with the server's own words. */
export async function ask(method, path, { as = "json", body, signal } = {}) {
  for (;;) {
    const sent = body === undefined ? {} : { body: JSON.stringify(body) };
    const token = sessionStorage.getItem("token");
    const answer = await fetch(`/api${path}`, { method, headers: headers(body, token), ...sent, signal, cache: "no-store" });
    if (answer.status === 401) {
      const isNewer = token !== sessionStorage.getItem("token"); // another request has asked for it meanwhile
      if (!isNewer) await askToken(token);
      continue;
    }
    if (!answer.ok) throw new Problem(answer.status, await said(answer));
    if (as === "raw") return answer;
    return answer.status === 204 ? null : answer[as]();
  }
}

/** The events of a stream, as [kind, data], until it ends. */
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

async function said(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server has answered with ${answer.status}.`;
  }
}

let asking = null;

/** Ask for the token once, however many requests wait for it. If there was a token, say that the server has refused it. */
function askToken(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("ask-token");
    const input = document.getElementById("token");
    input.value = "";
    document.getElementById("token-wrong").textContent = refused ? "That isn't this server's token. Try again." : "";
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
