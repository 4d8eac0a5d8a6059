// What the server would answer about the rows of this file. Tables are Arrow, compressed, and unpacked when they are
// asked for.
import "./vendor/flechette.js";
import { parts } from "./filter.js";

/** @typedef {import("./vendor/flechette.js").Table} Table */
/** @typedef {import("./wire.js").Contents} Contents */

const TEXT = 300; // characters of a text in a table, as the server cuts them

/** @type {Contents} */
export const contents = JSON.parse(document.getElementById("contents")?.textContent ?? "{}");

/** What is thrown where the server would say no. */
class Refusal extends Error {}

/** @param {number} status @param {string} error @param {string | null} [field] @param {string[]} [allowed] */
const refused = (status, error, field = null, allowed = []) => Object.assign(new Refusal(error), { answer: new Response(JSON.stringify({ error, field, allowed, next: null }), { status }) });

/** @type {Map<string, Promise<Table>>} */
const opened = new Map();

/** A table of the file. @param {string} id @returns {Promise<Table>} */
function table(id) {
  const answer = opened.get(id) ?? unpacked(id).then((data) => fl.tableFromIPC(data, { useDate: false }));
  opened.set(id, answer);
  return answer;
}

/** @param {string} id of a block @returns {Promise<Uint8Array>} */
async function unpacked(id) {
  const text = atob(document.getElementById(id)?.textContent ?? "");
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** @type {Map<string, {kind: string, at: (row: number) => any}> | null} */
let columns = null;

/** The scalar columns of all rows. */
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
  let rows = Array.from({ length: contents.rows }, (_, row) => row);
  for (const part of parts(filter)) rows = rows.filter(await test(part.replace(/^\((.*)\)$/s, "$1")));
  return rows;
}

const EDGE = /^(\w+) (>=|<=|<) (-?[\d.]+(?:e[-+]?\d+)?)$/;

