// Rows of the buffer, fetched in pages as the table shows them.
import { arrow, json } from "./api.js";
import { signal } from "./ui.js";

/** @typedef {import("./vendor/flechette.js").Table} Table */
/**
 * @typedef {{
 *   filter: string, sort: string, desc: boolean, at: string | undefined, columns: string, among: string | undefined, rule: string | undefined,
 * }} Query `columns` has commas; `among` and `rule` are a part of the buffer
 */
/** @typedef {(column: string) => any} Cells the values of one row, by column */

const PAGE = 200;

/** What the policy said last, which stands in no column: asked for the rows in view alone. */
class LastWords {
  /** @param {string | undefined} at */
  constructor(at) {
    this.at = at;
    /** @type {Map<string, string | null>} null while it is fetched */
    this.known = new Map();
    this.changed = signal(0);
  }

  /** @param {string[]} ids */
  async need(ids) {
    const asked = ids.filter((id) => !this.known.has(id)).slice(0, 60);
    if (!asked.length) return;
    for (const id of asked) this.known.set(id, null);
    const answers = /** @type {import("./wire.js").Answers | null} */ (await json("/api/answers", { id: asked, at: this.at }).catch(() => null));
    for (const id of asked) this.known.set(id, answers?.answers[id] ?? "");
    this.changed.value++;
  }
}

/** The columns that the server has. @param {string} columns */
const scalar = (columns) => columns.split(",").filter((name) => name !== "answer").join(",");

/** Names of the columns that the rows have, also of those that were not asked for. @param {Headers} headers */
const all = (headers) => ["answer", ...(headers.get("X-Columns") ?? "").split(",")];

/** All rows that a query finds. After the first page every page is read from the same version, so that rows never shift. */
export class Rows {
  /** @param {Query} query */
  constructor(query) {
    this.query = query;
    this.stop = new AbortController();
    /** @type {Map<number, Table | null>} null while it is fetched */
    this.pages = new Map();
    /** @type {string[]} */
    this.columns = [];
    this.total = 0;
    this.absent = 0; // rows of an artifact that this version of the buffer does not have
    /** What the filter searches for. @type {string[]} */
    this.words = [];
    /** @type {string | undefined} */
    this.version = query.at;
    this.changed = signal(0);
    this.said = new LastWords(query.at);
    /** @type {Error | null} of a page after the first */
    this.problem = null;
  }

  /** The first page. @returns {Promise<this>} */
  async open() {
    await this.fetch(0);
    return this;
  }

  close() {
    this.stop.abort();
  }

  /** @param {number} page */
  async fetch(page) {
    this.pages.set(page, null);
    const params = { ...this.query, columns: scalar(this.query.columns), at: this.version, offset: page * PAGE, limit: PAGE };
    try {
      const { table, headers } = await arrow("/api/rows", params, this.stop.signal);
      this.pages.set(page, table);
      this.columns = all(headers);
      this.total = Number(headers.get("X-Total"));
      this.words = JSON.parse(headers.get("X-Words") ?? "[]");
      this.absent = Number(headers.get("X-Absent"));
      this.version ??= headers.get("X-Version") ?? undefined;
      this.changed.value++;
    } catch (error) {
      this.pages.delete(page);
      if (!this.stop.signal.aborted) throw error;
    }
  }

  /** Fetches what is not there yet of the rows from `first` to `last`. @param {number} first @param {number} last */
  need(first, last) {
    const end = Math.min(last, this.total - 1);
    for (let page = Math.floor(first / PAGE); page * PAGE <= end; page++) if (!this.pages.has(page)) this.more(page);
  }

  /** @param {number} page */
  async more(page) {
    try {
      await this.fetch(page);
    } catch (error) {
      this.problem = /** @type {Error} */ (error);
      this.pages.set(page, null); // not asked for again until the reader reloads
      this.changed.value++;
    }
  }

  /** @param {number} index @returns {Cells | null} null if the row is not here yet */
  row(index) {
    const table = this.pages.get(Math.floor(index / PAGE));
    return table ? (column) => table.getChild(column)?.at(index % PAGE) : null;
  }
}
