// The trees that a search made: its nodes by value and visits, and the path that was worth most.
import { json, useAnswer } from "./api.js";
import { AsTable, Drawing, RampLegend, ramp } from "./tree_boxes.js";
import { count, decimal, plural } from "./format.js";
import { useKeys } from "./keys.js";
import { address, change, go, route, rowAddress, version } from "./location.js";
import { Empty, Problem } from "./problem.js";
import { pieces, visible } from "./text.js";
import { Wide, html, useEffect, useMemo } from "./ui.js";

/** @typedef {import("./wire.js").NodeBox} Node */

const PAGE = 100;

export function TreePage() {
  const { artifact, task_id, offset = "0" } = route.value.params;
  return task_id && artifact ? html`<${One} artifact=${artifact} task=${task_id} />` : html`<${All} artifact=${artifact} offset=${Number(offset) || 0} />`;
}

/** A mean with its interval and n. @param {{value: number | null, low: number | null, high: number | null, visits: number}} one */
function worth({ value, low, high, visits }) {
  if (value === null) return "not visited";
  const around = low === null || high === null ? "" : ` (${decimal(low, 2)} to ${decimal(high, 2)})`;
  return `${decimal(value, 2)}${around}, n ${count(visits)}`;
}

/** @param {{artifact: string | undefined, offset: number}} props */
function All({ artifact, offset }) {
  const { at } = route.value.params;
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").SearchTrees>} */ (json("/api/search-trees", { artifact, offset, limit: PAGE }, stop)), [artifact, offset]);
  useEffect(() => void (version.value = null), []);
  if (problem) return html`<h1>Trees</h1><${Problem} problem=${problem} />`;
  if (!value) return html`<h1>Trees</h1><p class="soft waiting">reading the trees …</p>`;
  if (!value.artifact) return html`<h1>Trees</h1><${Empty} says="No stage searched a tree yet. The attempts at one task are drawn as a tree on the task's page." command="agentrl run methods/lats" />`;
  return html`<h1>Trees</h1>
    <p><select aria-label="artifact" onChange=${(/** @type {Event} */ event) => change({ artifact: /** @type {HTMLSelectElement} */ (event.target).value, offset: null })}>
      ${value.artifacts.map((name) => html`<option value=${name} selected=${name === value.artifact}>${name}</option>`)}
    </select> <span class="soft">${plural(value.total, "tree")}, a task each</span></p>
    <${Wide} label="trees by task"><table class="lines"><thead><tr><th>task</th><th class="number">nodes</th><th class="number">depth</th><th class="number">continuations</th><th class="number">mean reward, 95 % interval, n</th><th class="number">ends</th><th class="number">best reward</th></tr></thead><tbody>
      ${value.tasks.map((task) => html`<tr><td><a href=${address("/tree", { artifact: value.artifact, task_id: task.task_id, at })}>${pieces(task.task_id)}</a></td><td class="number">${count(task.nodes)}</td><td class="number">${task.depth}</td><td class="number">${count(task.visits)}</td><td class="number">${worth(task)}</td><td class="number">${count(task.ends)}</td><td class="number">${decimal(task.best)}</td></tr>`)}
    </tbody></table><//>
    <p>${offset > 0 && html`<button onClick=${() => change({ offset: Math.max(0, offset - PAGE) || null })}>before</button>`} ${offset + PAGE < value.total && html`<button onClick=${() => change({ offset: offset + PAGE })}>next</button>`}</p>`;
}

