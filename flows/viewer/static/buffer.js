// The buffer: an SQL expression, histograms that are clicked, and the rows that it finds.
import { json, useAnswer } from "./api.js";
import { FacetList } from "./facets.js";
import { oneOf } from "./filter.js";
import { count, plural } from "./format.js";
import { copy, useKeys } from "./keys.js";
import { pulse, usePulse } from "./live.js";
import { change, go, route, rowAddress, version } from "./location.js";
import { Empty, Problem } from "./problem.js";
import { Rows } from "./rows.js";
import { Saving, openSaving } from "./saving.js";
import { select, selected } from "./selection.js";
import { store } from "./served.js";
import { Table } from "./table.js";
import { pieces } from "./text.js";
import { html, useEffect, useRef, useState } from "./ui.js";

const COLUMNS = ["prompt", "answer", "success", "reward", "trajectory_id", "stage", "termination", "n_tool_calls", "n_tool_errors", "n_tokens", "n_steps", "level", "policy", "policy_version", "env", "split", "task_id", "created_at"];

/** The columns that this reader chose before. */
const kept = () => localStorage.getItem("columns") ?? "";

/** Shows other rows, from the first one on. @param {Parameters<typeof change>[0]} params */
const show = (params) => change({ ...params, row: null });

export function BufferPage() {
  const { filter = "", sort = "", desc, at, cols = kept(), among, rule } = route.value.params;
  const query = { filter, sort: sort || "created_at", desc: sort ? desc === "true" : true, at, columns: cols || COLUMNS.join(","), among, rule };
  const current = Math.max(0, Number(route.value.params.row ?? 0) || 0);
  const setCurrent = (/** @type {number} */ row) => change({ row: row || null });
  const [newest, setNewest] = useState(/** @type {number | null} */ (null));
  const rows = useAnswer(() => new Rows(query).open(), [filter, sort, desc, at, cols, among, rule, newest]);
  const facets = useAnswer((stop) => /** @type {Promise<import("./wire.js").Facets>} */ (json("/api/facets", { filter, at, among, rule }, stop)), [filter, at, among, rule, newest]);
  useEffect(() => () => rows.value?.close(), [rows.value]);
  useEffect(() => void (version.value = rows.value?.version ?? null), [rows.value]);
  const box = useRef(/** @type {HTMLInputElement | null} */ (null));
  useEffect(() => {
    if (route.peek().params.focus !== "filter") return;
    change({ focus: null });
    box.current?.focus();
  }, []);
  const source = rows.value;
  const latest = useNewest(at !== undefined ? null : (source?.version ?? "-1"));
  useEffect(() => {
    if (latest !== null && !rows.busy && untouched(current)) setNewest(latest);
  }, [latest, rows.busy]);
  const id = source?.row(current)?.("trajectory_id");
  const step = (/** @type {number} */ by) => source && setCurrent(Math.max(0, Math.min(source.total - 1, current + by)));
  const words = source?.words ?? [];
  const marked = words.length ? words.join("\n") : null; // the row marks them too
  const open = () => id && go(rowAddress(id, { at, found: marked, m: source?.row(current)?.("match_message") }));
  useKeys({
    j: { does: "next row", run: () => step(1) },
    k: { does: "previous row", run: () => step(-1) },
    ArrowDown: { does: "next row", run: () => step(1) },
    ArrowUp: { does: "previous row", run: () => step(-1) },
    Enter: { does: "open the row", run: open },
    x: { does: "select the row", run: () => id && select(id) },
    s: { does: "save the rows", run: openSaving },
    "/": { does: "write a filter", run: () => box.current?.focus() },
  });
  const columns = cols ? cols.split(",") : COLUMNS;
  const known = source?.columns.length ? [...(words.length ? ["trajectory_id", "match"] : []), ...columns.filter((column) => !words.length || column !== "trajectory_id").filter((column) => source.columns.includes(column))] : columns;
  const setFilter = (/** @type {string} */ text) => show({ filter: text });
  const sortBy = (/** @type {string} */ column) => show(sort !== column ? { sort: column, desc: false } : desc === "true" ? { sort: null, desc: null } : { desc: true });
  return html`<div class="buffer">
    <h1 class="unseen">Buffer</h1>
    <${Bar} box=${box} filter=${filter} problem=${rows.problem ?? facets.problem} busy=${rows.busy || facets.busy} />
    <aside aria-label="histograms"><details open=${innerWidth > 800}><summary>histograms</summary>${facets.value && html`<${FacetList} facets=${facets.value.facets} filter=${filter} set=${setFilter} />`}</details></aside>
    <div class="found">
      <div class="counts" role="status">
        ${source && html`<span><b>${plural(source.total, "row")}</b>${facets.value ? ` of ${count(facets.value.total)}` : ""}</span>`}
        ${source?.version !== undefined && html`<span class="soft">version ${source.version}${at ? html` (pinned) <button class="quiet" onClick=${() => show({ at: null })}>show the newest</button>` : ""}</span>`}
        ${latest !== null && latest !== newest && html`<button class="quiet" onClick=${() => setNewest(latest)}>newer rows: show them</button>`}
        ${among && html`<${Part} among=${among} rule=${rule} absent=${source?.absent ?? 0} />`}
        ${selected.value.size > 0 && html`<${Selection} />`}
        ${source && html`<div class="menus"><${Saving} shown=${{ filter, at: source.version, among, rule }} total=${source.total} />
          <${Columns} all=${source.columns} chosen=${columns} /></div>`}
      </div>
      ${source && source.total > 0 && html`<${Table} rows=${source} columns=${known} sort=${query.sort} desc=${query.desc} sortBy=${sortBy} current=${current} setCurrent=${setCurrent} selected=${selected.value} at=${at} words=${words} />`}
      ${source && source.total === 0 && !rows.busy && html`<${Nothing} filter=${filter} />`}
    </div>
  </div>`;
}

