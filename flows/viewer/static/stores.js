// The other stores that this viewer shows, each below a path of its own.
import { json, useAnswer } from "./api.js";
import { beside } from "./served.js";
import { html } from "./ui.js";

export function Stores() {
  const { value } = useAnswer(async (stop) => (beside ? /** @type {import("./wire.js").StoresShown} */ (await json("/api/stores", {}, stop)) : null), []);
  if (!value || value.stores.length < 2) return null;
  return html`<label class="stores"><span class="unseen">store</span><select onChange=${(/** @type {Event} */ event) => beside?.(/** @type {HTMLSelectElement} */ (event.target).value)}>
    ${value.stores.map((name) => html`<option value=${name} selected=${name === value.name}>${name}</option>`)}</select></label>`;
}
