// What people and judges said of a row: what counts, and below it what they said before.
import { json, useAnswer } from "./api.js";
import { count, plural, time } from "./format.js";
import { rowAddress } from "./location.js";
import { Problem } from "./problem.js";
import { store } from "./served.js";
import { pieces } from "./text.js";
import { Lines, html } from "./ui.js";

/** @typedef {import("./wire.js").GivenLabel} Given */
/** @typedef {import("./wire.js").RowLabels} Labels */
/** @typedef {import("./wire.js").RowAnswer["messages"]} Messages */

/** An exported file has none. @param {{id: string, at: string | undefined, messages: Messages}} props */
export const Annotations = (props) => (store ? html`<${OfRow} ...${props} />` : null);

/** @param {{id: string, at: string | undefined, messages: Messages}} props */
function OfRow({ id, at, messages }) {
  const { value, problem } = useAnswer((stop) => /** @type {Promise<Labels>} */ (json("/api/labels/row", { row: id }, stop)), [id]);
  const [counting, earlier] = [value?.annotations ?? [], value?.earlier ?? []];
  return html`<details id="annotations">
    <summary>what people and judges said of this row${value ? ` (${count(counting.length)})` : ""}</summary>
    ${problem && html`<${Problem} problem=${problem} />`}
    ${value && !counting.length && !earlier.length && html`<p class="soft">Nothing was said of this row yet.</p>`}
    ${counting.length + earlier.length > 0 && html`<${Said} counting=${counting} earlier=${earlier} id=${id} at=${at} messages=${messages} />
    ${earlier.length > 0 && html`<p class="soft">Of one author, label and target the newest counts; ${plural(earlier.length, "annotation")} before it ${earlier.length === 1 ? "is" : "are"} kept.</p>`}`}
  </details>`;
}

/** A line for each. @param {{counting: Given[], earlier?: Given[], id: string, at: string | undefined, messages: Messages}} props */
export function Said({ counting, earlier = [], id, at, messages }) {
  const says = (/** @type {Given} */ given) => [given.value, given.comment, given.correction].filter(Boolean).join(" · ");
  const line = (/** @type {Given} */ given, /** @type {boolean} */ counts) => html`<tr class=${counts ? "" : "soft"}>
    <td><${About} given=${given} id=${id} at=${at} messages=${messages} /></td><td>${pieces(given.name)}</td>
    <td>${says(given) ? pieces(says(given)) : "taken back"}${counts ? "" : " (counts no more)"}</td>
    <td>${pieces(given.author)}${given.author_kind === "judge" ? ", a judge" : ""}</td><td>${time(given.created_at)}</td></tr>`;
  return html`<${Lines} label="what people and judges said of this row" heads=${["of", "label", "says", "author", "when (UTC)"]}>
    ${counting.map((given) => line(given, true))}${earlier.map((given) => line(given, false))}
  <//>`;
}

/** What it is about, with a link to the turn or to the first of the tokens. @param {{given: Given, id: string, at: string | undefined, messages: Messages}} props */
function About({ given, id, at, messages }) {
  const { turn, token_start: start, token_end: end, pair_id: pair } = given;
  const turns = messages.flatMap((message, number) => (message.role === "assistant" ? [number] : []));
  const parts = [
    turn !== null && html`<a href=${rowAddress(id, { at, m: turns[turn] })}>turn ${turn}</a>`,
    start !== null && end !== null && html`<a href=${rowAddress(id, { at, t: start })}>tokens ${start} to ${end - 1}</a>`,
    pair !== null && html`pair ${pieces(pair)}`,
  ].filter(Boolean);
  return parts.length ? html`${parts.map((part, i) => html`${i ? ", " : ""}${part}`)}` : "row";
}
