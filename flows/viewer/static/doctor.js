// The doctor: what is wrong with a run, each finding with its evidence, threshold, remedy, and the rows that show it.
import { json, useAnswer } from "./api.js";
import { oneOf } from "./filter.js";
import { plural } from "./format.js";
import { pulse, usePulse, useUnfinished } from "./live.js";
import { address, change, route, rowAddress, version } from "./location.js";
import { Empty, Problem } from "./problem.js";
import { pieces, visible } from "./text.js";
import { html, useEffect, useState } from "./ui.js";

/** @typedef {import("./wire.js").Symptom} Symptom */

const NAMED = 12;

export function DoctorPage() {
  const { run, at } = route.value.params;
  usePulse(() => {});
  useEffect(() => void (version.value = null), []);
  const now = pulse.value;
  const runs = now ? Object.keys(now.runs) : [];
  const shown = run ?? runs[0];
  if (!now && !run) return html`<h1>Doctor</h1><p class="soft waiting">reading the store …</p>`;
  if (!shown) return html`<h1>Doctor</h1><${Empty} says="No run yet." command="agentrl run quickstart" />`;
  return html`<h1>Doctor</h1>
    <p><label>run <select value=${shown} onChange=${(/** @type {Event} */ event) => change({ run: /** @type {HTMLSelectElement} */ (event.target).value })}>
      ${[...new Set([shown, ...runs])].map((name) => html`<option value=${name} selected=${name === shown}>${visible(name)}</option>`)}
    </select></label> <a href=${`/run/${encodeURIComponent(shown)}`}>its stages</a></p>
    <${Findings} key=${shown} run=${shown} at=${at} />`;
}

/** @param {{run: string, at: string | undefined}} props */
function Findings({ run, at }) {
  const [asked, ask] = useState(0);
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").Diagnosis>} */ (json("/api/doctor", { run }, stop)), [run, asked]);
  useUnfinished(value, value?.working, () => ask((number) => number + 1));
  if (problem) return html`<${Problem} problem=${problem} />`;
  if (!value || value.working) return html`<p class="soft waiting" role="status">the doctor looks at rollouts, metrics and evaluations …</p>`;
  if (value.problem) return html`<p class="problem">${pieces(value.problem)}</p>`;
  const { findings, stages } = value;
  if (!stages.length) return html`<${Empty} says="No stage of this run sampled or trained." command=${`agentrl run quickstart`} />`;
  return html`<p role="status" class=${findings.length ? "bad" : "good"}>${findings.length ? `✗ ${plural(findings.length, "finding")}` : "✓ nothing found"} in ${plural(stages.length, "stage")}: ${pieces(stages.join(", "))}</p>
    ${findings.map((finding, i) => html`<${Finding} key=${i} finding=${finding} at=${at} />`)}`;
}

/** @param {{finding: Symptom, at: string | undefined}} props */
function Finding({ finding, at }) {
  const { stage, artifact, name, evidence, threshold, remedy, rows, tokens, step } = finding;
  return html`<section class="finding">
    <h2>${pieces(stage)}: ${pieces(name)}</h2>
    <dl>
      <div><dt>evidence</dt><dd>${pieces(evidence)}</dd></div>
      <div><dt>threshold</dt><dd>${pieces(threshold)}</dd></div>
      <div><dt>remedy</dt><dd>${pieces(remedy)}</dd></div>
      ${step !== null && artifact !== null && html`<div><dt>step</dt><dd><a href=${address("/training", { artifact, step, at })}>step ${step} of ${pieces(artifact)}</a></dd></div>`}
      ${rows.length > 0 && html`<div><dt>rows</dt><dd>${rows.slice(0, NAMED).map((id, i) => html`<a href=${rowAddress(id, { at, ...(tokens.length ? { t: tokens[i], lens: "mask" } : {}) })}>${pieces(id)}${tokens.length ? `, token ${tokens[i]}` : ""}</a> `)}
        <a href=${address("/buffer", { filter: oneOf(rows), at })}>${rows.length > NAMED ? `all ${rows.length}` : "them"} in the buffer</a></dd></div>`}
    </dl>
  </section>`;
}
