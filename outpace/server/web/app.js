// The page: puts the parts together.

import { call, key } from "./api.js";
import { createChat, sends } from "./chat.js";
import { byId } from "./dom.js";
import { createLive } from "./live.js";
import { createSettings } from "./settings.js";

const CHAT = "outpace.chat";
const THEME = "outpace.theme";
const narrow = matchMedia("(max-width: 60rem)");

/** localStorage, or nothing where the browser forbids it or it is full. */
const store = {
  get(name) {
    try {
      return JSON.parse(localStorage.getItem(name));
    } catch {
      return null;
    }
  },
  /** null removes; false: it was not saved. */
  set(name, value) {
    try {
      if (value === null) localStorage.removeItem(name);
      else localStorage.setItem(name, JSON.stringify(value));
      return true;
    } catch {
      return false;
    }
  },
};

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").value = theme;
}
setTheme(store.get(THEME) ?? "auto");
byId("theme").addEventListener("change", ({ target }) => {
  setTheme(target.value);
  store.set(THEME, target.value === "auto" ? null : target.value);
});

/** Tell screen readers; `seen` puts it above the message box too. */
function announce(text, seen = false) {
  byId("announce").textContent = text;
  byId("announce").classList.toggle("unseen", !seen);
}

/** Ask for the key, once for all calls that wait for it. True: there is a new one. */
const askKey = (() => {
  const dialog = byId("key-dialog");
  let pending = null;
  return (note) => {
    pending ??= new Promise((resolve) => {
      byId("key-note").textContent = note;
      byId("key").value = "";
      dialog.returnValue = "cancel";
      dialog.onclose = () => {
        pending = null;
        const use = dialog.returnValue === "use";
        if (use) key.set(byId("key").value.trim());
        resolve(use);
      };
      dialog.showModal();
    });
    return pending;
  };
})();
const KEPT = "It is kept until this tab is closed.";
const neededKey = (refused) => askKey(`${refused ? "The server did not accept this key." : "This server asks for a key."} ${KEPT}`);
// Enter in a field presses a form's first button, which is "Cancel" here.
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.isComposing) return;
  event.preventDefault();
  byId("use-key").click();
});

function remember() {
  if (!byId("keep").checked) return;
  const saved = store.set(CHAT, { turns: chat.save(), settings: settings.save(), compare: comparing() });
  if (!saved) announce("The browser has no room to keep this chat.", true);
}

const settings = createSettings(remember);
const chat = createChat({ settings, askKey: neededKey, announce, changed: remember, busyChanged });
const message = byId("message");

function busyChanged(busy) {
  byId("send").textContent = busy ? "Stop" : "Send";
  byId("send").classList.toggle("stop", busy);
  byId("send").dataset.busy = busy;
}
busyChanged(false);
const busy = () => byId("send").dataset.busy === "true";

function submit() {
  if (chat.send(message.value)) message.value = "";
}
byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (busy()) chat.stop();
  else submit();
});
message.addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  if (!busy()) submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && busy() && !byId("key-dialog").open) chat.stop();
});

const comparing = () => byId("compare").getAttribute("aria-pressed") === "true";
function setCompare(on) {
  byId("compare").setAttribute("aria-pressed", on);
  document.body.classList.toggle("comparing", on);
  settings.setCompare(on);
  chat.setCompare(on);
}
byId("compare").addEventListener("click", () => {
  setCompare(!comparing());
  remember();
});
byId("new-chat").addEventListener("click", () => {
  chat.clear();
  message.focus();
});
byId("keep").addEventListener("change", ({ target }) => (target.checked ? remember() : store.set(CHAT, null)));
byId("change-key").addEventListener("click", async () => {
  if (await askKey(`An empty field forgets the key. ${KEPT}`)) loadModels();
});

/** The two panels open and close; a narrow page shows one at a time, over the chat. */
const panels = ["engine", "settings"];
const isOpen = (name) => byId(`toggle-${name}`).getAttribute("aria-expanded") === "true";
function setPanel(name, on) {
  byId(`toggle-${name}`).setAttribute("aria-expanded", on);
  byId(name).hidden = !on;
  document.body.classList.toggle("side", panels.some(isOpen));
}
const setPanels = (on) => panels.forEach((name) => setPanel(name, on));
setPanels(!narrow.matches);
narrow.addEventListener("change", () => setPanels(!narrow.matches));
const wake = createLive(() => isOpen("engine"));
for (const name of panels) {
  byId(`toggle-${name}`).addEventListener("click", () => {
    const on = !isOpen(name);
    if (narrow.matches) setPanels(false);
    setPanel(name, on);
    wake();
  });
}

async function loadModels() {
  try {
    const { data } = await (await call("v1/models", { askKey: neededKey })).json();
    settings.setModels(data.map(({ id }) => id));
    byId("card").textContent = data.map(({ id }) => id).join(", ");
  } catch (error) {
    byId("card").textContent = error.title ?? "The models cannot be read";
  }
}

const kept = store.get(CHAT);
if (kept) {
  byId("keep").checked = true;
  setCompare(kept.compare);
  settings.load(kept.settings);
  chat.load(kept.turns);
}
loadModels();
