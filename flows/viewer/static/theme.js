// Light, dark, or what the system says.
import { signal } from "./ui.js";

/** @type {Record<string, string>} */
const NEXT = { system: "light", light: "dark", dark: "system" };

function stored() {
  const stored = localStorage.getItem("theme") ?? "system";
  return stored in NEXT ? stored : "system";
}

export const theme = signal(stored());

export function turnTheme() {
  theme.value = NEXT[theme.value];
  localStorage.setItem("theme", theme.value);
}

theme.subscribe((value) => (document.documentElement.dataset.theme = value));
