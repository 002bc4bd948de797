// Calls to the server that sent this page: the key, errors in words, and answers as streams.

const ROOT = new URL("../", import.meta.url);
const KEY = "outpace.key";
const TITLES = {
  0: "The server cannot be reached",
  400: "The server refused the request",
  401: "The server needs an API key",
  403: "The key does not allow this",
  404: "Not found",
  413: "The request is too large",
  429: "The server is busy",
  503: "The engine is not ready",
  504: "The request took too long",
};
const BROKEN = "The answer broke off";

/** What went wrong: status (0: no answer), title and message for people, and seconds to wait where the server says. */
export class ApiError extends Error {
  constructor(status, message, { title, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.title = title ?? TITLES[status] ?? (status >= 500 ? "The server failed" : "The request failed");
    this.retryAfter = retryAfter;
  }
}

/** The API key of this tab. */
export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** Fetch `path`. On 401, `askKey(refused)` may get a key (true) and the call is made again. */
export async function call(path, { askKey, ...options } = {}) {
  for (;;) {
    const used = key.get();
    const headers = { ...options.headers, ...(used && { Authorization: `Bearer ${used}` }) };
    let response;
    try {
      response = await fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, "No answer came. Is it running?");
    }
    if (response.ok) return response;
    const replaced = key.get() !== used;
    if (response.status === 401 && askKey && (replaced || (await askKey(used !== "")))) continue;
    throw await refusal(response);
  }
}

async function refusal(response) {
  const text = await response.text().catch(() => "");
  let message = text.slice(0, 500) || response.statusText;
  try {
    const found = JSON.parse(text);
    message = found.error?.message ?? found.message ?? (typeof found.detail === "string" ? found.detail : message);
  } catch {
    // not JSON: the text itself is the message
  }
  return new ApiError(response.status, message, { retryAfter: seconds(response.headers.get("Retry-After")) });
}

/** Retry-After holds seconds or a date. */
function seconds(value) {
  if (!value) return null;
  const wait = /^\d+$/.test(value) ? Number(value) : (Date.parse(value) - Date.now()) / 1000;
  return Number.isFinite(wait) ? Math.max(0, Math.ceil(wait)) : null;
}

/** The data of each event of a server-sent stream. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      if (line !== "" || !data.length) continue;
      yield data.join("\n");
      data = [];
    }
  }
}

/** Stream one chat answer: onText(piece) for text; returns {finish, usage}. Throws ApiError, or AbortError on stop. */
export async function streamChat(request, { signal, askKey, onText }) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
    askKey,
  });
  let finish = null;
  let usage = null;
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return { finish, usage };
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(0, event.error.message ?? "", { title: BROKEN });
      const choice = event.choices?.[0];
      if (choice?.delta?.content) onText(choice.delta.content);
      finish = choice?.finish_reason ?? finish;
      usage = event.usage ?? usage;
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection was lost.", { title: BROKEN });
  }
  if (!finish) throw new ApiError(0, "The connection was closed before the end.", { title: BROKEN });
  return { finish, usage };
}
