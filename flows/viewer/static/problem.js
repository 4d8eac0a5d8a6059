// Answers that say no, and pages that have nothing to show yet.
import { Refused } from "./api.js";
import { html } from "./ui.js";

/** @param {{problem: Error}} props */
export function Problem({ problem }) {
  const { field, allowed, next } = problem instanceof Refused ? problem.refusal : { field: null, allowed: [], next: null };
  return html`<div class="problem" role="alert">
    <p>${field ? html`<b>${field}</b>: ` : ""}${problem.message}</p>
    ${allowed?.length > 0 && html`<p class="soft">allowed: ${allowed.join(", ")}</p>`}
    ${next && html`<p class="soft">next: <code>${next}</code></p>`}
  </div>`;
}

/** @param {{says: string, command: string}} props */
export function Empty({ says, command }) {
  return html`<div class="empty-state"><p>${says}</p><p><code>${command}</code></p></div>`;
}
