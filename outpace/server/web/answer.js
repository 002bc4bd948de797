// One answer: its text while it streams, its numbers, its errors.

import { button, copyButton, el, show } from "./dom.js";
import { render } from "./markdown.js";
import { LETTERS, badge, summary } from "./settings.js";

const ENDS = { length: "cut at the token limit", stopped: "stopped", abort: "aborted", content_filter: "filtered" };

/** An answer before its first token. */
export function newAnswer(model, params) {
  const times = { first: null, writing: null }; // seconds to the first token, and from there to the last
  return { model, params, text: "", chunks: 0, usage: null, finish: null, error: null, ...times };
}

/** The view of an answer. `retry`, where given, asks for it again. `update()` shows what changed. */
export function answerView(answer, column, { compare, retry }) {
  const text = el("div", { className: "text", "aria-live": "polite" });
  const problem = el("div", { role: "alert" });
  const numbers = el("p", { className: "numbers muted" });
  const copy = copyButton(() => answer.text, compare ? `Copy answer ${LETTERS[column]}` : "Copy answer");
  const again = button("Regenerate", retry, { className: "quiet" });
  if (compare) again.setAttribute("aria-label", `Regenerate answer ${LETTERS[column]}`);
  const foot = el("footer", {}, numbers, el("span", { className: "actions" }, copy, again));
  const node = el("article", { className: "answer", "aria-label": compare ? `Answer ${LETTERS[column]}` : "Answer" });
  if (compare) node.append(heading(answer, column));
  node.append(text, problem, foot);
  let planned = 0;
  let shownError = null;

  const draw = () => {
    planned = 0;
    const busy = answer.finish === null;
    render(text, answer.text);
    text.setAttribute("aria-busy", busy);
    node.classList.toggle("busy", busy);
    numbers.textContent = figures(answer);
    copy.hidden = answer.text === "";
    again.hidden = busy || !retry || answer.error !== null;
    foot.hidden = numbers.textContent === "" && copy.hidden && again.hidden;
    if (answer.error !== shownError) {
      shownError = answer.error;
      problem.replaceChildren(...(shownError ? [errorBox(shownError, retry)] : []));
    }
  };
  draw();
  return {
    node,
    update: () => (planned ||= requestAnimationFrame(draw)),
    end() {
      cancelAnimationFrame(planned);
      draw();
    },
  };
}

function heading(answer, column) {
  const text = [answer.model, summary(answer.params) || "default settings"].filter(Boolean).join(" · ");
  return el("header", {}, badge(LETTERS[column]), el("span", { className: "muted", textContent: text, title: text }));
}

/** "128 tokens · 54.2 tokens/s · first token 83 ms": what is known so far. */
function figures({ chunks, usage, finish, first, writing }) {
  if (finish === null) return first === null ? "Waiting for the first token" : `First token ${time(first)}`;
  if (first === null) return "";
  const tokens = usage?.completion_tokens ?? chunks;
  const about = usage ? "" : "about ";
  const parts = [`${about}${show(tokens)} ${tokens === 1 ? "token" : "tokens"}`];
  if (tokens > 1 && writing > 0) parts.push(`${show((tokens - 1) / writing)} tokens/s`);
  parts.push(`first token ${time(first)}`);
  if (usage) parts.push(`prompt ${show(usage.prompt_tokens)}`);
  if (ENDS[finish]) parts.push(ENDS[finish]);
  return parts.join(" · ");
}

const time = (seconds) => (seconds < 1 ? `${show(Math.round(1000 * seconds))} ms` : `${show(seconds)} s`);

function errorBox({ status, title, message, retryAfter }, retry) {
  const heading = el("strong", { textContent: status ? `${title} (${status})` : title });
  const box = el("div", { className: "error" }, heading, el("p", { textContent: message }));
  if (retryAfter !== null) box.append(el("p", { textContent: `The server asks to wait ${retryAfter} s.` }));
  if (retry) box.append(button("Try again", retry));
  return box;
}
