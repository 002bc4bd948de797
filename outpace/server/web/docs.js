// The API as /openapi.json describes it: a section for each route, its fields and its answers.

import { call } from "./api.js";
import { byId, el } from "./dom.js";

const METHODS = ["get", "post", "put", "delete", "patch"];

/** What a reference in the description points at; other schemas are themselves. */
function resolve(api, schema) {
  if (!schema?.$ref) return schema ?? {};
  return schema.$ref.slice(2).split("/").reduce((at, name) => at[name], api);
}

/** A schema in a few words: "integer or null", "list of string". */
function kind(schema) {
  if (!schema) return "anything";
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.enum || schema.const !== undefined) return (schema.enum ?? [schema.const]).map((one) => JSON.stringify(one)).join(" or ");
  const several = schema.anyOf ?? schema.oneOf;
  if (several) return [...new Set(several.map(kind))].join(" or ");
  if (schema.type === "array") return `list of ${kind(schema.items)}`;
  return schema.type ?? "anything";
}

/** The bounds of a schema, or of the parts of a union. */
function bounds(schema) {
  const words = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<" };
  const parts = [schema, ...(schema.anyOf ?? [])];
  const found = parts.flatMap((part) => Object.entries(words).filter(([name]) => part[name] !== undefined).map(([name, sign]) => `${sign} ${part[name]}`));
  return [...new Set(found)].join(", ");
}

const cell = (text, code = false) => el("td", {}, code ? el("code", { textContent: text }) : text);

/** A table of the fields of an object. */
function fields(api, schema) {
  const object = resolve(api, schema);
  const rows = Object.entries(object.properties ?? {}).map(([name, one]) => {
    const needed = object.required?.includes(name);
    const preset = one.default === undefined || one.default === null ? "" : JSON.stringify(one.default);
    return el("tr", {}, el("th", { scope: "row" }, el("code", { textContent: name }), needed ? " (needed)" : ""), cell(kind(one), true), cell([bounds(one), preset && `default ${preset}`].filter(Boolean).join("; ")), cell(one.description ?? ""));
  });
  if (!rows.length) return el("p", { className: "muted", textContent: kind(schema) });
  const head = el("tr", {}, ...["Field", "Type", "Limits", "What it is"].map((text) => el("th", { scope: "col", textContent: text })));
  return el("div", { className: "scroller", tabIndex: 0, role: "region", "aria-label": "Fields" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}

/** One route: what it takes and what it answers. */
function route(api, path, method, about) {
  const parts = [el("p", { textContent: about.description ?? about.summary ?? "" })];
  for (const { name, in: where, schema } of about.parameters ?? []) parts.push(el("p", {}, el("code", { textContent: name }), ` (${where}): ${kind(schema)}`));
  const body = about.requestBody?.content?.["application/json"]?.schema;
  if (body) parts.push(el("h3", { textContent: "Body" }), fields(api, body));
  for (const [status, answer] of Object.entries(about.responses ?? {})) {
    parts.push(el("h3", { textContent: `Answer ${status}` }), el("p", { textContent: answer.description ?? "" }));
    const schema = answer.content?.["application/json"]?.schema;
    if (schema && status === "200") parts.push(fields(api, schema));
  }
  const title = el("summary", {}, el("b", { textContent: method.toUpperCase() }), " ", el("code", { textContent: path }), " ", el("small", { textContent: about.summary ?? "" }));
  return el("details", { className: "route" }, title, ...parts);
}

function draw(api) {
  const groups = new Map();
  for (const [path, item] of Object.entries(api.paths)) {
    for (const method of METHODS.filter((one) => item[one])) {
      const tag = item[method].tags?.[0] ?? "Other";
      groups.set(tag, [...(groups.get(tag) ?? []), route(api, path, method, item[method])]);
    }
  }
  byId("routes").replaceChildren(...[...groups].flatMap(([tag, routes]) => [el("h2", { textContent: tag }), ...routes]));
  byId("card").textContent = `Version ${api.info.version}`;
}

try {
  draw(await (await call("openapi.json")).json());
} catch (error) {
  byId("card").textContent = error.title ?? "The description cannot be read";
}
