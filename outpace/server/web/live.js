// The live view of the engine: /status once a second, while someone can see it.

import { ApiError, call } from "./api.js";
import { byId, el, show } from "./dom.js";
import { drawExperts } from "./experts.js";

const SVG = "http://www.w3.org/2000/svg";
const STEPS = 64;
const PERIOD = 1000;

/** Poll and draw. `visible()` says whether the view is open; call the returned function when that may have changed. */
export function createLive(visible) {
  let timer = 0;
  let polling = false;
  let before = null; // the last status and when it came

  async function poll() {
    timer = 0;
    if (polling) return;
    if (document.visibilityState !== "visible" || !visible()) {
      before = null; // a rate over a pause would be wrong
      return;
    }
    polling = true;
    try {
      const status = await (await call("status")).json();
      const now = { status, at: performance.now() };
      draw(now, before);
      before = now;
      await drawExperts(status, now.at);
    } catch (error) {
      before = null;
      setState("down", error instanceof ApiError ? error.title : "The numbers cannot be read");
    }
    polling = false;
    timer = setTimeout(poll, PERIOD);
  }

  const wake = () => timer || poll();
  document.addEventListener("visibilitychange", wake);
  wake();
  return wake;
}

function draw({ status, at }, before) {
  const steps = status.last_steps.slice(-STEPS).map(([id, prefill, decode, ms]) => ({ id, prefill, decode, ms }));
  const down = status.why ? `Not ready: ${status.why}` : "Not ready";
  setState(status.ready ? "ready" : "down", status.ready ? (status.running ? "Working" : "Ready") : down);
  const used = status.num_blocks - status.free_blocks;
  const mean = steps.length ? steps.reduce((sum, { ms }) => sum + ms, 0) / steps.length : NaN;
  const rate = (name) => {
    const passed = before ? status[name] - before.status[name] : -1; // negative: the totals began at 0 again
    return passed < 0 ? "–" : show(Math.round((10000 * passed) / (at - before.at)) / 10);
  };
  const limit = status.step_limit_ms ? `limit ${show(status.step_limit_ms)}` : "mean";
  numbers([
    ["Generated", rate("generated_tokens"), "tokens/s"],
    ["Prompts", rate("prompt_tokens"), "tokens/s"],
    ["Running", show(status.running), "requests"],
    ["Waiting", show(status.waiting), "requests"],
    ["KV blocks", show(used), `of ${show(status.num_blocks)}`, status.num_blocks ? used / status.num_blocks : 0],
    ["Step time", Number.isNaN(mean) ? "–" : `${show(mean)} ms`, limit],
    ["Cache hits", status.prefix_queries ? `${show(Math.round((100 * status.prefix_hits) / status.prefix_queries))} %` : "–", "of prompts"],
    ["Restarts", show(status.restarts), status.preemptions ? `${show(status.preemptions)} preempted` : ""],
  ]);
  plots(steps, status.step_limit_ms);
  if (byId("steps").open) table(steps);
}

function setState(state, text) {
  const shown = byId("state");
  shown.dataset.state = state;
  if (shown.textContent !== text) shown.textContent = text;
}

/** The figures. Their nodes are made once and then changed, so that nothing flickers. */
function numbers(rows) {
  const list = byId("numbers");
  rows.forEach(([name, value, unit, share], at) => {
    const cell = list.children[at] ?? list.appendChild(el("div", {}, el("dt", { textContent: name }), el("dd", {}, el("b"), " ", el("small"))));
    cell.querySelector("b").textContent = value;
    cell.querySelector("small").textContent = unit;
    if (share === undefined) return;
    const meter = cell.querySelector("meter") ?? cell.querySelector("dd").appendChild(el("meter", { "aria-label": `${name} used` }));
    meter.value = share;
  });
}

function plots(steps, limit) {
  const top = Math.max(1, ...steps.map(({ prefill, decode }) => prefill + decode));
  const slow = Math.max(...steps.map(({ ms }) => ms), 0.001);
  const ceiling = Math.max(slow, limit || 0); // the top of the plot of times
  const start = STEPS - steps.length; // the newest step stands at the right
  const tooltip = ({ id, prefill, decode, ms }) => `Step ${id}: ${prefill} prefill and ${decode} decode tokens in ${show(ms)} ms`;
  fill(byId("tokens-plot"), steps.map((step, at) => {
    const low = (100 * step.decode) / top;
    const high = (100 * step.prefill) / top;
    return [tooltip(step), bar("decode", start + at, 100 - low, low), bar("prefill", start + at, 100 - low - high, high)];
  }));
  fill(byId("time-plot"), steps.map((step, at) => [tooltip(step), bar(limit && step.ms > limit ? "time over" : "time", start + at, 100 - (100 * step.ms) / ceiling, (100 * step.ms) / ceiling)]));
  if (!steps.length) return;
  const over = steps.filter(({ ms }) => ms > limit).length;
  if (limit) byId("time-plot").append(line(100 - (100 * limit) / ceiling, `Limit ${show(limit)} ms`));
  const limited = limit ? `; the limit is ${show(limit)} ms, and ${over} took longer` : "";
  const total = (name) => steps.reduce((sum, step) => sum + step[name], 0);
  const mixed = steps.filter(({ prefill, decode }) => prefill && decode).length;
  const sums = `${total("prefill")} prefill tokens and ${total("decode")} decode tokens`;
  const said = `Last ${steps.length} steps: ${sums}, ${mixed} steps with both, at most ${top} in a step`;
  byId("tokens-plot").setAttribute("aria-label", said);
  byId("time-plot").setAttribute("aria-label", `Step times of the last ${steps.length} steps, at most ${show(slow)} ms${limited}`);
  byId("steps-title").textContent = `Tokens per step, max ${show(top)}`;
  byId("time-top").textContent = `Step time, max ${show(slow)} ms${limit ? `, limit ${show(limit)} ms` : ""}`;
}

const bar = (kind, x, y, height) => ({ class: kind, x: x + 0.08, y, width: 0.84, height });

/** A line across a plot, with a tooltip. */
const line = (y, tooltip) => svg("line", { class: "limit", x1: 0, x2: STEPS, y1: y, y2: y }, svg("title", {}, tooltip));

/** Draw groups of bars, each with a tooltip. */
function fill(plot, groups) {
  plot.replaceChildren(...groups.map(([tooltip, ...bars]) =>
    svg("g", {}, svg("title", {}, tooltip), ...bars.filter(({ height }) => height > 0).map((attributes) => svg("rect", attributes)))));
}

function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function table(steps) {
  byId("step-rows").replaceChildren(...steps.toReversed().map(({ id, prefill, decode, ms }) =>
    el("tr", {}, el("th", { scope: "row", textContent: id }), ...[prefill, decode, show(ms)].map((cell) => el("td", { textContent: cell })))));
}
