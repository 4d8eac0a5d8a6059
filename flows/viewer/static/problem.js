// Answers that say no, and pages that have nothing to show yet.
import { Refused, useAnswer } from "./api.js";
import { word } from "./format.js";
import { store } from "./served.js";
import { html } from "./ui.js";

/** @param {{problem: Error}} props */
export function Problem({ problem }) {
  const { field, allowed, next } = problem instanceof Refused ? problem.refusal : { field: null, allowed: [], next: null };
  return html`<div class="problem" role="alert">
    <p>${field ? html`<b>${field}</b>: ` : ""}${problem.message}</p>
    ${allowed?.length > 0 && html`<p class="soft">allowed: ${allowed.join(", ")}</p>`}
    ${next && html`<p class="soft">next: ${/^agentrl run \S+$/.test(next) ? html`<${OfStore} command=${next} />` : html`<code>${next}</code>`}</p>`}
  </div>`;
}

/** What stands in the place of an answer that is not there, under a heading. @param {Error | null} problem @param {string} doing what the page waits for @param {any} [heading] */
export const instead = (problem, doing, heading) => html`${heading && html`<h1>${heading}</h1>`}${problem ? html`<${Problem} problem=${problem} />` : html`<p class="soft waiting">${doing} …</p>`}`;

/** A page that is empty, and the command that fills it. @param {{says: string, command: string}} props */
export function Empty({ says, command }) {
  return html`<div class="empty-state"><p>${says}</p><p><${OfStore} command=${command} /></p></div>`;
}

/** A command for the store that is shown. @param {{command: string}} props */
export function OfStore({ command }) {
  const { value } = useAnswer(async () => (store && !command.includes(" --store ") ? store() : null), [command]);
  return (value !== null || !store) && html`<code>${value === null ? command : `${command} --store ${word(value)}`}</code>`;
}
