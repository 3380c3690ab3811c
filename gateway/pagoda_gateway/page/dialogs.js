// Modal dialogs.

import { apiKey } from "./storage.js";
import { byId, copy, h, say } from "./dom.js";
import { LANGUAGES } from "./request.js";
import { urlOf } from "./api.js";

/** The answer's value; "" if the dialog was dismissed. */
function answered(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}

/** Whether the key changed. */
export async function askKey() {
  const input = byId("key-input");
  input.value = apiKey.get();
  const before = apiKey.get();
  const byEnter = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // or Enter would press the form's first button
    byId("key-dialog").close("keep");
  };
  input.addEventListener("keydown", byEnter);
  const answer = await answered(byId("key-dialog"));
  input.removeEventListener("keydown", byEnter);
  if (answer === "keep") apiKey.set(input.value.trim());
  if (answer === "forget") apiKey.set("");
  input.value = "";
  return apiKey.get() !== before;
}

export async function confirmed(question, verb) {
  byId("confirm-title").textContent = question;
  byId("confirm-yes").textContent = verb;
  return (await answered(byId("confirm-dialog"))) === "yes";
}

/** Show the request as code; the key appears as a variable, never as its value. */
export function showCode(body) {
  const dialog = byId("code-dialog");
  const text = byId("code-text");
  const buttons = Object.entries(LANGUAGES).map(([name, write]) => h("button", {
    type: "button",
    onclick: () => {
      for (const each of buttons) each.ariaPressed = String(each.textContent === name);
      text.textContent = write(urlOf("v1/chat/completions"), body, Boolean(apiKey.get()));
    },
  }, name));
  byId("code-languages").replaceChildren(...buttons);
  buttons[0].click();
  dialog.showModal();
}

byId("code-close").addEventListener("click", () => byId("code-dialog").close());
byId("code-copy").addEventListener("click", async () => {
  const text = byId("code-text");
  const done = await copy(text.textContent);
  if (!done) getSelection().selectAllChildren(text);
  say(done ? "Copied" : "Selected, as the browser does not let this page copy");
  byId("code-copy").textContent = done ? "Copied" : "Selected";
  setTimeout(() => (byId("code-copy").textContent = "Copy"), 1600);
});
