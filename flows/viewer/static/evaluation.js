// Policies and levels with intervals, and the paired difference of two evaluations on the tasks of both.
import { json, useAnswer } from "./api.js";
import { Headline, Scale } from "./better.js";
import { chance, count, decimal, decoding, percent, plural, time } from "./format.js";
import { address, change, route } from "./location.js";
import { Empty, Problem, instead } from "./problem.js";
import { pieces } from "./text.js";
import { Lines, html } from "./ui.js";

/** @typedef {import("./wire.js").EvaluatedPolicy} Evaluated */
/** @typedef {import("./wire.js").PairedDifference} Difference */

export function EvaluationPage() {
  const { greedy = "false", ...chosen } = route.value.params;
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").Evaluations>} */ (json("/api/evaluations", {}, stop)), []);
  const newest = useAnswer((stop) => /** @type {Promise<import("./wire.js").Better>} */ (json("/api/better", {}, stop)), []);
  const given = Boolean(chosen.than || chosen.arm);
  const than = given ? chosen.than : newest.value?.difference?.than.artifacts[0];
  const arm = given ? chosen.arm : newest.value?.difference?.arm.artifacts[0];
  const compared = useAnswer(
    async (stop) => (than && arm ? /** @type {Difference} */ (await json("/api/compare", { than, arm, greedy }, stop)) : null),
    [than, arm, greedy],
  );
  if (problem || !value) return instead(problem, "reading the store", "Evaluations");
  if (!value.evaluations.length) return html`<h1>Evaluations</h1><${Empty} says="No policy was evaluated yet." command="agentrl run quickstart" />`;
  return html`<h1>Evaluations</h1>
    ${compared.problem && html`<${Problem} problem=${compared.problem} />`}
    ${than && arm
      ? compared.value ? html`<${Compared} difference=${compared.value} />` : !compared.problem && html`<p class="soft waiting">comparing …</p>`
      : !given && !newest.value && !newest.problem
        ? html`<p class="soft waiting headline">comparing the newest policy with the one before it …</p>`
        : html`<p class="soft">${value.evaluations.length > 1 ? "Choose two evaluations to compare them on the tasks of both." : "There is one evaluation; a second one of the same tasks can be compared with it."}</p>`}
    <h2 id="all">All evaluations</h2>
    <p><label><input type="checkbox" checked=${greedy === "true"} onChange=${() => change({ than, arm, greedy: greedy === "true" ? null : true })} /> compare greedy attempts instead of sampled ones</label></p>
    <${Results} all=${value.evaluations} than=${than} arm=${arm} />`;
}

/** One line per evaluation and decoding; levels follow the whole. @param {{all: Evaluated[], than: string | undefined, arm: string | undefined}} props */
function Results({ all, than, arm }) {
  const levels = [...new Set(all.flatMap((evaluation) => evaluation.results.filter((result) => result.level >= 0 && result.env).map((result) => `${result.env} ${result.level}`)))].sort();
  const choose = (/** @type {string} */ name, /** @type {string} */ artifact, /** @type {string | undefined} */ chosen) =>
    html`<input type="radio" name=${name} aria-label=${`${NAMES[name]}: ${artifact}`} checked=${chosen === artifact} onChange=${() => change({ than, arm, [name]: artifact })} />`;
  return html`<${Lines} label="results by level" heads=${["this one", "compared with", "policy", "evaluation", "split", "sampling", "made (UTC)", "#all levels", "#n", ...levels.map((level) => `#${level}`)]}>
      ${all.flatMap((evaluation) => ["sampled", "greedy", "control"].flatMap((kind) => {
        const results = evaluation.results.filter((result) => kind === (result.control !== null ? "control" : result.greedy ? "greedy" : "sampled"));
        const whole = results.find((result) => result.level < 0 && !result.env) ?? results[0];
        if (!whole) return [];
        return [html`<tr>
          <td>${kind === "sampled" ? choose("arm", evaluation.artifact, arm) : ""}</td><td>${kind === "sampled" ? choose("than", evaluation.artifact, than) : ""}</td>
          <td>${pieces(evaluation.policy)}</td><td>${evaluation.stage}</td><td>${evaluation.split}</td><td>${decoding(whole)}</td><td>${time(evaluation.when)}</td>
          <td class="number">${shown(whole)}</td><td class="number">${count(whole.n)}</td>
          ${levels.map((level) => {
            const result = results.find((other) => `${other.env} ${other.level}` === level);
            return html`<td class="number">${result ? `${shown(result)}, n ${count(result.n)}` : ""}</td>`;
          })}
        </tr>`];
      }))}
    <//>`;
}

/** What the two choices are called. @type {Record<string, string>} */
const NAMES = { arm: "this one", than: "compared with" };

/** @param {{success: number, low: number, high: number}} result */
const shown = (result) => `${percent(result.success)} (${(100 * result.low).toFixed(1)} to ${(100 * result.high).toFixed(1)})`;

/** @param {{difference: Difference}} props */
function Compared({ difference }) {
  const { than, arm, tasks, p, gained, lost } = difference;
  return html`<section aria-labelledby="verdict">
    <h2 id="verdict">${pieces(arm.name)} compared with ${pieces(than.name)}</h2>
    <${Headline} difference=${difference} />
    <${Scale} difference=${difference} />
    <p>${pieces(than.name)} ${shown(than)} over its ${plural(than.tasks, "task")}, ${pieces(arm.name)} ${shown(arm)} over its ${plural(arm.tasks, "task")}. The difference is over ${plural(tasks, "task")} of both. ${than.unscored + arm.unscored > 0 ? `${plural(than.unscored + arm.unscored, "row")} without an outcome left out. ` : ""}
      The interval is a bootstrap over tasks${p === null ? "" : `; McNemar's exact test: ${chance(p)}`}.</p>
    <div class="sides">
      <section><h3>Lost: ${count(difference.tasks_lost)}</h3><${Tasks} label="tasks that were lost" tasks=${lost} total=${difference.tasks_lost} /></section>
      <section><h3>Gained: ${count(difference.tasks_gained)}</h3><${Tasks} label="tasks that were gained" tasks=${gained} total=${difference.tasks_gained} /></section>
    </div>
  </section>`;
}

/** @param {{label: string, tasks: Difference["gained"], total: number}} props */
function Tasks({ label, tasks, total }) {
  return total > 0 && html`<${Lines} label=${label} heads=${["task", "prompt", "#before", "#after"]}>
    ${tasks.map((task) => html`<tr><td><a href=${address("/task", { env: task.env, task_id: task.task_id })}>${pieces(task.task_id)}</a></td><td class="wraps">${pieces(task.prompt)}</td><td class="number">${decimal(task.before, 2)}</td><td class="number">${decimal(task.after, 2)}</td></tr>`)}
  <//>
  ${total > tasks.length && html`<p class="soft">and ${count(total - tasks.length)} more</p>`}`;
}
