// What became of a row: each stage that saw it, and what it did with it. Asked when it is opened.
import { json, useAnswer } from "./api.js";
import { count } from "./format.js";
import { address } from "./location.js";
import { instead } from "./problem.js";
import { pieces } from "./text.js";
import { Lines, html, useState } from "./ui.js";

/** @typedef {import("./wire.js").SeenBy} SeenBy */

/** @type {Record<string, {mark: string, tone: string}>} */
const MARKS = { made: { mark: "+", tone: "" }, kept: { mark: "✓", tone: "good" }, trained: { mark: "✓", tone: "good" }, chosen: { mark: "✓", tone: "good" }, rejected: { mark: "✗", tone: "bad" }, dropped: { mark: "✗", tone: "bad" }, "left out": { mark: "✗", tone: "bad" }, read: { mark: "·", tone: "soft" } };

/** @param {{id: string, at: string | undefined}} props */
export function Fate({ id, at }) {
  const [open, setOpen] = useState(false);
  return html`<details id="fate" onToggle=${(/** @type {Event} */ event) => setOpen(/** @type {HTMLDetailsElement} */ (event.target).open)}>
    <summary>what became of this row</summary>${open && html`<${Seen} id=${id} at=${at} />`}
  </details>`;
}

/** @param {{id: string, at: string | undefined}} props */
function Seen({ id, at }) {
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").Fate>} */ (json(`/api/rows/${encodeURIComponent(id)}/fate`, { at }, stop)), [id, at]);
  if (problem || !value) return instead(problem, "looking through the stages");
  if (!value.seen.length) return html`<p class="soft">No artifact that is still there saw this row.</p>`;
  return html`<${Lines} label="what became of this row" heads=${["stage", "uses", "what it did", "why, and where"]}>
      ${value.seen.map((event) => html`<tr>
        <td><a href=${`/run/${encodeURIComponent(event.run_id)}`}>${pieces(event.artifact)}</a></td><td>${pieces(event.uses)}</td>
        <td class=${MARKS[event.what].tone}>${MARKS[event.what].mark} ${event.what}</td><td><${Where} event=${event} at=${at} /></td>
      </tr>`)}
    <//>
    ${value.unread > 0 && html`<p class="soft">${count(value.unread)} older artifacts were not looked through</p>`}`;
}

/** @param {{event: SeenBy, at: string | undefined}} props */
function Where({ event, at }) {
  const { artifact, what, why, pair_id: pair, steps } = event;
  if (pair !== null) return html`<a href=${address("/pair", { artifact, pair_id: pair })}>${pieces(pair)}</a>`;
  const taken = steps.map((step, i) => html`${i ? ", " : "step "}<a href=${address("/training", { artifact, step, at })}>${step}</a>`);
  if (what === "dropped") return html`<a href=${address("/buffer", { among: artifact, rule: why, at })}>${pieces(why)}</a>`;
  if (what === "kept") return html`<a href=${address("/buffer", { among: artifact, at })}>what it kept</a>`;
  return html`${pieces(why)}${why && steps.length ? ": " : ""}${taken}`;
}
