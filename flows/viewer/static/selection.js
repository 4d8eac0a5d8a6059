// Ids of the rows that `x` chose; they stay while pages change.
import { signal } from "./ui.js";

export const selected = signal(/** @type {Set<string>} */ (new Set()));

/** @param {string} id */
export function select(id) {
  const next = new Set(selected.value);
  if (!next.delete(id)) next.add(id);
  selected.value = next;
}
