// The SQL console: one SELECT over the scalar columns, answered by the server in a process that cannot open files.
import { arrow, useAnswer } from "./api.js";
import { count, plural } from "./format.js";
import { useKeys } from "./keys.js";
import { address, change, place, rowAddress, version } from "./location.js";
import { Problem } from "./problem.js";
import { pieces } from "./text.js";
import { html, useEffect, useRef, useState } from "./ui.js";

const EXAMPLES = [
  "select stage, count(*) as n, avg(success) as success from trajectories group by stage order by n desc",
  "select task_id, avg(reward) as reward, count(*) as n from trajectories group by task_id having count(*) > 1 order by reward limit 20",
  "select trajectory_id, n_tokens, reward from trajectories where not success order by n_tokens desc limit 20",
];

export function SqlPage() {
  const { query = "", at } = place.value.params;
  const [text, setText] = useState(query);
  const [again, ask] = useState(0);
  const box = useRef(/** @type {HTMLTextAreaElement | null} */ (null));
  useEffect(() => setText(query), [query]);
  const answer = useAnswer(async (stop) => (query ? arrow("/api/sql", { query, at }, stop) : null), [query, at, again]);
  const shown = answer.problem ? null : answer.value;
  useEffect(() => void (version.value = shown?.headers.get("x-version") ?? null), [shown]);
  const run = (/** @type {string} */ next) => {
    change({ query: next.trim() });
    ask((number) => number + 1);
  };
  useKeys({
    "/": { does: "write the query; Ctrl+Enter asks it", run: () => box.current?.focus() },
    r: { does: "ask again", run: () => run(text) },
  });
  const typed = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    run(text);
  };
  return html`<h1>SQL</h1>
    <p class="soft">One SELECT over the table trajectories: the scalar columns of the <a href=${address("/buffer", { at })}>buffer</a>. Nothing is changed, and no file is read.</p>
    <div class="replay">
      <textarea ref=${box} rows="4" aria-label="query" spellcheck=${false} value=${text} placeholder=${EXAMPLES[0]} onInput=${(/** @type {Event} */ event) => setText(/** @type {HTMLTextAreaElement} */ (event.target).value)} onKeyDown=${typed}></textarea>
      <button disabled=${!text.trim()} onClick=${() => run(text)}>ask</button>
    </div>
    <div role="status" class="counts">${answer.busy && query ? html`<span class="soft">asking …</span>` : shown && html`<${Said} headers=${shown.headers} at=${at} />`}</div>
    ${answer.problem && !answer.busy && html`<${Problem} problem=${answer.problem} />`}
    ${!query && html`<h2>For example</h2>${EXAMPLES.map((one) => html`<p><button class="quiet mono" onClick=${() => run(one)}>${one}</button></p>`)}`}
    ${shown && html`<${Found} table=${shown.table} at=${at} />`}`;
}

/** @param {{headers: Headers, at: string | undefined}} props */
function Said({ headers, at }) {
  const rows = Number(headers.get("x-rows"));
  const cut = headers.get("x-cut") === "1";
  return html`<span><b>${plural(rows, "row")}</b>${cut && html` <span class="bad">the first ${count(rows)} only: there are more</span>`}</span>
    <span class="soft">version ${headers.get("x-version")}${at && html` (pinned) <button class="quiet" onClick=${() => change({ at: null })}>ask the newest</button>`}</span>
    <span class="soft">${headers.get("x-milliseconds")} ms</span>`;
}

/** @param {unknown} value */
function cell(value) {
  if (value === null || value === undefined) return html`<span class="soft">null</span>`;
  return typeof value === "string" ? pieces(value) : String(value);
}

/** @param {{table: import("./vendor/flechette.js").Table, at: string | undefined}} props */
function Found({ table, at }) {
  const names = table.names;
  const columns = names.map((name) => table.getChild(name)?.toArray() ?? []);
  const numbers = columns.map((column) => ["number", "bigint"].includes(typeof Array.from(column).find((one) => one !== null)));
  const line = (/** @type {number} */ row) => html`<tr>${names.map((name, place) => {
    const value = columns[place][row];
    const inside = name === "trajectory_id" && value ? html`<a href=${rowAddress(String(value), { at })}>${pieces(String(value))}</a>` : cell(value);
    return html`<td class=${numbers[place] ? "number" : ""}>${inside}</td>`;
  })}</tr>`;
  return html`<div class="wide-table" tabindex="0" role="region" aria-label="answer"><table class="lines sql">
    <thead><tr>${names.map((name, place) => html`<th scope="col" class=${numbers[place] ? "number" : ""}>${pieces(name)}</th>`)}</tr></thead>
    <tbody>${Array.from({ length: table.numRows }, (_, row) => line(row))}</tbody>
  </table></div>`;
}
