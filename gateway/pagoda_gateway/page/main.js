// The page as a whole: the view shown, the model, the key, the theme, and the state of the stack in a word.

import { Chat } from "./chat.js";
import { Settings } from "./settings.js";
import { StackView } from "./stack.js";
import { apiKey, theme } from "./storage.js";
import { askKey } from "./dialogs.js";
import { byId, h, say } from "./dom.js";
import { getJson } from "./api.js";

const settings = new Settings();
const stack = new StackView(byId("stack"), { showState, giveKey });
new Chat(settings, () => byId("model").value, keyChanged);

async function showModels() {
  const place = byId("model");
  const before = place.value;
  try {
    const { data } = await getJson("v1/models");
    place.replaceChildren(...data.map(({ id }) => h("option", { value: id, textContent: id })));
    if (data.some(({ id }) => id === before)) place.value = before;
  } catch (error) {
    place.replaceChildren(h("option", { value: "" }, error.status === 401 ? "needs a key" : "no models"));
  }
}

function showState(good, text) {
  byId("state").querySelector(".dot").dataset.is = good === null ? "" : good ? "good" : "bad";
  byId("state-text").textContent = text;
  if (good && !byId("model").value) showModels();
}

// The key

async function giveKey() {
  if (await askKey()) keyChanged();
}

function keyChanged() {
  byId("key").dataset.on = String(Boolean(apiKey.get()));
  say(apiKey.get() ? "The key is used from now on" : "No key is used");
  showModels();
  stack.now();
}

byId("key").addEventListener("click", giveKey);
byId("key").dataset.on = String(Boolean(apiKey.get()));

// Views

function showView() {
  const isStack = location.hash === "#stack";
  byId("chat").hidden = isStack;
  byId("stack").hidden = !isStack;
  for (const [id, shown] of [["tab-chat", !isStack], ["tab-stack", isStack]]) {
    if (shown) byId(id).setAttribute("aria-current", "page");
    else byId(id).removeAttribute("aria-current");
  }
  document.title = isStack ? "Stack – Pagoda" : "Pagoda";
  stack.watch(isStack);
}

window.addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", () => stack.now());

// Panels

const narrow = matchMedia("(max-width: 860px)");

function panel(id, name, opensWide) {
  const node = byId(id);
  const shown = () => (narrow.matches ? document.body.classList.contains(name) : !document.body.classList.contains(`no-${name}`));
  const tell = () => node.setAttribute("aria-expanded", String(shown()));
  const toggle = () => {
    document.body.classList.toggle(narrow.matches ? name : `no-${name}`);
    tell();
  };
  node.addEventListener("click", toggle);
  document.addEventListener("keydown", ({ key }) => {
    if (key !== "Escape" || !narrow.matches || !shown()) return;
    toggle();
    node.focus();
  });
  narrow.addEventListener("change", tell);
  if (!opensWide) document.body.classList.add(`no-${name}`);
  tell();
}

panel("open-conversations", "shows-conversations", true);
panel("open-parameters", "shows-parameters", matchMedia("(min-width: 1100px)").matches);

// Theme

const THEMES = ["auto", "light", "dark"];

function showTheme() {
  const name = theme.get();
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").ariaLabel = byId("theme").title = `Theme: ${name}`;
}

byId("theme").addEventListener("click", () => {
  theme.set(THEMES[(THEMES.indexOf(theme.get()) + 1) % THEMES.length]);
  showTheme();
  say(`Theme: ${theme.get()}`);
});

showTheme();
showView();
showModels();
