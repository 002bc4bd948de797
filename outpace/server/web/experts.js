// The load of experts as a picture: a row for each layer that has some, a column for each expert.

import { call } from "./api.js";
import { byId, show } from "./dom.js";

const PERIOD = 5000;
const DARKEST = 2; // times the mean of a layer
let drawnAt = -PERIOD;

/** Draw the load, if the model has experts and some seconds have passed. */
export async function drawExperts(status, at) {
  const has = (status.expert_layers ?? []).length > 0;
  byId("experts").hidden = !has;
  if (!has || at - drawnAt < PERIOD) return;
  drawnAt = at;
  const { layers, tokens, imbalance } = await (await call("status/experts")).json();
  if (!tokens.length) {
    drawnAt = at - PERIOD + 1000; // not read yet: ask again soon
    return;
  }
  paint(byId("experts-plot"), tokens);
  const worst = imbalance.reduce((best, ratio, row) => ((ratio ?? 0) > (imbalance[best] ?? 0) ? row : best), 0);
  const busiest = tokens[worst].indexOf(Math.max(...tokens[worst]));
  const most = imbalance[worst] ? `max ${show(Math.round(10 * imbalance[worst]) / 10)} times the mean` : "no tokens yet";
  byId("experts-title").textContent = `Experts, ${show(layers.length)} layers of ${show(tokens[0].length)}: ${most}`;
  const where = imbalance[worst] ? `; the busiest is expert ${busiest} of layer ${layers[worst]}` : "";
  byId("experts-plot").setAttribute("aria-label", `Load of ${tokens[0].length} experts in ${layers.length} layers, ${most}${where}`);
}

/** A pixel for each expert, the darker the busier it is among those of its layer. */
function paint(canvas, tokens) {
  canvas.width = Math.max(...tokens.map((row) => row.length));
  canvas.height = tokens.length;
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(canvas).color;
  tokens.forEach((row, y) => {
    const mean = row.reduce((sum, count) => sum + count, 0) / row.length;
    row.forEach((count, x) => {
      context.globalAlpha = mean ? Math.min(1, count / (DARKEST * mean)) : 0;
      context.fillRect(x, y, 1, 1);
    });
  });
}
