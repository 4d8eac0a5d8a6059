// The first page: did the policy get better, what is up to date, what ran.
import { json, useAnswer } from "./api.js";
import { Headline } from "./better.js";
import { literal } from "./filter.js";
import { count, decoding, percent, plural, seconds, time } from "./format.js";
import { Graph, StageTable } from "./graph.js";
import { useKeys } from "./keys.js";
import { useChanges, useUnfinished } from "./live.js";
import { address, change, go, route, version } from "./location.js";
import { Empty, instead, OfStore, Problem } from "./problem.js";
import { farNow, STOPPED } from "./progress.js";
import { pieces } from "./text.js";
import { html, Lines, useEffect, useState } from "./ui.js";

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

/** @typedef {import("./wire.js").PlanAnswer} Plan */
/** @typedef {import("./wire.js").StageBox} StageBox */

/** The settings in the address, each STAGE.KEY=VALUE: one a line. */
const settings = () => (route.value.params.set ?? "").split("\n").filter(Boolean);

/** The plan with the settings of the address; nothing without any. @param {string | null | undefined} pipeline */
function useWhatIf(pipeline) {
  const given = settings();
  const [asked, askAgain] = useState(0);
  const answer = useAnswer(
    async (stop) => (pipeline && given.length ? /** @type {Plan} */ (await json("/api/plan", { pipeline, set: given }, stop)) : null),
    [pipeline, given.join("\n"), asked],
  );
  useUnfinished(answer.value, answer.value?.planning, () => askAgain(asked + 1), 500);
  const { value } = answer;
  const current = value && value.pipeline === pipeline && value.settings.join("\n") === given.join("\n") ? value : null;
  return { given, plan: current, problem: given.length ? answer.problem : null };
}

/** The form, the settings that were given, and what would run with them. @param {{pipeline: string, stages: StageBox[], chosen: string | undefined, whatIf: ReturnType<typeof useWhatIf>}} props */
function WhatIf({ pipeline, stages, chosen, whatIf }) {
  const { given, plan, problem } = whatIf;
  const known = useAnswer((stop) => /** @type {Promise<import("./wire.js").KnownSettings>} */ (json("/api/settings", { pipeline }, stop)), [pipeline]);
  const [text, setText] = useState("");
  const set = (/** @type {string[]} */ next) => change({ set: next.join("\n") });
  const add = (/** @type {Event} */ event) => {
    event.preventDefault();
    const name = text.slice(0, text.indexOf("=")).trim();
    if (!name) return;
    set([...given.filter((setting) => !setting.startsWith(`${name}=`)), `${name}=${text.slice(text.indexOf("=") + 1).trim()}`]);
    setText("");
  };
  const of = known.value?.settings.filter((setting) => !chosen || setting.name.startsWith(`${chosen}.`)) ?? [];
  return html`<form class="what-if" onSubmit=${add}>
      <label for="what-if">what if</label>
      <input id="what-if" class="mono" list="settings" value=${text} placeholder="dpo.beta = 0.3" spellcheck=${false} autocomplete="off" onInput=${(/** @type {Event} */ event) => setText(/** @type {HTMLInputElement} */ (event.target).value)} />
      <datalist id="settings">${of.map((setting) => html`<option value=${`${setting.name} = ${setting.value}`}></option>`)}</datalist>
      <button disabled=${text.indexOf("=") < 1}>plan</button>
      ${given.map((setting) => html`<span class="tag mono">${pieces(setting)} <button type="button" class="quiet" aria-label=${`without ${setting}`} onClick=${() => set(given.filter((other) => other !== setting))}>✗</button></span>`)}
    </form>
    ${problem && html`<${Problem} problem=${problem} />`}
    ${given.length > 0 && !problem && html`<p role="status" class=${plan?.problem ? "problem" : ""}>${plan ? told(plan, stages) : "the plan is being made …"}</p>`}`;
}

/** @param {Plan} plan @param {StageBox[]} now */
function told(plan, now) {
  if (plan.problem) return plan.problem;
  if (plan.planning) return "the plan is being made …";
  const runs = plan.stages.filter((stage) => stage.status !== "cached" && stage.status !== "skipped");
  if (!runs.length) return html`With ${pieces(plan.settings.join(", "))} nothing would run: all is there.`;
  const took = new Map(now.map((stage) => [stage.stage, stage.seconds]));
  const times = runs.map((stage) => took.get(stage.stage) ?? stage.seconds).filter((time) => time !== null && time !== undefined);
  const sum = times.length === runs.length ? `, about ${seconds(times.reduce((a, b) => a + b, 0))} by what ${runs.length === 1 ? "it" : "they"} took last` : "";
  return html`With ${pieces(plan.settings.join(", "))}, ${plural(runs.length, "stage")} of ${plan.stages.length} would run: <b>${runs.map((stage) => stage.stage).join(", ")}</b>${sum}. Nothing is run.`;
}
