// A small part of Markdown, as DOM nodes: code, headings, lists, quotes, rules, bold, italics. Links stay text.

import { copyButton, el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const SPAN = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?)\*\*(?!\*)|__(?=\S)(.+?)__|\*(?=\S)([^*]+)\*|(?<!\w)_(?=\S)([^_]+)_(?!\w)/;
const DEEPEST = 8;

/** Show `text` in `target`. Blocks that did not change since the last call keep their nodes: streams stay cheap. */
export function render(target, text) {
  const found = blocks(text.split("\n"));
  let same = 0;
  const old = target.shown ?? [];
  while (same < found.length && same < old.length && found[same].source === old[same]) same++;
  while (target.childNodes.length > same) target.lastChild.remove();
  target.append(...found.slice(same).map((block) => block.build()));
  target.shown = found.map((block) => block.source);
}

/** The blocks of these lines, each with its source and a function that builds its node. */
function blocks(lines, depth = 0) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const start = at;
    const read = reader(lines, at, depth);
    at = read.next;
    if (read.build) found.push({ source: lines.slice(start, at).join("\n"), build: read.build });
  }
  return found;
}

/** The block that starts at this line: where the next one starts and how to build it. */
function reader(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return { next: at + 1 };
  const fence = FENCE.exec(line);
  if (fence) return code(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) {
    const level = Math.min(heading[1].length + 2, 6); // the page has h1 and h2
    return { next: at + 1, build: () => el(`h${level}`, {}, ...inline(heading[2])) };
  }
  if (RULE.test(line)) return { next: at + 1, build: () => el("hr") };
  if (depth < DEEPEST && ITEM.test(line)) return list(lines, at, depth);
  if (depth < DEEPEST && QUOTE.test(line)) {
    const next = until(lines, at, (other) => !QUOTE.test(other));
    const inner = lines.slice(at, next).map((other) => QUOTE.exec(other)[1]);
    return { next, build: () => el("blockquote", {}, ...blocks(inner, depth + 1).map((block) => block.build())) };
  }
  const next = until(lines, at + 1, (other) => !other.trim() || startsBlock(other));
  return { next, build: () => el("p", {}, ...inline(lines.slice(at, next).join("\n"))) };
}

const startsBlock = (line) => [FENCE, HEADING, ITEM, QUOTE, RULE].some((kind) => kind.test(line));

function until(lines, at, ends) {
  while (at < lines.length && !ends(lines[at])) at++;
  return at;
}

function code(lines, at, fence) {
  const close = until(lines, at + 1, (line) => line.trim().startsWith(fence[1]) && !line.trim().slice(fence[1].length).trim());
  const text = lines.slice(at + 1, close).join("\n");
  const build = () => {
    const language = fence[2] || "code";
    const top = el("div", { className: "code-top" }, el("span", { textContent: language }), copyButton(() => text, `Copy ${language}`));
    const body = el("pre", { tabIndex: 0, role: "region", "aria-label": language }, el("code", { textContent: text }));
    return el("div", { className: "code" }, top, body);
  };
  return { next: Math.min(close + 1, lines.length), build };
}

/** A list: items at this indentation; lines further in belong to the item above. */
function list(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    if (!item || item[1].length > indent.length || /\d/.test(item[2]) !== ordered || RULE.test(lines[next])) break;
    const inner = [item[3]];
    next++;
    for (; next < lines.length && belongs(lines, next, indent.length); next++) {
      inner.push(lines[next].slice(Math.min(indent.length + 2, margin(lines[next]))));
    }
    items.push(inner);
    while (next < lines.length && !lines[next].trim() && ITEM.test(lines[next + 1] ?? "")) next++;
  }
  const build = () => {
    const made = el(ordered ? "ol" : "ul");
    if (ordered && parseInt(mark, 10) !== 1) made.start = parseInt(mark, 10);
    for (const inner of items) made.append(el("li", {}, ...tight(blocks(inner, depth + 1))));
    return made;
  };
  return { next, build };
}

const margin = (line) => line.length - line.trimStart().length;

/** Whether a line goes on with an item whose mark stands at column `indent`. */
function belongs(lines, at, indent) {
  const line = lines[at];
  if (line.trim()) return margin(line) > indent;
  const after = lines[at + 1] ?? "";
  return after.trim() !== "" && margin(after) > indent;
}

/** The nodes of an item; a first paragraph loses its <p>, so that short items stay close. */
function tight(inner) {
  const nodes = inner.map((block) => block.build());
  if (nodes[0]?.tagName === "P") nodes.splice(0, 1, ...nodes[0].childNodes);
  return nodes;
}

/** Text with code, bold and italics as nodes. */
function inline(text, depth = 0) {
  const nodes = [];
  while (text) {
    const found = depth < DEEPEST ? SPAN.exec(text) : null;
    if (!found) break;
    nodes.push(text.slice(0, found.index));
    const [whole, , code, bold1, bold2, slanted1, slanted2] = found;
    if (code !== undefined) nodes.push(el("code", { textContent: code }));
    else if (bold1 ?? bold2) nodes.push(el("strong", {}, ...inline(bold1 ?? bold2, depth + 1)));
    else nodes.push(el("em", {}, ...inline(slanted1 ?? slanted2, depth + 1)));
    text = text.slice(found.index + whole.length);
  }
  return [...nodes, text];
}
