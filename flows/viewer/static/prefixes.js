// The attempts at a task as a tree of the tokens that they share, with the mean reward at each branch.
import { json, useAnswer } from "./api.js";
import { AsTable, Drawing, RampLegend, ramp } from "./tree_boxes.js";
import { count, decimal, plural } from "./format.js";
import { change, go, route, rowAddress } from "./location.js";
import { instead } from "./problem.js";
import { pieces, visible } from "./text.js";
import { html, useMemo } from "./ui.js";

/** @typedef {import("./wire.js").TreeBranch} Branch */

const AT_ONCE = 64; // attempts up to which the tree is drawn without being asked for

/** @param {{env: string, task: string, at: string | undefined, rows: number}} props */
export function Prefixes({ env, task, at, rows }) {
  const { tree } = route.value.params;
  const open = tree ? tree === "open" : rows <= AT_ONCE;
  const turned = (/** @type {Event} */ event) => {
    const now = /** @type {HTMLDetailsElement} */ (event.currentTarget).open;
    if (now !== open) change({ tree: now ? "open" : "closed" });
  };
  return html`<details open=${open} onToggle=${turned}>
    <summary>the attempts as a tree of shared tokens</summary>
    ${open && html`<${Tree} env=${env} task=${task} at=${at} />`}
  </details>`;
}

/** @param {{env: string, task: string, at: string | undefined}} props */
function Tree({ env, task, at }) {
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").TaskTree>} */ (json("/api/task/tree", { env, task_id: task, at }, stop)), [env, task, at]);
  const boxes = useMemo(() => value?.branches.map(box) ?? [], [value]);
  if (problem || !value) return instead(problem, "reading the tokens");
  const left = value.left_out ? html`<p class="soft">${plural(value.left_out, "attempt")} without tokens, of another tokenizer than most, or beyond the newest 1,024 ${value.left_out === 1 ? "is" : "are"} left out.</p>` : "";
  if (!boxes.length) return html`${left}<p class="soft">No attempt has tokens to share.</p>`;
  const chosen = Math.max(0, Math.min(boxes.length - 1, Number(route.value.params.branch ?? 0) || 0));
  const here = value.branches[chosen];
  const open = (/** @type {number} */ i) => value.branches[i].ends[0] && go(rowAddress(value.branches[i].ends[0], { at }));
  return html`${left}<${RampLegend} says="mean reward" />
    <${Drawing} boxes=${boxes} chosen=${chosen} choose=${(/** @type {number} */ i) => change({ branch: i })} open=${open} label=${`tree of ${plural(value.rows, "attempt")}`} />
    <div class="node"><p>${told(here)}; tokens ${count(here.start)} to ${count(here.end)}.${" "}
      ${here.ends.length > 0 && html`These end here: ${here.ends.map((id) => html`<a href=${rowAddress(id, { at, lens: "mask", t: here.start })}>${visible(id)}</a> `)}`}</p><pre>${pieces(here.text)}</pre></div>
    <${AsTable} rows=${() => html`<table class="lines"><thead><tr><th class="number">branch</th><th class="number">after</th><th class="number">tokens</th><th class="number">attempts</th><th class="number">mean reward, 95 % interval, n</th><th class="number">succeeded</th><th>text</th></tr></thead><tbody>
      ${value.branches.map((branch, i) => html`<tr class=${i === chosen ? "chosen" : ""}><td class="number">${i}</td><td class="number">${branch.parent ?? ""}</td><td class="number">${count(branch.end - branch.start)}</td><td class="number">${count(branch.rows)}</td><td class="number">${reward(branch)}</td><td class="number">${branch.success === null ? "–" : `${count(Math.round(branch.success * branch.n))} of ${count(branch.n)}`}</td><td>${pieces(branch.text.slice(0, 120))}</td></tr>`)}
    </tbody></table>`} />`;
}

/** @param {Branch} branch */
function reward({ reward, low, high, rewarded }) {
  if (reward === null) return "no reward";
  const around = low === null || high === null ? "" : ` (${decimal(low, 2)} to ${decimal(high, 2)})`;
  return `${decimal(reward, 2)}${around}, n ${count(rewarded)}`;
}

/** @param {Branch} branch */
const told = (branch) => `${plural(branch.rows, "attempt")}, mean reward ${reward(branch)}`;

/** @param {Branch} branch */
function box(branch) {
  const line = visible(branch.text.replace(/\s+/g, " ").trim()) || "(no text)";
  const under = `${reward(branch)}${branch.rows === branch.rewarded ? "" : ` of ${count(branch.rows)}`}`;
  return { parent: branch.parent, x: branch.x, y: branch.y, mark: ramp(branch.reward), line, under, told: `${line}: ${told(branch)}` };
}
