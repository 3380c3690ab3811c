// Loaded before anything is painted, so that nobody sees the other theme first.
"use strict";

{
  const root = document.documentElement;
  let saved = null;
  try {
    saved = localStorage.getItem("pagoda.theme");
  } catch {
    // Without storage the system's own theme holds.
  }
  if (saved === "light" || saved === "dark") root.dataset.theme = saved;
}
