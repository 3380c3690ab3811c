// Renders /openapi.json as a list of operations. Text only ever enters the page through textContent.
"use strict";

function element(tag, text, className) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (className) node.className = className;
  return node;
}

function resolve(schema, api) {
  const name = schema && schema.$ref && schema.$ref.split("/").pop();
  return name ? api.components.schemas[name] : schema;
}

function curl(method, path, schema) {
  const lines = [`curl ${location.origin}${path}`];
  if (method !== "get") lines[0] += ` -X ${method.toUpperCase()}`;
  if (schema) lines.push("  -H 'content-type: application/json'", "  -d '{...}'");
  return lines.join(" \\\n");
}

function fields(schema, api) {
  const list = element("ul");
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const item = element("li");
    const types = (field.anyOf || [field]).map((f) => f.type || (f.$ref || "").split("/").pop()).filter(Boolean);
    item.append(element("code", name), ` ${types.join(" | ")}`);
    if ((schema.required || []).includes(name)) item.append(", required");
    if (field.description) item.append(`: ${field.description}`);
    list.append(item);
  }
  return list;
}

function operation(method, path, spec, api) {
  const details = element("details");
  const summary = element("summary");
  summary.append(element("span", method.toUpperCase(), "method"), element("code", path), ` ${spec.summary || ""}`);
  details.append(summary);
  if (spec.description) details.append(element("p", spec.description));
  const body = spec.requestBody && spec.requestBody.content["application/json"];
  const schema = body && resolve(body.schema, api);
  details.append(element("pre", curl(method, path, schema)));
  if (schema) details.append(fields(schema, api));
  return details;
}

async function main() {
  const api = await (await fetch("/openapi.json")).json();
  document.getElementById("title").textContent = `${api.info.title} ${api.info.version}`;
  const groups = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, spec] of Object.entries(methods)) {
      const tag = (spec.tags || ["other"])[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push(operation(method, path, spec, api));
    }
  }
  const place = document.getElementById("operations");
  place.textContent = "";
  for (const [tag, operations] of groups) place.append(element("h2", tag), ...operations);
}

main();
