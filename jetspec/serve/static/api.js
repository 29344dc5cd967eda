/** Talks to the server. Whatever goes wrong is thrown as a Trouble, whose message is meant for people. */

const KEY = "jetspec-key";

export class Trouble extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** The model that is served and the shape of its trees. */
export async function readModel() {
  const response = await ask("v1/models", {});
  return (await response.json()).data[0];
}

/**
 * Have a chat answered. `take(text, round, at)` gets what each round brings, `at` seconds after the question.
 * Returns why the answer ended and how long it took up to its last round.
 */
export async function decode(body, signal, take) {
  const began = performance.now();
  let [finish, seconds] = ["", 0];
  for await (const { choices, jetspec } of streamChat(body, signal)) {
    const text = choices[0]?.delta.content ?? "";
    finish = choices[0]?.finish_reason ?? finish;
    if (!text && !jetspec) continue;
    seconds = (performance.now() - began) / 1000;
    take(text, jetspec, seconds);
  }
  return { finish, seconds };
}

async function* streamChat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Trouble(sentence(chunk.error.message));
    yield chunk;
  }
  throw new Trouble("The answer broke off: the server has closed the connection.");
}

async function ask(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw asTrouble(error);
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) yield part.replace(/^data: /, "");
    }
  } catch (error) {
    throw asTrouble(error);
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** A stop that was asked for stays what it is; any other failure of the network gets words. */
function asTrouble(error) {
  if (error.name === "AbortError" || error instanceof Trouble) return error;
  return new Trouble("The server cannot be reached. Is it still running?");
}

async function refusal(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = sentence((await response.json()).error.message);
  } catch {
    // Not one of JetSpec's own answers: a proxy in between may send pages. The status says enough.
  }
  const wait = response.headers.get("Retry-After");
  return new Trouble(wait ? `${message} Try again in ${wait} s.` : message, response.status);
}

/** A message as a sentence. The name of a field stays as it is written. */
function sentence(text) {
  const first = /^[a-z]+\b(?![._])/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text;
  return first + (/[.!?]$/.test(text) ? "" : ".");
}
