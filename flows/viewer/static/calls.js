// Calls of tools: how often each tool failed, and the calls that did, each with its message.
import { json, useAnswer } from "./api.js";
import { count, percent, plural, seconds } from "./format.js";
import { useKeys } from "./keys.js";
import { address, change, go, route, rowAddress, version } from "./location.js";
import { Empty, Problem } from "./problem.js";
import { pieces } from "./text.js";
import { Lines, html, useEffect } from "./ui.js";

/** @typedef {import("./wire.js").CallsByTool} Calls */

export function CallsPage() {
  const { filter = "", at, among, rule } = route.value.params;
  const { value, problem } = useAnswer((stop) => /** @type {Promise<Calls>} */ (json("/api/calls", { filter, at, among, rule }, stop)), [filter, at, among, rule]);
  useEffect(() => void (value && (version.value = String(value.version))), [value]);
  const first = value?.failed[0];
  useKeys({
    Enter: { does: "the newest call that failed", run: () => first && go(rowAddress(first.trajectory_id, { at, m: first.message })) },
    "/": { does: "filter the buffer", run: () => go(address("/buffer", { at, filter })) },
  });
  return html`<h1>Tool calls</h1>
    <form class="fields" onSubmit=${(/** @type {Event} */ event) => { event.preventDefault(); change({ filter: /** @type {HTMLInputElement} */ (document.getElementById("calls-filter")).value }); }}>
      <label for="calls-filter">of rows in the filter</label> <input id="calls-filter" class="mono" value=${filter} placeholder="all rows" /> <button>show</button></form>
    ${problem ? html`<${Problem} problem=${problem} />` : !value ? html`<p class="soft waiting">reading the calls …</p>` : html`<${Told} value=${value} at=${at} />`}`;
}

/** @param {{value: Calls, at: string | undefined}} props */
function Told({ value, at }) {
  const { rows, looked_at: looked, unknown, tools, failed } = value;
  if (!rows) return html`<${Empty} says="No row here calls a tool." command="agentrl run quickstart" />`;
  const sum = tools.reduce((total, tool) => total + tool.failed, 0);
  return html`<p role="status">${plural(sum, "call")} failed in ${plural(looked, "row")}${looked < rows ? `, the newest of ${count(rows)} that call tools` : " that call tools"}.${unknown > 0 && html` <span class="soft">${plural(unknown, "more error")} ${unknown === 1 ? "was" : "were"} counted by rows that do not say of which call.</span>`}</p>
    <${Lines} label="calls by tool" heads=${["tool", "#calls", "#answered", "#failed", "#of those answered", "#rows", "#took", "#median of a call"]}>
      ${tools.map((tool) => html`<tr><td class="wraps">${pieces(tool.name || "(no name)")}</td><td class="number">${count(tool.calls)}</td><td class="number">${count(tool.answered)}</td><td class=${`number ${tool.failed ? "bad" : ""}`}>${count(tool.failed)}</td><td class="number">${tool.answered ? percent(tool.failed / tool.answered) : "–"}</td><td class="number">${count(tool.rows)}</td><td class="number">${tool.timed ? seconds(tool.seconds) : "–"}${tool.timed > 0 && tool.timed < tool.answered && html` <span class="soft">of ${plural(tool.timed, "call")}</span>`}</td><td class="number">${seconds(tool.median) || "–"}</td></tr>`)}
    <//>
    <h2 id="failed">Calls that failed</h2>
    ${failed.length < sum && html`<p class="soft">the newest ${count(failed.length)} of ${count(sum)}</p>`}
    ${failed.length > 0 && html`<${Lines} label="calls that failed" heads=${["row", "tool", "answered", "called with"]}>
      ${failed.map((call) => html`<tr><td><a href=${rowAddress(call.trajectory_id, { at, m: call.message })}>${pieces(call.trajectory_id)}, message ${call.message + 1}</a></td><td>${pieces(call.tool)}</td><td class="bad cut" title=${call.answer}>${pieces(call.answer)}</td><td class="mono cut" title=${call.arguments}>${pieces(call.arguments)}</td></tr>`)}
    <//>`}`;
}
