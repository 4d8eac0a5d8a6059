// Whether one policy is better than another: a sentence first, then what it learned beyond a lower temperature, then tasks.
import { decimal, plural } from "./format.js";
import { address, route } from "./location.js";
import { pieces } from "./text.js";
import { html } from "./ui.js";

/** @typedef {import("./wire.js").PairedDifference} Difference */

/** Says that two evaluations are of different sets of tasks. @param {{unshared?: number}} props `unshared` tasks are of one alone, if the others are paired */
export function OtherTasks({ unshared }) {
  const apart = unshared ? `${plural(unshared, "task")} of one alone ${unshared === 1 ? "is" : "are"}` : "their attempts are";
  return html`<p class="bad">The two evaluations are of different sets of tasks, so ${apart} not paired, and their success is not of the same thing.</p>`;
}

/** @param {{difference: Difference}} props */
export function Headline({ difference }) {
  const { sentence, shown, mean, learned, than, arm, lost, tasks_lost: all, unshared } = difference;
  const whole = address("/evaluation", { than: than.artifacts[0], arm: arm.artifacts[0] });
  return html`<p class=${`headline ${shown ? (mean > 0 ? "good" : "bad") : ""}`}>${pieces(sentence)}</p>
    ${unshared > 0 && html`<${OtherTasks} unshared=${unshared} />`}
    ${learned && html`<p class="learned"><span class="soft">Beyond a lower temperature (the control for sharpening):</span> ${pieces(learned)}</p>`}
    ${route.value.path === "/" && html`<p>${all > 0 && html`<span class="soft">Lost${all > lost.length ? `, ${lost.length} of ${plural(all, "task")}` : ""}:</span> ${lost.map((task, i) => html`${i ? " · " : ""}<a href=${address("/task", { env: task.env, task_id: task.task_id })}>${pieces(task.prompt.slice(0, 80) || task.task_id)}</a>`)} · `}<a href=${whole}>the whole comparison</a></p>`}`;
}

/** A difference on a scale from -1 to 1. @param {{difference: Difference}} props */
export function Scale({ difference }) {
  const { low, high, mean } = difference;
  const at = (/** @type {number} */ value) => `${(50 + 50 * value).toFixed(2)}%`;
  return html`<svg class="interval" width="100%" height="16" role="img" aria-label=${`difference ${decimal(100 * mean, 1)} points, interval ${decimal(100 * low, 1)} to ${decimal(100 * high, 1)}`}>
    <line class="axis" x1="0" x2="100%" y1="8" y2="8" /><line class="axis" x1="50%" x2="50%" y1="0" y2="16" />
    <line class="range" x1=${at(low)} x2=${at(high)} y1="8" y2="8" /><circle cx=${at(mean)} cy="8" r="4" />
  </svg>
  <p class="scale-words" aria-hidden="true"><span>100 points worse</span><span>the same</span><span>100 points better</span></p>`;
}
