// The parameters: a form whose values are kept as typed.

import { byId, h } from "./dom.js";
import { NUMBERS, SettingsError, fieldsOf } from "./request.js";
import { settings as kept } from "./storage.js";

const EXAMPLES = {
  schema: {
    type: "object",
    properties: { city: { type: "string" }, country: { type: "string" } },
    required: ["city", "country"],
    additionalProperties: false,
  },
  tools: [{
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a place",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  }],
};

export class Settings {
  constructor() {
    this.form = byId("settings");
    byId("numbers").replaceChildren(...NUMBERS.map(numberField));
    this.show(kept.get());
    this.form.addEventListener("input", () => this.changed());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    byId("reset").addEventListener("click", () => {
      this.show({});
      this.changed();
    });
  }

  /** As typed, by name. */
  get values() {
    const fields = [...this.form.elements].filter((field) => field.name);
    return Object.fromEntries(fields.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]));
  }

  show(values) {
    for (const field of this.form.elements) {
      if (!field.name) continue;
      if (field.type === "checkbox") field.checked = Boolean(values[field.name]);
      else field.value = values[field.name] ?? (field.name === "format" ? "text" : example(field.name));
    }
    this.arrange();
  }

  changed() {
    kept.set(this.values);
    this.arrange();
    this.judge();
  }

  arrange() {
    byId("schema-field").hidden = this.form.elements.format.value !== "json_schema";
    byId("tools-field").hidden = !this.form.elements.use_tools.checked;
  }

  /** Mark the field that does not parse, if any. The server decides which values are allowed. */
  judge() {
    for (const place of this.form.querySelectorAll(".problem")) place.remove();
    for (const field of this.form.querySelectorAll("[aria-invalid]")) {
      field.removeAttribute("aria-invalid");
      field.removeAttribute("aria-describedby");
    }
    try {
      fieldsOf(this.values);
    } catch (error) {
      if (!(error instanceof SettingsError)) throw error;
      this.point(error);
    }
  }

  point({ field: name, message }) {
    const field = this.form.elements[name];
    field.setAttribute("aria-invalid", "true");
    const id = `${name}-problem`;
    field.setAttribute("aria-describedby", id);
    field.closest(".field").append(h("span", { class: "problem", id }, message));
  }

  focus(name) {
    this.form.elements[name]?.focus();
  }
}

const example = (name) => (EXAMPLES[name] ? JSON.stringify(EXAMPLES[name], null, 2) : "");

function numberField([name, label]) {
  const input = h("input", { id: name, name, inputMode: "decimal", placeholder: "default", spellcheck: false });
  return h("div", { class: "field" }, h("label", { for: name }, label), input);
}
