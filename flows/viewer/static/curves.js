// The metrics of training by step, as columns; live ones grow.
import { json } from "./api.js";
import { signal } from "./ui.js";

/** @typedef {import("./vendor/flechette.js").Table} Table */

export class Curves {
  constructor() {
    /** @type {number[]} */
    this.steps = [];
    /** By metric; null where nothing was measured. @type {Map<string, (number | null)[]>} */
    this.columns = new Map();
    /** How often something was added. */
    this.changed = signal(0);
  }

  /** Metrics as an artifact has them. @param {Table} table */
  static of(table) {
    const curves = new Curves();
    for (const name of table.names) {
      const values = Array.from(table.getChild(name)?.toArray() ?? [], known);
      if (name === "step") curves.steps = values.map((value, i) => value ?? i);
      else curves.columns.set(name, values);
    }
    if (!table.names.includes("step")) curves.steps = Array.from({ length: table.numRows }, (_, i) => i);
    return curves;
  }

  clear() {
    this.steps.length = 0;
    this.columns.clear();
  }

  /** @param {Record<string, unknown>} line metrics of one step */
  add(line) {
    const before = this.steps.length;
    this.steps.push(known(line.step) ?? before);
    for (const name in line) {
      if (name !== "step" && name !== "time" && !this.columns.has(name)) this.columns.set(name, new Array(before).fill(null));
    }
    for (const [name, values] of this.columns) values.push(known(line[name]));
  }

  /** The value that a metric has at each step; null if it changes, or was measured once. @param {string} name */
  constant(name) {
    const values = (this.columns.get(name) ?? []).filter((value) => value !== null);
    return values.length > 1 && values.every((value) => value === values[0]) ? values[0] : null;
  }

  /** Where a step is; -1 if it is not there. @param {number} step */
  place(step) {
    return this.steps.indexOf(step);
  }
}

/** @param {unknown} value @returns {number | null} */
const known = (value) => (typeof value === "number" && Number.isFinite(value) ? value : typeof value === "bigint" ? Number(value) : null);

/** The metrics of a stage at work, which are fetched after what is here already. */
export class LiveCurves extends Curves {
  /** @param {string} run @param {string} stage */
  constructor(run, stage) {
    super();
    this.run = run;
    this.stage = stage;
    this.cursor = 0;
    this.wanted = 0;
    this.busy = false;
    this.stop = new AbortController();
  }

  close() {
    this.stop.abort();
  }

  /** Fetches the lines up to `bytes`. One request is under way at a time. @param {number} bytes */
  async need(bytes) {
    this.wanted = bytes;
    if (this.busy) return;
    this.busy = true;
    try {
      while (!this.stop.signal.aborted && this.wanted !== this.cursor) if (!(await this.fetch())) break;
    } catch {
      // The server is away, or the log is gone; the next word of the server says which.
    }
    this.busy = false;
  }

  /** @returns {Promise<boolean>} whether there was something */
  async fetch() {
    const { run, stage, cursor } = this;
    const answer = /** @type {import("./wire.js").LiveAnswer} */ (await json("/api/live/lines", { run_id: run, stage, cursor }, this.stop.signal));
    if (answer.restarted) this.clear();
    for (const line of answer.lines) this.add(JSON.parse(line));
    this.cursor = answer.cursor;
    if (answer.lines.length || answer.restarted) this.changed.value++;
    return answer.lines.length > 0;
  }
}
