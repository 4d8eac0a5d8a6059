// Two runs side by side: config, code, inputs, metrics, and the rows that differ.
import { json, useAnswer } from "./api.js";
import { OtherTasks } from "./better.js";
import { count, decimal, plural, seconds, time } from "./format.js";
import { useKeys } from "./keys.js";
import { address, change, route, version } from "./location.js";
import { Empty, instead } from "./problem.js";
import { pieces } from "./text.js";
import { Lines, html, useEffect } from "./ui.js";

/** @typedef {import("./wire.js").RunsCompared} Compared */
/** @typedef {import("./wire.js").RunSide} Side */

export function RunsPage() {
  const { a, b, at } = route.value.params;
  const { value, problem } = useAnswer((stop) => /** @type {Promise<Compared>} */ (json("/api/runs/compare", { a, b, at }, stop)), [a, b, at]);
  useEffect(() => void (value && (version.value = value.version === null ? null : String(value.version))), [value]);
  const turn = (/** @type {number} */ by) => {
    const ids = value?.runs.map((run) => run.run_id) ?? [];
    const next = ids[ids.indexOf(value?.b?.run_id ?? "") + by];
    if (next) change({ b: next, a: null });
  };
  useKeys({
    n: { does: "the next older run, against the one before it", run: () => turn(1) },
    p: { does: "the next newer run, against the one before it", run: () => turn(-1) },
    s: { does: "swap the two runs", run: () => value?.a && value.b && change({ a: value.b.run_id, b: value.a.run_id }) },
  });
  if (problem || !value) return instead(problem, "reading the runs", "Two runs");
  if (!value.b) return html`<h1>Two runs</h1><${Empty} says="No pipeline ran in this store yet." command="agentrl run quickstart" />`;
  return html`<h1>Two runs</h1>
    <${Lines} label="the two runs" heads=${["", "run", "pipeline", "started (UTC)", "#took", "state", "command"]}>
      <${Run} name="a" side=${value.a} runs=${value.runs} /><${Run} name="b" side=${value.b} runs=${value.runs} />
    <//>
    ${value.a ? html`<${Differences} value=${value} at=${at} />` : html`<${Empty} says="There is no earlier run of this pipeline to compare with. Choose one, or run it with another setting." command=${`agentrl run ${value.b.pipeline} --set STAGE.KEY=VALUE`} />`}`;
}

/** @param {{name: "a" | "b", side: Side | null, runs: Compared["runs"]}} props */
function Run({ name, side, runs }) {
  const chosen = (/** @type {Event} */ event) => change({ [name]: /** @type {HTMLSelectElement} */ (event.target).value });
  const known = !side || runs.some((run) => run.run_id === side.run_id);
  return html`<tr><th scope="row">${name}</th>
    <td><select aria-label=${`run ${name}`} onChange=${chosen}>
      ${!side && html`<option value="" selected>choose a run</option>`}${!known && side && html`<option value=${side.run_id} selected>${side.run_id}</option>`}
      ${runs.map((run) => html`<option value=${run.run_id} selected=${run.run_id === side?.run_id}>${run.run_id} ${run.pipeline} ${run.state}</option>`)}
    </select></td>
    <td>${pieces(side?.pipeline ?? "")}</td><td>${side ? time(side.when) : ""}</td><td class="number">${seconds(side?.seconds)}</td><td>${side?.state ?? ""}</td><td class="wraps"><code>${pieces(side?.command ?? "")}</code></td></tr>`;
}

/** @param {{value: Compared, at: string | undefined}} props */
function Differences({ value, at }) {
  return html`<p>${value.stages.length ? `${plural(value.stages.length, "stage")} ${value.stages.length === 1 ? "differs" : "differ"}` : "No stage differs"}${value.same.length ? html`; the same in both: <span class="soft">${value.same.join(", ")}</span>` : ""}.</p>
    ${value.stages.map((stage) => html`<section key=${stage.stage} aria-label=${stage.stage}>
      <h2>${pieces(stage.stage)} ${stage.only_in && html`<span class="soft">only in ${stage.only_in}</span>`}</h2>
      ${stage.ingredients.length > 0 && html`<${Made} lines=${stage.ingredients} />`}
      ${stage.metrics.length + stage.rows.length > 0 && html`<${Numbers} stage=${stage} />`}
      ${stage.other_tasks && html`<${OtherTasks} />`}
      ${stage.changed.map((rows) => html`<${Rows} changed=${rows} at=${at} />`)}
    </section>`)}`;
}

