// What the server would answer about the rows of this file. Tables are Arrow, compressed, and unpacked when they are
// asked for.
import "./vendor/flechette.js";
import { matcher } from "./expression.js";
import { Wrong, order } from "./functions.js";

/** @typedef {import("./vendor/flechette.js").Table} Table */
/** @typedef {import("./wire.js").Contents} Contents */

const TEXT = 300; // characters of a text in a table, as the server cuts them

/** @type {Contents} */
export const contents = JSON.parse(document.getElementById("contents")?.textContent ?? "{}");

class Refusal extends Error {
  /** @param {number} status @param {import("./wire.js").Refusal} body */
  constructor(status, body) {
    super(body.error);
    this.status = status;
    this.body = body;
  }
}

/** @param {number} status @param {string} error @param {string | null} [field] @param {string[]} [allowed] */
const refused = (status, error, field = null, allowed = []) => new Refusal(status, { error, field, allowed, next: null });

/** @type {Map<string, Promise<Table>>} */
const opened = new Map();

/** A table of the file. @param {string} id @returns {Promise<Table>} */
function table(id) {
  const found = opened.get(id) ?? unpacked(id).then((data) => fl.tableFromIPC(data, { useDate: false }));
  opened.set(id, found);
  return found;
}

/** @param {string} id of a block @returns {Promise<Uint8Array>} */
async function unpacked(id) {
  const text = atob(document.getElementById(id)?.textContent ?? "");
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** @type {Map<string, {kind: import("./functions.js").Kind, at: (row: number) => any}> | null} */
let columns = null;

/** The scalar columns of all rows, as the filter reads them. */
async function scalars() {
  if (columns) return columns;
  const rows = await table("rows");
  columns = new Map(
    contents.columns.map(({ name, kind }) => {
      const values = rows.getChild(name)?.toArray() ?? [];
      return [name, { kind, at: (row) => values[row] ?? null }];
    }),
  );
  return columns;
}

/** Numbers of the rows that a filter finds; rows are in the order of their ids. @param {string} filter */
async function matching(filter) {
  const all = Array.from({ length: contents.rows }, (_, row) => row);
  const known = await scalars();
  return filter.trim() ? all.filter(matcher(filter, known)) : all;
}

/** What is unknown comes last. @param {number[]} rows @param {string} name @param {boolean} desc */
async function sorted(rows, name, desc) {
  const column = (await scalars()).get(name);
  if (!column) throw refused(400, `there is no column ${JSON.stringify(name)}`, "sort", contents.columns.map((one) => one.name));
  const compare = (/** @type {any} */ a, /** @type {any} */ b) => (typeof a === "string" ? order(a, b) : Number(a) - Number(b));
  return rows
    .map((row) => ({ row, value: column.at(row) }))
    .sort((a, b) => {
      if (a.value === null || b.value === null) return Number(a.value === null) - Number(b.value === null);
      return desc ? compare(b.value, a.value) : compare(a.value, b.value);
    })
    .map((one) => one.row);
}

/** @param {URLSearchParams} query */
async function page(query) {
  const rows = await sorted(await matching(query.get("filter") ?? ""), query.get("sort") ?? "created_at", (query.get("desc") ?? "true") === "true");
  const offset = Number(query.get("offset") ?? 0);
  const shown = rows.slice(offset, offset + Number(query.get("limit") ?? 100));
  const types = { text: fl.utf8(), number: fl.float64(), bool: fl.bool(), time: fl.timestamp(1, "UTC") };
  const every = contents.columns.map((one) => one.name).join(",");
  const [kinds, values] = /** @type {Record<string, any>[]} */ ([{}, {}]);
  const wanted = new Set(["trajectory_id", ...(query.get("columns") || every).split(",")]);
  for (const { name, kind } of contents.columns) {
    if (!wanted.has(name)) continue;
    const column = (await scalars()).get(name);
    kinds[name] = types[kind];
    values[name] = shown.map((row) => cut(column?.at(row)));
  }
  const body = fl.tableToIPC(fl.tableFromArrays(values, { types: kinds }), { format: "stream" });
  return new Response(body, { headers: { "X-Total": String(rows.length), "X-Version": String(contents.version), "X-Columns": every } });
}

/** @param {any} value */
const cut = (value) => (typeof value === "string" && value.length > TEXT ? Array.from(value.slice(0, 2 * TEXT)).slice(0, TEXT).join("") : value);

/** @param {URLSearchParams} query */
async function facets(query) {
  const [rows, chosen] = [await table("rows"), await matching(query.get("filter") ?? "")];
  const found = contents.facets.map((facet) => {
    const counts = facet.bins.map(() => 0);
    const codes = rows.getChild(`#${facet.column}`)?.toArray() ?? [];
    for (const row of chosen) if (codes[row] < counts.length) counts[codes[row]]++;
    return { ...facet, bins: facet.bins.map((bin, i) => ({ ...bin, filtered: counts[i] })) };
  });
  return json({ version: contents.version, total: contents.rows, filtered: chosen.length, facets: found });
}

/** Columns of one row of a part. @param {string} id @returns {Promise<(column: string) => any>} */
async function row(id) {
  const ids = (await scalars()).get("trajectory_id");
  let place = 0;
  while (place < contents.rows && ids?.at(place) !== id) place++;
  if (place === contents.rows) throw refused(404, `this file has no row ${JSON.stringify(id.slice(0, 200))}`, "id");
  let part = 0;
  for (; place >= contents.parts[part]; part++) place -= contents.parts[part];
  const found = await table(`part-${part}`);
  return (column) => found.getChild(column)?.at(place);
}

/** @param {URLSearchParams} query */
async function task(query) {
  const tasks = await table("tasks");
  for (let i = 0; i < tasks.numRows; i++)
    if (tasks.getChild("env")?.at(i) === query.get("env") && tasks.getChild("task_id")?.at(i) === query.get("task_id")) return new Response(tasks.getChild("answer")?.at(i));
  throw refused(404, `no row of this file attempts task ${JSON.stringify(query.get("task_id"))}`, "task_id");
}

/** Where two rows part, by their tokens. @param {URLSearchParams} query */
async function aligned(query) {
  const [a, b] = [query.get("a") ?? "", query.get("b") ?? ""];
  const rows = await Promise.all([row(a), row(b)]);
  const ids = rows.map((one) => fl.tableFromIPC(one("tokens")).getChild("id")?.toArray() ?? []);
  const [one, other] = rows.map((found) => /** @type {import("./wire.js").RowAnswer} */ (JSON.parse(found("answer"))));
  const known = ids.every((list) => list.length) && rows[0]("tokenizer") === rows[1]("tokenizer");
  let shared = 0;
  while (known && shared < Math.min(ids[0].length, ids[1].length) && ids[0][shared] === ids[1][shared]) shared++;
  const at = (/** @type {import("./wire.js").RowAnswer} */ { messages }) => {
    const found = messages.findIndex((message) => message.token_end !== null && shared < message.token_end);
    return known && found >= 0 ? found : null;
  };
  return json({
    version: contents.version, a, b,
    shared: known ? shared : null,
    reason: known ? "" : "a row has no tokens, or the tokenizers of both differ",
    message_a: at(one), message_b: at(other),
    same: known && ids.every((list) => list.length === shared),
    flipped: one.row.success !== null && other.row.success !== null && one.row.success !== other.row.success,
  });
}

/** @param {any} body */
const json = (body) => new Response(JSON.stringify(body), { headers: { "content-type": "application/json" } });

/** @type {[RegExp, (query: URLSearchParams, id: string) => Promise<Response>][]} */
const QUESTIONS = [
  [/^\/api\/rows$/, page],
  [/^\/api\/facets$/, facets],
  [/^\/api\/rows\/([^/]+)$/, async (_, id) => new Response((await row(id))("answer"))],
  [/^\/api\/tokens\/([^/]+)$/, async (_, id) => new Response((await row(id))("tokens"))],
  [/^\/api\/tokens\/([^/]+)\/text$/, async (_, id) => new Response((await row(id))("text"))],
  [/^\/api\/task$/, task],
  [/^\/api\/align$/, aligned],
];

/** The answer to a question, as the server words it. @param {string} address @returns {Promise<Response>} */
export async function answered(address) {
  const [path, search = ""] = address.split("?");
  const query = new URLSearchParams(search);
  try {
    const at = query.get("at");
    if (at && at !== String(contents.version)) throw refused(404, `this file holds version ${contents.version} of the buffer alone`, "at");
    for (const name of ["among", "rule", "lasso"])
      if (query.get(name)) throw refused(404, `an exported file does not know ${name} ${JSON.stringify(query.get(name))}; the viewer of the store does`, name);
    for (const [pattern, answer] of QUESTIONS) {
      const match = pattern.exec(path);
      if (match) return await answer(query, decodeURIComponent(match[1] ?? ""));
    }
    throw refused(404, path === "/api/search" ? "an exported file has no index to search" : `an exported file does not answer ${path}; the viewer of the store does`);
  } catch (error) {
    const said = error instanceof Wrong ? refused(400, error.message, "filter", error.allowed) : error;
    if (!(said instanceof Refusal)) throw said;
    return new Response(JSON.stringify(said.body), { status: said.status });
  }
}
