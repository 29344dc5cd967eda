/** Requests to the server. Failures are thrown as a RequestError, whose message is shown to the user. */

const KEY = "jetspec-key";

export class RequestError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** Returns the served model and its tree limits. */
export async function readModel() {
  const response = await request("v1/models", {});
  return (await response.json()).data[0];
}

/**
 * Stream a chat completion. `take(text, round, at)` is called per round, `at` seconds after the request.
 * Returns the finish reason and the seconds up to the last round.
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
  const response = await request("v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new RequestError(sentence(chunk.error.message));
    yield chunk;
  }
  throw new RequestError("The answer broke off: the server closed the connection.");
}

async function request(path, options) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    throw asNetworkError(error);
  }
  if (!response.ok) throw await asError(response);
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
    throw asNetworkError(error);
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Passes on an abort by the user; gives any other network failure a message. */
function asNetworkError(error) {
  if (error.name === "AbortError" || error instanceof RequestError) return error;
  return new RequestError("The server cannot be reached. Is it still running?");
}

async function asError(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = sentence((await response.json()).error.message);
  } catch {
    // Not JSON, such as the error page of a proxy: the status suffices.
  }
  const wait = response.headers.get("Retry-After");
  return new RequestError(wait ? `${message} Try again in ${wait} s.` : message, response.status);
}

/** A message as a sentence. A field name at its beginning keeps its case. */
function sentence(text) {
  const first = /^[a-z]+\b(?![._])/.test(text) ? text.charAt(0).toUpperCase() + text.slice(1) : text;
  return first + (/[.!?]$/.test(text) ? "" : ".");
}
