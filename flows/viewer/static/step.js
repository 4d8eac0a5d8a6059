// A step of training: the rows that it learned from, by group, and the command that computes it again.
import { arrow, useAnswer } from "./api.js";
import { number } from "./chart.js";
import { oneOf } from "./filter.js";
import { count, decimal, plural } from "./format.js";
import { address, rowAddress, version } from "./location.js";
import { OfStore, instead } from "./problem.js";
import { pieces } from "./text.js";
import { Lines, html, useEffect, useState } from "./ui.js";

/**
 * @typedef {{
 *   trajectory_id: string, pair_id: string | null, label: number, weight: number, trained: boolean, group_id: string | null,
 *   reward: number | null, success: boolean | null, task_id: string | null, env: string | null, policy_version: number | null, staleness: number | null,
 * }} Row
 * @typedef {{name: string, rows: Row[], flat: boolean, rewards: number[]}} Group `flat`: all rewards are equal
 */

const GROUPS = 200;
const FILTERED = 60;
const COLUMNS = ["trajectory_id", "pair_id", "label", "weight", "trained", "group_id", "reward", "success", "task_id", "env", "policy_version", "staleness"];

/** @param {import("./vendor/flechette.js").Table} table @returns {Row[]} */
const rowsOf = (table) =>
  Array.from({ length: table.numRows }, (_, i) => /** @type {Row} */ (Object.fromEntries(COLUMNS.map((name) => [name, table.getChild(name)?.at(i) ?? null]))));

/** @param {Row[]} rows @returns {Group[]} in the order of their first rows */
export function groupsOf(rows) {
  const groups = /** @type {Map<string, Row[]>} */ (new Map());
  for (const row of rows) {
    const name = row.group_id ?? row.pair_id ?? row.trajectory_id;
    groups.set(name, [...(groups.get(name) ?? []), row]);
  }
  return [...groups].map(([name, members]) => {
    const rewards = members.flatMap((row) => row.reward ?? []);
    return { name, rows: members, rewards, flat: members.some((row) => row.group_id !== null) && rewards.length > 1 && Math.min(...rewards) === Math.max(...rewards) };
  });
}

/** @param {number[]} values */
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** @param {number[]} values */
const spread = (values) => Math.sqrt(mean(values.map((value) => (value - mean(values)) ** 2)));

/** @param {{artifact: string | null, step: number, at: string | undefined}} props */
export function Step({ artifact, step, at }) {
  if (!artifact) return html`<section aria-labelledby="step"><h2 id="step">Step ${step}</h2><p class="soft">The rows of a step are known when the stage is done.</p></section>`;
  return html`<section aria-labelledby="step"><h2 id="step">Step ${step}</h2>
    <${Learned} artifact=${artifact} step=${step} at=${at} />
    <p class="soft">To compute it again, with other settings by <code>--set</code>: <${OfStore} command=${`agentrl replay ${artifact} --step ${step}`} /></p>
  </section>`;
}

/** @param {{artifact: string, step: number, at: string | undefined}} props */
function Learned({ artifact, step, at }) {
  const { value, problem } = useAnswer(async (stop) => {
    const { table, headers } = await arrow("/api/training/rows", { artifact, step, at }, stop);
    return { rows: rowsOf(table), version: headers.get("X-Version") };
  }, [artifact, step, at]);
  useEffect(() => void (version.value = value?.version ?? null), [value]);
  if (problem || !value) return instead(problem, "reading the rows");
  const { rows } = value;
  const groups = groupsOf(rows);
  const flat = groups.filter((group) => group.flat);
  const out = rows.filter((row) => !row.trained).length;
  const ids = rows.map((row) => row.trajectory_id);
  return html`<p>${plural(rows.length, "row")} in ${plural(groups.length, "group")}${flat.length ? html`, <span class="bad">✗ ${plural(flat.length, "group")} without a spread of rewards</span>` : ""}${out ? `, ${plural(out, "row")} left out` : ""}.
      ${ids.length <= FILTERED && html` <a href=${address("/buffer", { filter: oneOf(ids), at })}>the rows in the buffer</a>`}</p>
    <${Lines} label="groups of the step" heads=${["group", "task", "#rows", "#solved", "#rewards", "#spread", "#advantages", "#versions behind"]}>
      ${groups.slice(0, GROUPS).map((group) => html`<${GroupLines} key=${group.name} group=${group} at=${at} open=${groups.length === 1} />`)}
    <//>
    ${groups.length > GROUPS && html`<p class="soft">and ${count(groups.length - GROUPS)} more groups</p>`}`;
}

/** @param {(number | null)[]} values */
function extent(values) {
  const present = values.filter((value) => value !== null);
  if (!present.length) return "–";
  const [low, high] = [Math.min(...present), Math.max(...present)];
  return low === high ? number(low) : `${number(low)} to ${number(high)}`;
}

/** @param {{group: Group, at: string | undefined, open: boolean}} props */
function GroupLines({ group, at, open: begin }) {
  const [open, setOpen] = useState(begin);
  const { rows, rewards } = group;
  const scored = rows.filter((row) => row.success !== null);
  const [{ env, task_id: task }] = rows;
  return html`<tr class=${group.flat ? "flat" : ""}>
      <td><button class="quiet" aria-expanded=${open ? "true" : "false"} onClick=${() => setOpen(!open)}>${open ? "▾" : "▸"} ${pieces(group.name)}</button></td>
      <td>${task && html`<a href=${address("/task", { env, task_id: task, at })}>${pieces(task)}</a>`}</td>
      <td class="number">${count(rows.length)}</td>
      <td class="number">${scored.length ? `${scored.filter((row) => row.success).length} of ${scored.length}` : "–"}</td>
      <td class="number">${extent(rewards)}</td>
      <td class="number">${group.flat ? html`<span class="bad">✗ none</span>` : rewards.length > 1 ? number(spread(rewards)) : "–"}</td>
      <td class="number">${extent(rows.map((row) => row.weight))}</td>
      <td class="number">${extent(rows.map((row) => row.staleness))}</td>
    </tr>
    ${open && rows.map((row) => html`<tr class="member">
      <td><a href=${rowAddress(row.trajectory_id, { at, lens: "weight" })}>${pieces(row.trajectory_id)}</a></td>
      <td>${row.trained ? "" : html`<span class="bad">✗ left out</span>`}${row.pair_id !== null ? (row.label > 0 ? "chosen" : "rejected") : ""}</td>
      <td></td>
      <td class="number">${row.success === null ? "–" : row.success ? html`<span class="good">✓</span>` : html`<span class="bad">✗</span>`}</td>
      <td class="number">${decimal(row.reward)}</td>
      <td></td>
      <td class="number">${number(row.weight)}</td>
      <td class="number">${row.staleness ?? "–"}${row.policy_version === null ? "" : html` <span class="soft">(version ${row.policy_version})</span>`}</td>
    </tr>`)}`;
}
