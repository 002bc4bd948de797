// Elements are built with these, never from text as HTML.

export const byId = (id) => document.getElementById(id);

/** A new element. `props` are properties; those with a dash, and role, are attributes. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.includes("-") || name === "role") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** A button that says what it does. */
export const button = (text, onclick, props = {}) => el("button", { type: "button", textContent: text, onclick, ...props });

/** Put text in the clipboard; pages on plain http have no clipboard API, so there is a second way. */
async function copy(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = el("textarea", { value: text, className: "unseen" });
  const focused = document.activeElement;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** A button that copies what `read` gives and says so for a moment. */
export function copyButton(read, name) {
  const made = button("Copy", async () => {
    try {
      await copy(read());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not copied";
    }
    setTimeout(() => (made.textContent = "Copy"), 1500);
  }, { className: "quiet" });
  if (name) made.setAttribute("aria-label", name);
  return made;
}

/** A number for people: 1 234 (never broken over two lines), 12.3, 0.45. */
export function show(value) {
  if (!Number.isFinite(value)) return "–";
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: Number.isInteger(value) ? 0 : digits }).replaceAll(",", "\u202f");
}