const KINDS = ["config", "seed", "code", "input", "version", "package"];

/** Why the stage differs, by what it was made from. @param {{lines: string[]}} props */
function Made({ lines }) {
  const kind = (/** @type {string} */ line) => KINDS.find((name) => line.startsWith(`${name} `)) ?? "other";
  const groups = [...KINDS, "other"].map((name) => ({ name, lines: lines.filter((line) => kind(line) === name) })).filter((group) => group.lines.length);
  return html`<table class="lines narrow"><tbody>
    ${groups.map((group) => html`<tr><th scope="row">${group.name}</th><td>${group.lines.map((line) => html`<div class="mono">${pieces(group.name === "other" ? line : line.slice(group.name.length + 1))}</div>`)}</td></tr>`)}
  </tbody></table>`;
}

/** Metrics, and rows of outputs. @param {{stage: Compared["stages"][number]}} props */
function Numbers({ stage }) {
  const rows = [...stage.metrics, ...stage.rows.map((output) => ({ ...output, name: `rows of ${output.name}` }))];
  return html`<table class="lines narrow"><thead><tr><th>metric</th><th class="number">a</th><th class="number">b</th><th class="number">b − a</th></tr></thead><tbody>
    ${rows.map(({ name, a, b }) => html`<tr><td>${pieces(name)}</td><td class="number">${told(a)}</td><td class="number">${told(b)}</td><td class="number">${typeof a === "number" && typeof b === "number" ? `${b > a ? "+" : ""}${decimal(b - a, 4)}` : ""}</td></tr>`)}
  </tbody></table>`;
}

/** @param {unknown} value */
function told(value) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? decimal(value, 4) : pieces(typeof value === "string" ? value : JSON.stringify(value));
}

/** @param {{changed: Compared["stages"][number]["changed"][number], at: string | undefined}} props */
function Rows({ changed, at }) {
  const part = (/** @type {string} */ among, /** @type {number} */ rows) => (among.includes(":") ? plural(rows, "row") : html`<a href=${address("/buffer", { among, at })}>${plural(rows, "row")}</a>`); // of another store
  const of = (/** @type {number} */ solved, /** @type {number} */ n) => (n ? `${count(solved)} of ${count(n)}` : "–");
  return html`<h3>Rows of ${changed.output}: a has ${part(changed.a_artifact, changed.a)}, b ${part(changed.b_artifact, changed.b)}${changed.shared ? `, ${count(changed.shared)} of them the same` : ""}</h3>
    <p class="soft">${plural(changed.tasks, "task")} in both, ${count(changed.only_a)} in a alone, ${count(changed.only_b)} in b alone. ${plural(changed.differing, "task")} of both ${changed.differing === 1 ? "has" : "have"} another share of successes${changed.differing > changed.examples.length ? `; the first ${count(changed.examples.length)}` : ""}.</p>
    ${changed.examples.length > 0 && html`<${Lines} label="tasks with another outcome" heads=${["task", "prompt", "#succeeded in a", "#succeeded in b", "change"]}>
      ${changed.examples.map((example) => {
        const better = example.b_solved * example.a_n > example.a_solved * example.b_n;
        return html`<tr><td><a href=${address("/task", { env: example.env, task_id: example.task_id, at })}>${pieces(example.task_id)}</a></td><td class="wraps">${pieces(example.prompt)}</td>
          <td class="number">${of(example.a_solved, example.a_n)}</td><td class="number">${of(example.b_solved, example.b_n)}</td><td class=${better ? "good" : "bad"}>${better ? "✓ gained" : "✗ lost"}</td></tr>`;
      })}
    <//>`}`;
}