/** @param {{artifact: string, task: string}} props */
function One({ artifact, task }) {
  const { at, node = "0" } = route.value.params;
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").SearchTree>} */ (json("/api/search-tree", { artifact, task_id: task, at }, stop)), [artifact, task, at]);
  useEffect(() => void (value && (version.value = String(value.version))), [value]);
  const boxes = useMemo(() => value?.nodes.map(box) ?? [], [value]);
  const chosen = Math.max(0, Math.min(boxes.length - 1, Number(node) || 0));
  const choose = (/** @type {number} */ i) => change({ node: i });
  const path = value?.nodes.flatMap((item, i) => (item.best ? [i] : [])).sort((a, b) => boxes[a].x - boxes[b].x) ?? [];
  const here = value?.nodes[chosen];
  useKeys({
    j: { does: "next node", run: () => choose(Math.min(boxes.length - 1, chosen + 1)) },
    k: { does: "previous node", run: () => choose(Math.max(0, chosen - 1)) },
    b: { does: "next node of the best path", run: () => path.length && choose(path[(path.indexOf(chosen) + 1) % path.length]) },
    Enter: { does: "open the row at this node", run: () => here && go(rowOf(here, at)) },
  });
  if (problem) return html`<h1>${visible(task)}</h1><${Problem} problem=${problem} />`;
  if (!value || !here) return html`<h1>${visible(task)}</h1><p class="soft waiting">reading the tree …</p>`;
  return html`<h1>${visible(task)}</h1>
    <p class="soft"><a href=${address("/tree", { artifact, at })}>${pieces(artifact)}</a>, ${pieces(value.env)}, <a href=${address("/task", { env: value.env, task_id: task, at })}>all attempts at the task</a></p>
    <p class="prompt">${pieces(value.prompt)}</p>
    ${value.problem && html`<p class="problem">${value.problem}</p>`}
    ${value.left_out > 0 && html`<p class="soft">${plural(value.left_out, "node")} that were visited least are left out.</p>`}
    <p class="soft">Blue: from the beginning, always the child of the highest value, and of equals the one that was visited most.</p>
    <${RampLegend} says="mean reward" />
    <${Drawing} boxes=${boxes} chosen=${chosen} choose=${choose} open=${(/** @type {number} */ i) => go(rowOf(value.nodes[i], at))} label=${`tree of ${boxes.length} nodes`} />
    <section aria-label="the chosen node" class="node">
      <h2>Node ${chosen}${here.best ? ", on the best path" : ""}</h2>
      <p>${worth(here)}; ${count(here.own)} of these end here; found in round ${here.born}${here.terminal ? `; the episode ends here${here.reward === null ? "" : ` with reward ${decimal(here.reward)}`}` : ""}. <a href=${rowOf(here, at)}>the row at its tokens</a></p>
      <pre>${pieces(here.text)}</pre>
    </section>
    <${AsTable} rows=${() => html`<table class="lines"><thead><tr><th class="number">node</th><th class="number">after</th><th class="number">mean reward, 95 % interval, n</th><th class="number">end here</th><th class="number">reward</th><th class="number">round</th><th>text</th></tr></thead><tbody>
      ${value.nodes.map((item, i) => html`<tr class=${i === chosen ? "chosen" : ""}><td class="number"><a href=${rowOf(item, at)}>${i}</a>${item.best ? " ★" : ""}</td><td class="number">${item.parent ?? ""}</td><td class="number">${worth(item)}</td><td class="number">${count(item.own)}</td><td class="number">${decimal(item.reward)}</td><td class="number">${item.born}</td><td>${pieces(item.text.slice(0, 120))}</td></tr>`)}
    </tbody></table>`} />`;
}

/** @param {Node} node @param {string | undefined} at */
const rowOf = (node, at) => rowAddress(node.trajectory_id, { at, lens: "mask", t: node.token_start });

/** @param {Node} node */
function box(node) {
  const line = visible(node.text.replace(/\s+/g, " ").trim()) || "(no text)";
  const end = node.terminal ? `, ${node.reward === null ? "end" : `end ${decimal(node.reward, 2)}`}` : "";
  const under = `${worth(node)}${end}`;
  return { parent: node.parent, x: node.x, y: node.y, mark: ramp(node.value), line, under, best: node.best, told: `${line}: ${under}${node.best ? ", on the best path" : ""}` };
}