/** The buffer's version if it is newer than the one shown; then rows were added since. @param {string | null} shown */
function useNewest(shown) {
  usePulse(() => {});
  const now = pulse.value?.version ?? null;
  return now !== null && shown !== null && now > Number(shown) ? now : null;
}

/** Whether the reader is at the first row still: what is read does not move away. @param {number} current */
const untouched = (current) => current === 0 && (document.querySelector(".grid")?.scrollTop ?? 0) === 0;

/** @param {{filter: string}} props */
function Nothing({ filter }) {
  if (filter) return html`<div class="empty-state"><p>No row fits the filter.</p><button onClick=${() => show({ filter: null })}>clear the filter</button></div>`;
  return html`<${Empty} says="The buffer has no rows yet." command="agentrl run quickstart" />`;
}

/**
 * The field of the filter. A key is answered at once; keys that come before its answer are asked together after it.
 * @param {{box: {current: HTMLInputElement | null}, filter: string, problem: Error | null, busy: boolean}} props
 */
function Bar({ box, filter, problem, busy }) {
  const [text, setText] = useState(filter);
  const asked = useRef(filter);
  const ask = (/** @type {string} */ value) => {
    asked.current = value.trim();
    show({ filter: asked.current });
  };
  useEffect(() => {
    const now = route.peek().params.filter ?? ""; // what is drawn may be behind what was typed since
    if (now === asked.current) return;
    asked.current = now;
    setText(now);
  }, [filter]);
  useEffect(() => {
    if (!busy && text.trim() !== asked.current) ask(text);
  }, [busy]);
  const typed = (/** @type {string} */ value) => {
    setText(value);
    if (!busy) ask(value);
  };
  return html`<div class="query">
    <label for="filter">filter</label>
    <input id="filter" ref=${box} class="mono" value=${text} spellcheck=${false} autocomplete="off" placeholder=${store ? 'success and n_tool_calls > 2, or words: gift "card of Ann"' : 'words, as in: gift "card of Ann"'} aria-invalid=${problem ? "true" : "false"}
      aria-describedby="filter-problem" onInput=${(/** @type {Event} */ event) => typed(/** @type {HTMLInputElement} */ (event.target).value)} />
    ${filter && html`<button onClick=${() => show({ filter: null })}>clear</button>`}
    <div id="filter-problem" class="wide">${problem && html`<${Problem} problem=${problem} />`}</div>
  </div>`;
}

/** Which part of the buffer is shown. @param {{among: string, rule: string | undefined, absent: number}} props */
function Part({ among, rule, absent }) {
  const inside = rule ? html`dropped by “${pieces(rule)}” of ${pieces(among)}` : html`chosen by ${pieces(among)}`;
  return html`<span class="part">${inside}${absent > 0 && html` <span class="soft">(${plural(absent, "more row")} of it not in this version)</span>`} <button class="quiet" onClick=${() => show({ among: null, rule: null })}>show all rows</button></span>`;
}

function Selection() {
  return html`<span>${plural(selected.value.size, "row")} selected
    <button class="quiet" onClick=${() => show({ filter: oneOf(selected.value) })}>show them</button>
    <button class="quiet" onClick=${() => copy(oneOf(selected.value), "filter")}>copy as a filter</button>
    <button class="quiet" onClick=${() => (selected.value = new Set())}>forget them</button>
  </span>`;
}

/** @param {{all: string[], chosen: string[]}} props */
function Columns({ all, chosen }) {
  const turn = (/** @type {string} */ name) => {
    const next = chosen.includes(name) ? chosen.filter((column) => column !== name) : [...chosen, name];
    turnTo(next);
  };
  const turnTo = (/** @type {string[]} */ next) => {
    const own = next.join(",") === COLUMNS.join(",") ? "" : next.join(",");
    if (own) localStorage.setItem("columns", own); // here, and in other windows of this browser
    else localStorage.removeItem("columns");
    change({ cols: own });
  };
  return html`<details class="columns"><summary>columns</summary><div class="menu">
    <button class="quiet" onClick=${() => turnTo(COLUMNS)}>as at first</button>
    ${all.map((name) => html`<label><input type="checkbox" checked=${chosen.includes(name)} onChange=${() => turn(name)} /> ${name}</label>`)}
  </div></details>`;
}
