// The first page: did the policy get better, what is up to date, what ran.
import { json, useAnswer } from "./api.js";
import { Headline } from "./better.js";
import { literal } from "./filter.js";
import { count, decoding, percent, plural, seconds, time } from "./format.js";
import { Graph, StageTable } from "./graph.js";
import { useKeys } from "./keys.js";
import { useChanges, useUnfinished } from "./live.js";
import { address, change, go, route, version } from "./location.js";
import { Empty, OfStore, Problem, instead } from "./problem.js";
import { STOPPED, farNow } from "./progress.js";
import { pieces } from "./text.js";
import { Lines, html, useEffect, useState } from "./ui.js";
import { WhatIf, useWhatIf } from "./whatif.js";

/** @typedef {import("./wire.js").Overview} Answer */
/** @typedef {import("./wire.js").Evaluations} Evaluations */

const POLICIES = 8; // stages whose newest evaluations are shown

export function OverviewPage() {
  const { pipeline, stage } = route.value.params;
  const [asked, askAgain] = useState(0);
  const changes = useChanges((now) => [now.version, now.runs, now.stages]);
  const { value, problem } = useAnswer(
    (stop) => /** @type {Promise<Answer>} */ (json("/api/overview", { pipeline }, stop)),
    [pipeline, asked, changes],
  );
  const evaluated = useAnswer((stop) => /** @type {Promise<Evaluations>} */ (json("/api/evaluations", {}, stop)), [changes]);
  useUnfinished(value, value?.planning, () => askAgain(asked + 1));
  useEffect(() => void (version.value = null), []);
  const whatIf = useWhatIf(value?.pipeline);
  useKeys({ w: { does: "what would run with another setting", run: () => document.getElementById("what-if")?.focus() }, b: { does: "the buffer", run: () => go("/buffer") } });
  if (!value) return instead(problem, "reading the store");
  const { runs, pipelines, rows } = value;
  const awaited = whatIf.given.length > 0 && !whatIf.problem && (!whatIf.plan || whatIf.plan.planning);
  const stages = whatIf.plan?.stages.length && !awaited ? whatIf.plan.stages : awaited || value.planning ? value.stages.map(planning) : value.stages;
  const working = runs.find((run) => run.state === "running" && run.pipeline === value.pipeline)?.run_id ?? "";
  const command = "agentrl run quickstart";
  if (value.version === null && !runs.length && !stages.length) return html`<h1>${value.store}</h1><${Empty} says="This store is empty: nothing was run in it, and it has no rows. To fill it:" command=${command} />`;
  return html`<h1>${value.store}</h1>
    <p class="soft">${value.version === null ? "no rows were ever appended" : html`<a href="/buffer">${plural(rows, "row")}</a>, version ${value.version}`}</p>
    ${problem && html`<${Problem} problem=${problem} />`}
    <section aria-labelledby="better">
      <h2 id="better">Better?</h2>
      <${Better} ...${evaluated} changes=${changes} />
    </section>
    <section aria-labelledby="stages">
      <h2 id="stages">Stages ${pipelines.length > 1 ? html`<${Pipelines} all=${pipelines} chosen=${value.pipeline} />` : html`<span class="soft">of ${value.pipeline ?? "no pipeline yet"}</span>`}</h2>
      ${value.planning && html`<p class="soft" role="status">as the newest run recorded them; the plan is being made …</p>`}
      ${value.problem && html`<p class="problem">${value.problem}</p>`}
      ${stages.length
        ? html`<${Graph} stages=${stages} chosen=${stage} choose=${(/** @type {string | null} */ id) => change({ stage: id })} far=${(/** @type {string} */ id) => farNow(working, id)} />
            <${WhatIf} pipeline=${value.pipeline} stages=${value.stages} chosen=${stage} whatIf=${whatIf} />
            <details open=${Boolean(stage) || whatIf.given.length > 0}><summary>as a table, with reasons</summary><${StageTable} stages=${stages} chosen=${stage} pipeline=${value.pipeline} /></details>`
        : html`<${Empty} says="No pipeline ran in this store yet." command=${command} />`}
    </section>
    <section aria-labelledby="runs">
      <h2 id="runs">Runs</h2>
      ${runs.length < value.n_runs && html`<p class="soft">the newest ${count(runs.length)} of ${count(value.n_runs)}; <code>agentrl runs --limit ${value.n_runs}</code> lists all</p>`}
      ${runs.length ? html`<${Runs} runs=${runs} />` : html`<${Empty} says="No run yet." command=${command} />`}
    </section>`;
}

/** Whether the newest policy is better than the one before it, in a sentence. @param {{changes: number}} props */
function Newest({ changes }) {
  const { value } = useAnswer((stop) => /** @type {Promise<import("./wire.js").Better>} */ (json("/api/better", {}, stop)), [changes]);
  if (!value) return html`<p class="soft headline waiting">comparing the newest policy with the one before it …</p>`;
  return value.difference ? html`<${Headline} difference=${value.difference} />` : html`<p class="soft headline">No two policies were evaluated on the same tasks yet, so nothing says whether training helped.</p>`;
}

