// Elements are built, never parsed from HTML: text from a model or server only ever becomes a text node.

/** An element of this tag; `props` are properties, or attributes if a name has a dash or is `role` or `for`. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role" || name === "for" || name === "scope") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

export function button(label, onclick, className = "quiet", props = {}) {
  return h("button", { type: "button", class: className, onclick, ...props }, label);
}

/** Announce to screen readers; the same text twice is announced twice. */
export function say(text) {
  const place = byId("said");
  place.textContent = "";
  requestAnimationFrame(() => (place.textContent = text));
}

/** Whether the text was copied: pages from other hosts over plain HTTP may not use the clipboard. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

/** A button that copies what `text` returns, and briefly says so. */
export function copyButton(text, label = "Copy", className = "quiet") {
  const node = button(label, async () => {
    const done = await copy(text());
    node.textContent = done ? "Copied" : "The browser does not let this page copy";
    say(node.textContent);
    setTimeout(() => (node.textContent = label), 1600);
  }, className);
  return node;
}
