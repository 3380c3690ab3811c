// Loaded before the first paint, so that the other theme does not flash.
"use strict";

{
  const root = document.documentElement;
  let saved = null;
  try {
    saved = localStorage.getItem("pagoda.theme");
  } catch {
    // Without storage, the system's theme applies.
  }
  if (saved === "light" || saved === "dark") root.dataset.theme = saved;
}
