// The conversation: turns of a user's message and one answer, or two side by side.

import { ApiError, streamChat } from "./api.js";
import { answerView, newAnswer } from "./answer.js";
import { button, byId, el } from "./dom.js";

/**
 * `settings` reads the two settings, `askKey` gets an API key, `announce` speaks to screen readers,
 * `changed` is called after every change of the turns, `busyChanged` when answering starts or ends.
 */
export function createChat({ settings, askKey, announce, changed, busyChanged }) {
  const scroll = byId("scroll");
  const list = byId("turns");
  let turns = []; // {user, answers: [of A, of B or null]}
  let compare = false;
  let stopper = null; // of the answers that are being written

  const isAtEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
  const toEnd = () => (scroll.scrollTop = scroll.scrollHeight);
  const setBusy = (controller) => {
    stopper = controller;
    list.classList.toggle("answering", controller !== null);
    busyChanged(controller !== null);
  };

  /** Draw all turns from `from` on again. */
  function draw(from = 0) {
    while (list.children.length > from) list.lastChild.remove();
    for (let at = from; at < turns.length; at++) list.append(turnView(at));
    byId("empty").hidden = turns.length > 0;
  }

  function turnView(at) {
    const turn = turns[at];
    const two = turn.answers[1] !== null;
    turn.views = turn.answers.map((answer, column) => {
      if (!answer) return null;
      const retry = at === turns.length - 1 ? () => ask(at, [column]) : undefined;
      return answerView(answer, column, { compare: two, retry });
    });
    const answers = el("div", { className: two ? "answers two" : "answers" }, ...turn.views.filter(Boolean).map((view) => view.node));
    return el("li", {}, userView(at), answers);
  }

  function userView(at) {
    const text = el("div", { className: "bubble", textContent: turns[at].user });
    const edit = button("Edit", () => box.replaceWith(editor(at)), { className: "quiet edit", "aria-label": `Edit message ${at + 1}` });
    const box = el("div", { className: "user", role: "group", "aria-label": `Your message ${at + 1}` }, edit, text);
    return box;
  }

  function editor(at) {
    const area = el("textarea", { value: turns[at].user, rows: 3, "aria-label": `Edit message ${at + 1}` });
    const close = () => {
      const view = userView(at);
      box.replaceWith(view);
      view.querySelector("button").focus();
    };
    const submit = () => push(area.value, at);
    area.onkeydown = (event) => {
      if (event.key === "Escape") close();
      if (!sends(event)) return;
      event.preventDefault();
      submit();
    };
    const note = el("span", { className: "muted", textContent: at < turns.length - 1 ? "Replaces what follows" : "" });
    const row = el("div", { className: "row end" }, note, button("Cancel", close), button("Send again", submit, { className: "main" }));
    const box = el("div", { className: "user editing" }, area, row);
    queueMicrotask(() => area.focus());
    return box;
  }

  /** The settings of these columns, or null after saying what is wrong. */
  function read(columns) {
    try {
      return columns.map((column) => settings.read(column));
    } catch (error) {
      announce(error.message, true);
      return null;
    }
  }

  /** Send a message as turn `at`, in place of what follows; false when something keeps it from being sent. */
  function push(text, at) {
    const columns = compare ? [0, 1] : [0];
    if (stopper || !text.trim() || !read(columns)) return false;
    turns.length = at;
    turns.push({ user: text.trim(), answers: [null, null], views: [] });
    ask(at, columns);
    return true;
  }

  /** Ask for the answers of these columns to turn `at`, at the same time. */
  async function ask(at, columns) {
    const chosen = stopper ? null : read(columns);
    if (!chosen) return;
    const turn = turns[at];
    columns.forEach((column, place) => (turn.answers[column] = newAnswer(chosen[place].model, chosen[place].params)));
    if (list.contains(document.activeElement)) byId("send").focus(); // which says "Stop" now; the button pressed goes away
    draw(Math.max(0, at - 1)); // the turn before loses its "Regenerate"
    toEnd();
    const controller = new AbortController();
    setBusy(controller);
    announce("Answering");
    changed();
    await Promise.all(columns.map((column, place) => write(turn, column, messages(at, column, chosen[place].system), controller.signal)));
    setBusy(null);
    announce(turn.answers.some((answer) => answer?.finish === "stopped") ? "Stopped" : "Answer complete");
    changed();
  }

  /** The messages that lead to turn `at` in this column. Turns without an answer in it share that of A. */
  function messages(at, column, system) {
    const sent = system ? [{ role: "system", content: system }] : [];
    for (const { user, answers } of turns.slice(0, at)) {
      const text = (answers[column] ?? answers[0])?.text;
      if (text) sent.push({ role: "user", content: user }, { role: "assistant", content: text });
    }
    return [...sent, { role: "user", content: turns[at].user }];
  }

  async function write(turn, column, sent, signal) {
    const answer = turn.answers[column];
    const view = turn.views[column];
    const started = performance.now();
    const since = () => (performance.now() - started) / 1000;
    let last = 0;
    const onText = (piece) => {
      last = since();
      answer.first ??= last;
      answer.text += piece;
      answer.chunks++;
      const follow = isAtEnd();
      view.update();
      if (follow) requestAnimationFrame(toEnd);
    };
    const request = { messages: sent, ...answer.params, ...(answer.model && { model: answer.model }) };
    try {
      const end = await streamChat(request, { signal, askKey, onText });
      answer.finish = end.finish ?? "stop";
      answer.usage = end.usage;
    } catch (error) {
      if (error.name === "AbortError") answer.finish = "stopped";
      else {
        const known = error instanceof ApiError ? error : new ApiError(0, String(error.message));
        answer.finish = "error";
        answer.error = { status: known.status, title: known.title, message: known.message, retryAfter: known.retryAfter };
      }
    }
    answer.writing = answer.first === null ? null : last - answer.first;
    const follow = isAtEnd();
    view.end();
    if (follow) toEnd();
  }

  return {
    send: (text) => push(text, turns.length),
    stop: () => stopper?.abort(),
    clear() {
      stopper?.abort();
      turns = [];
      draw();
      changed();
    },
    setCompare: (on) => (compare = on),
    save: () => turns.map(({ user, answers }) => ({ user, answers })),
    load(saved) {
      const ended = (answer) => answer && { ...answer, finish: answer.finish ?? "stopped" };
      turns = saved.map(({ user, answers }) => ({ user, answers: answers.map(ended), views: [] }));
      draw();
      toEnd();
    },
  };
}

/** Enter sends, Shift+Enter does not; nor does the Enter that ends a composition of characters. */
export const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing;
