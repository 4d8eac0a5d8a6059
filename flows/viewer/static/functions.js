// Values of the filter, and its functions: those that give what the server gives.

/** @typedef {"text" | "number" | "bool" | "time" | "null"} Kind times are milliseconds since 1970, UTC */
/** @typedef {string | number | boolean | null} Value */
/** @typedef {{kind: Kind, at: (row: number) => any}} Computed */

/** What is wrong with an expression, and what is allowed. */
export class Wrong extends Error {
  /** @param {string} message @param {string[]} [allowed] */
  constructor(message, allowed = []) {
    super(message);
    this.allowed = allowed;
  }
}

/** Texts in the order of their characters, as the server sorts them. @param {string} a @param {string} b */
export function order(a, b) {
  const size = Math.min(a.length, b.length);
  for (let i = 0; i < size; i++) {
    const [one, other] = [a.charCodeAt(i), b.charCodeAt(i)];
    if (one === other) continue;
    const astral = (/** @type {number} */ code) => code >= 0xd800 && code <= 0xdfff;
    return astral(one) === astral(other) ? one - other : astral(one) ? 1 : -1;
  }
  return a.length - b.length;
}

/** @param {any} a @param {any} b */
export const compare = (a, b) => (typeof a === "string" ? order(a, b) : Number(a) - Number(b));

/** @type {Record<string, (a: any, b: any) => boolean>} */
export const COMPARISONS = {
  "=": (a, b) => a === b, "==": (a, b) => a === b, "<>": (a, b) => a !== b, "!=": (a, b) => a !== b,
  "<": (a, b) => compare(a, b) < 0, "<=": (a, b) => compare(a, b) <= 0,
  ">": (a, b) => compare(a, b) > 0, ">=": (a, b) => compare(a, b) >= 0,
};

const characters = (/** @type {string} */ text) => Array.from(text);

/** Arguments by kind, the kind of what is returned, and the function; it sees no null. @type {Record<string, [Kind[], Kind, (...values: any[]) => Value]>} */
export const FUNCTIONS = {
  abs: [["number"], "number", Math.abs],
  ceil: [["number"], "number", Math.ceil],
  floor: [["number"], "number", Math.floor],
  sqrt: [["number"], "number", Math.sqrt],
  sign: [["number"], "number", Math.sign],
  exp: [["number"], "number", Math.exp],
  pow: [["number", "number"], "number", Math.pow],
  lower: [["text"], "text", (text) => text.toLowerCase()],
  upper: [["text"], "text", (text) => text.toUpperCase()],
  length: [["text"], "number", (text) => characters(text).length],
  octet_length: [["text"], "number", (text) => new TextEncoder().encode(text).length],
  starts_with: [["text", "text"], "bool", (text, part) => text.startsWith(part)],
  ends_with: [["text", "text"], "bool", (text, part) => text.endsWith(part)],
  strpos: [["text", "text"], "number", (text, part) => (text.includes(part) ? characters(text.slice(0, text.indexOf(part))).length + 1 : 0)],
  regexp_like: [["text", "text"], "bool", (text, pattern) => patternOf(pattern, "").test(text)],
};
export const SAME = { ceiling: "ceil", power: "pow", char_length: "length" };
export const FUNCTIONS_OF_SEVERAL = ["coalesce", "ifnull", "nullif", "greatest", "least", "if"];

/** @type {Map<string, RegExp>} */
const compiled = new Map();

/** @param {string} pattern @param {string} flags */
export function patternOf(pattern, flags) {
  const key = flags + pattern;
  let found = compiled.get(key);
  if (!found) {
    try {
      found = new RegExp(pattern, `${flags}u`);
    } catch (error) {
      throw new Wrong(`${JSON.stringify(pattern)} is no pattern: ${/** @type {Error} */ (error).message}`);
    }
    compiled.set(key, found);
  }
  return found;
}

/** @param {string} pattern of LIKE @param {boolean} anyCase */
export const like = (pattern, anyCase) =>
  patternOf(`^${pattern.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&").replaceAll("%", "[^]*").replaceAll("_", "[^]")}$`, anyCase ? "i" : "");

/** @param {Kind} kind @param {(...values: any[]) => Value} compute @param {Computed[]} given @returns {Computed} null if any value is null */
export function strict(kind, compute, ...given) {
  return {
    kind,
    at: (row) => {
      const values = given.map((one) => one.at(row));
      return values.includes(null) ? null : compute(...values);
    },
  };
}

/** The kind that several values share. @param {Computed[]} values */
export function shared(...values) {
  const kinds = new Set(values.map((one) => one.kind));
  kinds.delete("null");
  if (kinds.size > 1) throw new Wrong(`cannot compare ${[...kinds].join(" with ")}`);
  return /** @type {Kind} */ ([...kinds][0] ?? "null");
}

/** @param {Computed} value @param {Kind} kind @param {string} where */
export function must(value, kind, where) {
  if (value.kind !== kind && value.kind !== "null") throw new Wrong(`${where} takes ${kind === "bool" ? "true or false" : `a ${kind}`}, not a ${value.kind}`);
  return value;
}

/** AND and OR of SQL: one value decides, else null stays. @param {Value} a @param {() => Value} other @param {boolean} decides */
export function known(a, other, decides) {
  if (a === decides) return a;
  const b = other();
  return b === decides ? b : a === null || b === null ? null : !decides;
}

/** @param {string} name @param {Computed[]} values @returns {Computed} */
export function choice(name, values) {
  if (name === "if") {
    if (values.length !== 3) throw new Wrong("if takes three values");
    const [test, yes, no] = values;
    must(test, "bool", "if");
    return { kind: shared(yes, no), at: (row) => (test.at(row) === true ? yes : no).at(row) };
  }
  const kind = shared(...values);
  if (name === "nullif") {
    if (values.length !== 2) throw new Wrong("nullif takes two values");
    return { kind, at: (row) => (values[0].at(row) === values[1].at(row) ? null : values[0].at(row)) };
  }
  const all = (/** @type {number} */ row) => values.map((one) => one.at(row)).filter((value) => value !== null);
  if (name === "coalesce" || name === "ifnull") return { kind, at: (row) => all(row)[0] ?? null };
  const sign = name === "least" ? -1 : 1;
  return { kind, at: (row) => all(row).reduce((best, one) => (best === null || sign * compare(one, best) > 0 ? one : best), null) };
}

/** @param {Kind} kind @param {Value} value */
export const constant = (kind, value) => ({ kind, at: () => value, constant: true });

/** @param {string} text ISO 8601; without a zone it is UTC @returns {number} */
export function moment(text) {
  const iso = text.trim().replace(" ", "T");
  const when = Date.parse(/T.*(?:Z|[-+]\d\d:?\d\d)$/i.test(iso) || !iso.includes("T") ? iso : `${iso}Z`);
  if (Number.isNaN(when)) throw new Wrong(`'${text}' is no time; write it as in: date '2026-01-31', or '2026-01-31T12:00:00Z'::timestamptz`);
  return when;
}
