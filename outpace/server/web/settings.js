// The settings: one row for each, a field for setting A and one for setting B (seen side by side only).

import { byId, el } from "./dom.js";

export const LETTERS = ["A", "B"];
const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: -1, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.05 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, max: 2, step: 0.05 },
];
const AREAS = [
  { name: "system", label: "System prompt" },
  { name: "stop", label: "Stop strings", note: "one per line, \\n for a new line" },
];

/** The fields, in #fields. `changed` is called when one of them changes. */
export function createSettings(changed) {
  const fields = [{}, {}]; // by column, then by name
  const models = { name: "model", label: "Model" };
  byId("fields").append(el("div", { className: "field letters", "aria-hidden": true }, el("span"), ...LETTERS.map(badge)));
  for (const spec of [models, AREAS[0], ...NUMBERS, AREAS[1]]) byId("fields").append(row(spec, fields));
  byId("fields").addEventListener("input", ({ target }) => {
    if (target.tagName === "SELECT") target.title = target.value; // it shows the beginning of a long name only
    changed();
  });
  byId("reset").addEventListener("click", () => {
    for (const field of fields.flatMap(Object.values)) field.value = field.tagName === "SELECT" ? (field.title = field.options[0]?.value) : "";
    changed();
  });

  return {
    /** The models to choose from. */
    setModels(names) {
      for (const { model } of fields) {
        const before = model.dataset.wanted ?? model.value;
        model.replaceChildren(...names.map((name) => el("option", { value: name, textContent: name })));
        if (names.includes(before)) model.value = before;
        model.title = model.value;
      }
    },
    /** Show the fields of setting B, or hide them. */
    setCompare(on) {
      byId("fields").classList.toggle("two", on);
      for (const field of Object.values(fields[0])) named(field, on ? `${field.dataset.label}, A` : field.dataset.label);
      for (const field of Object.values(fields[1])) field.hidden = !on;
    },
    /** {model, system, params} of a column; params hold only what was filled in. Throws a RangeError that says what is wrong. */
    read: (column) => read(fields[column]),
    save: () => fields.map((set) => Object.fromEntries(Object.entries(set).map(([name, field]) => [name, field.value || field.dataset.wanted || ""]))),
    load(saved) {
      saved.forEach((values, column) => {
        for (const [name, value] of Object.entries(values)) if (fields[column][name]) fields[column][name].value = value;
        fields[column].model.dataset.wanted = values.model; // the list of models may come later
      });
    },
  };
}

/** The sign of a setting, the same over its fields and its answers. */
export const badge = (letter) => el("span", { className: `letter ${letter}`, textContent: letter, "aria-hidden": true });

const named = (field, name) => field.setAttribute("aria-label", name);

function row(spec, fields) {
  const label = el("label", { htmlFor: `${spec.name}-A`, textContent: spec.label });
  if (spec.note) label.append(" ", el("small", { textContent: spec.note }));
  const made = el("div", { className: spec.step ? "field" : `field wide ${spec.name}` }, label);
  LETTERS.forEach((letter, column) => {
    const field = control(spec);
    field.id = `${spec.name}-${letter}`;
    field.dataset.label = spec.label;
    field.hidden = column === 1;
    if (column === 1) named(field, `${spec.label}, B`);
    fields[column][spec.name] = field;
    if (spec.name === "model") made.append(badge(letter)); // two models stand one under the other
    made.append(field);
  });
  return made;
}

function control(spec) {
  if (spec.name === "model") return el("select");
  if (!spec.step) return el("textarea", { rows: 2, spellcheck: false });
  const field = el("input", { type: "number", step: spec.step, placeholder: "auto", inputMode: "decimal" });
  for (const bound of ["min", "max"]) if (spec[bound] !== undefined) field[bound] = spec[bound];
  return field;
}

function read(set) {
  const params = {};
  for (const spec of NUMBERS) {
    const field = set[spec.name];
    const wrong = problem(field, spec);
    field.setAttribute("aria-invalid", wrong !== "");
    if (wrong) {
      field.focus();
      throw new RangeError(`${spec.label} ${wrong}.`);
    }
    if (field.value !== "") params[spec.name] = field.valueAsNumber;
  }
  const stop = set.stop.value.split("\n").filter((line) => line !== "").map(unescaped);
  if (stop.length) params.stop = stop;
  return { model: set.model.value, system: set.system.value.trim(), params };
}

function problem(field, { min, max, step }) {
  const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = field.validity;
  if (badInput) return "must be a number";
  if (step === 1 && stepMismatch) return "must be a whole number";
  if (!rangeUnderflow && !rangeOverflow) return "";
  return max === undefined ? `must be ${min} or more` : `must be between ${min} and ${max}`;
}

/** Typed \n, \t and \\ mean what they mean in code. */
const unescaped = (line) => line.replace(/\\([nt\\])/g, (_, mark) => ({ n: "\n", t: "\t", "\\": "\\" })[mark]);

/** What was filled in, in one line: "temperature 0.2, top k 40". */
export function summary(params) {
  const shown = (value) => (Array.isArray(value) ? value.map((one) => JSON.stringify(one)).join(" ") : value);
  return Object.entries(params).map(([name, value]) => `${name.replaceAll("_", " ")} ${shown(value)}`).join(", ");
}