/** A part of a filter, which no page of a file evaluates: it is a bar, an edge of bars, a list of ids, or words. @param {string} part @returns {Promise<(row: number) => boolean>} */
async function test(part) {
  for (const { column, bins } of contents.facets) {
    const bin = bins.findIndex((candidate) => candidate.where === part);
    if (bin < 0) continue;
    const codes = (await table("rows")).getChild(`#${column}`)?.toArray() ?? [];
    return (row) => codes[row] === bin;
  }
  const known = await scalars();
  const [, name, sign, edge] = EDGE.exec(part) ?? [];
  const column = known.get(name);
  if (column?.kind === "number") return (row) => {
    const value = column.at(row);
    return value !== null && (sign === ">=" ? value >= Number(edge) : sign === "<" ? value < Number(edge) : value <= Number(edge));
  };
  if (parts(part).length > 1) { // both edges of a range
    const tests = await Promise.all(parts(part).map(test));
    return (row) => tests.every((test) => test(row));
  }
  const ids = /^trajectory_id in \((.*)\)$/s.exec(part)?.[1].matchAll(/'((?:[^']|'')*)'/g);
  if (ids) {
    const chosen = new Set([...ids].map((match) => match[1].replaceAll("''", "'")));
    return (row) => chosen.has(known.get("trajectory_id")?.at(row));
  }
  const words = /^matches\(messages, '((?:[^']|'')*)'\)$/.exec(part)?.[1].replaceAll("''", "'") ?? part;
  if (/[=<>()']/.test(words)) throw refused(400, `an exported file has no expressions such as ${JSON.stringify(part.slice(0, 80))}: press bars of the histograms, or write words; the viewer of the store takes expressions`, "filter");
  const patterns = [...words.matchAll(/"([^"]+)"|(\S+)/g)].map(([, phrase, word]) => new RegExp(`(?<![\\p{L}\\p{N}])${(phrase ?? word).replace(/[.*+?^${}|[\]\\/-]/g, "\\$&")}(?![\\p{L}\\p{N}])`, "iu"));
  const texts = await rowTexts();
  return (row) => patterns.every((pattern) => pattern.test(texts[row]));
}

/** @type {Promise<string[]> | null} */
let texts = null;

/** What each row says, in the order of the rows: its prompt, and the contents, reasoning and calls of its messages. */
const rowTexts = () => (texts ??= Promise.all(contents.parts.map((_, part) => table(`part-${part}`))).then((tables) =>
  tables.flatMap((rows) => Array.from(rows.getChild("answer")?.toArray() ?? [], (answer) => {
    const { messages } = /** @type {import("./wire.js").RowAnswer} */ (JSON.parse(answer));
    return messages.map(({ content, reasoning, tool_calls: calls }) => [content, reasoning, ...calls.flatMap((call) => [call.name, call.arguments])].join("\n")).join("\n");
  })),
));

/** What is unknown comes last. @param {number[]} rows @param {string} name @param {boolean} desc */
async function sorted(rows, name, desc) {
  const column = (await scalars()).get(name);
  if (!column) throw refused(400, `there is no column ${JSON.stringify(name)}`, "sort", contents.columns.map((known) => known.name));
  const compare = (/** @type {any} */ a, /** @type {any} */ b) => (typeof a === "string" ? Number(a > b) - Number(a < b) : Number(a) - Number(b));
  return rows
    .map((row) => ({ row, value: column.at(row) }))
    .sort((a, b) => {
      if (a.value === null || b.value === null) return Number(a.value === null) - Number(b.value === null);
      return desc ? compare(b.value, a.value) : compare(a.value, b.value);
    })
    .map((pair) => pair.row);
}

/** @param {URLSearchParams} query */
async function page(query) {
  const rows = await sorted(await matching(query.get("filter") ?? ""), query.get("sort") ?? "created_at", (query.get("desc") ?? "true") === "true");
  const offset = Number(query.get("offset") ?? 0);
  const shown = rows.slice(offset, offset + Number(query.get("limit") ?? 100));
  const types = { text: fl.utf8(), number: fl.float64(), bool: fl.bool(), time: fl.timestamp(1, "UTC") };
  const every = contents.columns.map((column) => column.name).join(",");
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
  const facets = contents.facets.map((facet) => {
    const counts = facet.bins.map(() => 0);
    const codes = rows.getChild(`#${facet.column}`)?.toArray() ?? [];
    for (const row of chosen) if (codes[row] < counts.length) counts[codes[row]]++;
    return { ...facet, bins: facet.bins.map((bin, i) => ({ ...bin, filtered: counts[i] })) };
  });
  return json({ version: contents.version, total: contents.rows, filtered: chosen.length, facets: facets });
}

/** Columns of one row of a part. @param {string} id @returns {Promise<(column: string) => any>} */
async function row(id) {
  const ids = (await scalars()).get("trajectory_id");
  let offset = 0;
  while (offset < contents.rows && ids?.at(offset) !== id) offset++;
  if (offset === contents.rows) throw refused(404, `this file has no row ${JSON.stringify(id.slice(0, 200))}`, "id");
  let part = 0;
  for (; offset >= contents.parts[part]; part++) offset -= contents.parts[part];
  const columns = await table(`part-${part}`);
  return (column) => columns.getChild(column)?.at(offset);
}

/** @param {URLSearchParams} query */
async function task(query) {
  const tasks = await table("tasks");
  for (let i = 0; i < tasks.numRows; i++)
    if (tasks.getChild("env")?.at(i) === query.get("env") && tasks.getChild("task_id")?.at(i) === query.get("task_id")) return new Response(tasks.getChild("answer")?.at(i));
  throw refused(404, `no row of this file attempts task ${JSON.stringify(query.get("task_id"))}`, "task_id");
}

/** @param {any} body */
const json = (body) => new Response(JSON.stringify(body), { headers: { "content-type": "application/json" } });

/** @param {URLSearchParams} query */
async function lastWords(query) {
  const answers = query.getAll("id").map(async (id) => [id, (await row(id))("said")]);
  return json({ version: contents.version, answers: Object.fromEntries(await Promise.all(answers)) });
}

/** @type {[RegExp, (query: URLSearchParams, id: string) => Promise<Response>][]} */
const QUESTIONS = [
  [/^\/api\/rows$/, page],
  [/^\/api\/facets$/, facets],
  [/^\/api\/answers$/, lastWords],
  [/^\/api\/rows\/([^/]+)$/, async (_, id) => new Response((await row(id))("answer"))],
  [/^\/api\/tokens\/([^/]+)$/, async (_, id) => new Response((await row(id))("tokens"))],
  [/^\/api\/task$/, task],
];

/** The answer to a question, as the server words it. @param {string} address @returns {Promise<Response>} */
export async function answered(address) {
  const [path, search = ""] = address.split("?");
  const query = new URLSearchParams(search);
  try {
    const at = query.get("at");
    if (at && at !== String(contents.version)) throw refused(404, `this file holds version ${contents.version} of the buffer alone`, "at");
    for (const name of ["among", "rule"])
      if (query.get(name)) throw refused(404, `an exported file does not know ${name} ${JSON.stringify(query.get(name))}; the viewer of the store does`, name);
    for (const [pattern, answer] of QUESTIONS) {
      const match = pattern.exec(path);
      if (match) return await answer(query, decodeURIComponent(match[1] ?? ""));
    }
    throw refused(404, `an exported file does not answer ${path}; the viewer of the store does`);
  } catch (error) {
    if (error instanceof Refusal) return /** @type {any} */ (error).answer;
    throw error;
  }
}