/** A stage while its plan is being made; what is at work or stopped stays so. @param {Answer["stages"][number]} stage */
const planning = (stage) => (["running", ...STOPPED].includes(stage.status) ? stage : { ...stage, status: /** @type {any} */ ("planning"), reason: "", inputs: stage.inputs.map((input) => ({ ...input, reason: null })) });

/** @param {{all: string[], chosen: string | null}} props */
function Pipelines({ all, chosen }) {
  return html`<select aria-label="pipeline" value=${chosen} onChange=${(/** @type {Event} */ event) => change({ pipeline: /** @type {HTMLSelectElement} */ (event.target).value, stage: null, set: null })}>
    ${all.map((name) => html`<option value=${name} selected=${name === chosen}>${name}</option>`)}
  </select>`;
}

/** Success in the newest evaluations with its interval: one line per policy, stage and split, all on one scale from 0 to 1. @param {{value: Evaluations | null, problem: Error | null, changes: number}} props */
function Better({ value, problem, changes }) {
  if (problem || !value) return instead(problem, "reading the evaluations");
  const newest = value.evaluations.filter(({ stage }, i, all) => all.findIndex((other) => other.stage === stage) === i).slice(0, POLICIES);
  if (!newest.length) return html`<${Empty} says="No policy was evaluated yet." command="agentrl run quickstart" />`;
  const results = newest.flatMap(({ policy, stage, split, results }) => results.filter(({ level, env }) => level < 0 && !env).map((result) => ({ ...result, policy, stage, split })));
  return html`<${Newest} changes=${changes} /><${Lines} kind="better" label="success of policies" heads=${["policy", "stage", "split", "sampling", "#success", "#95 % interval", "#n", html`<span class="ends"><span>0</span><span>0.5</span><span>1</span></span>`]}>
      ${results.map(
        (result) => html`<tr>
          <td>${result.policy}</td>
          <td><a href=${address("/buffer", { filter: `stage = ${literal(result.stage)}` })}>${result.stage}</a></td>
          <td>${result.split}</td>
          <td class="wraps">${decoding(result)}</td>
          <td class="number">${percent(result.success)}</td>
          <td class="number">${percent(result.low)} to ${percent(result.high)}</td>
          <td class="number">${count(result.n)}</td>
          <td class="scale"><${Interval} ...${result} /></td>
        </tr>`,
      )}
    <//>
  <p class="soft">● sampled at temperature 1, ○ greedy, ◆ at the temperature that did best on dev tasks: the control for sharpening, which training has to beat; the line is Wilson's 95 % interval</p>`;
}

/** @param {{success: number, low: number, high: number, greedy: boolean, control: number | null}} props */
function Interval({ success, low, high, greedy, control }) {
  const at = (/** @type {number} */ value) => `${(100 * value).toFixed(2)}%`;
  return html`<svg class="interval" width="100%" height="16" aria-hidden="true">
    <line class="axis" x1="0" x2="100%" y1="8" y2="8" />
    <line class="range" x1=${at(low)} x2=${at(high)} y1="8" y2="8" />
    ${control === null
      ? html`<circle class=${greedy ? "hollow" : "full"} cx=${at(success)} cy="8" r="4" />`
      : html`<svg x=${at(success)} overflow="visible"><path d="M0 3 L5 8 L0 13 L-5 8 Z" /></svg>`}
  </svg>`;
}

/** @param {{runs: Answer["runs"]}} props */
function Runs({ runs }) {
  return html`<${Lines} label="table of runs" heads=${["run", "pipeline", "started (UTC)", "#took", "state", "stopped at"]}>
      ${runs.map((run) => {
        const stopped = STOPPED.includes(run.state);
        return html`<tr>
            <td><a href=${`/run/${encodeURIComponent(run.run_id)}`}>${run.run_id}</a> <a href=${address("/runs", { b: run.run_id })} aria-label=${`compare ${run.run_id} with the run before it`}>compare</a></td>
            <td>${run.pipeline}</td>
            <td>${time(run.when)}</td>
            <td class="number">${seconds(run.seconds)}</td>
            <td class=${`status ${run.state}`}>${stopped ? "✗ " : run.state === "running" ? "◌ " : ""}${run.state}</td>
            <td class="wraps">${run.failed_stage ?? ""}${run.cause && html`<span class="soft">: ${pieces(run.cause)}</span>`}</td>
          </tr>
          ${stopped && run.go_on && html`<tr><td colspan="6"><details><summary>how to go on with ${run.run_id}${run.log_tail && `, and the last lines of the log of ${run.failed_stage}`}</summary><p><${OfStore} command=${run.go_on} /></p>${run.log_tail && html`<pre>${pieces(run.log_tail)}</pre>`}</details></td></tr>`}`;
      })}
    <//>`;
}
