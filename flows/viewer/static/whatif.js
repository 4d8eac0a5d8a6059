// What would run if settings had other values. Nothing is run: the answer is a plan.
import { json, useAnswer } from "./api.js";
import { plural, seconds } from "./format.js";
import { useUnfinished } from "./live.js";
import { change, route } from "./location.js";
import { Problem } from "./problem.js";
import { pieces } from "./text.js";
import { html, useState } from "./ui.js";

/** @typedef {import("./wire.js").PlanAnswer} Plan */
/** @typedef {import("./wire.js").StageBox} StageBox */

/** The settings in the address, each STAGE.KEY=VALUE: one a line. */
const settings = () => (route.value.params.set ?? "").split("\n").filter(Boolean);

/** The plan with the settings of the address; nothing without any. @param {string | null | undefined} pipeline */
export function useWhatIf(pipeline) {
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
export function WhatIf({ pipeline, stages, chosen, whatIf }) {
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
