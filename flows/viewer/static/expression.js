// The filter, computed in the page: an exported file has no server. It is the part of SQL that people write into the
// filter box, with null as SQL has it; the rest is refused by name.

import { COMPARISONS, FUNCTIONS, FUNCTIONS_OF_SEVERAL, SAME, Wrong, choice, compare, constant, known, like, moment, must, patternOf, shared, strict } from "./functions.js";

/** @typedef {import("./functions.js").Computed} Computed */
/** @typedef {Map<string, Computed>} Columns */

const LONGEST = 4000;
const TOKEN = /\s*(?:'((?:[^']|'')*)'|"((?:[^"]|"")*)"|(\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+)|([A-Za-z_]\w*)|(<>|!=|<=|>=|==|::|!~|[-+*/%()=<>,~]))/y;

const RESERVED = ["and", "or", "not", "in", "is", "between", "like", "ilike", "then", "else", "end", "when"];

/** @typedef {{kind: "literal" | "name" | "number" | "word" | "mark" | "end", text: string}} Token */

/** @param {string} text @returns {Token[]} */
function tokens(text) {
  const found = [];
  let end = 0;
  while (/\S/.test(text.slice(end))) {
    TOKEN.lastIndex = end;
    const match = TOKEN.exec(text);
    if (!match) throw new Wrong(`${JSON.stringify(text.slice(end).trim().slice(0, 20))} has no place in a filter`);
    end = TOKEN.lastIndex;
    const [, literal, name, number, word, mark] = match;
    if (literal !== undefined) found.push({ kind: /** @type {const} */ ("literal"), text: literal.replaceAll("''", "'") });
    else if (name !== undefined) found.push({ kind: /** @type {const} */ ("name"), text: name.replaceAll('""', '"') });
    else if (number !== undefined) found.push({ kind: /** @type {const} */ ("number"), text: number });
    else if (word !== undefined) found.push({ kind: /** @type {const} */ ("word"), text: word });
    else found.push({ kind: /** @type {const} */ ("mark"), text: mark });
  }
  return found;
}

class Parser {
  /** @param {string} text @param {Columns} columns */
  constructor(text, columns) {
    this.tokens = tokens(text);
    this.columns = columns;
    this.place = 0;
  }

  /** @returns {Token} */
  get next() {
    return this.tokens[this.place] ?? { kind: "end", text: "" };
  }

  /** Takes one of these marks or words if it comes next. @param {string[]} wanted */
  take(...wanted) {
    const { kind, text } = this.next;
    const low = text.toLowerCase();
    if ((kind !== "mark" && kind !== "word") || !wanted.includes(low)) return null;
    this.place++;
    return low;
  }

  /** @param {string} wanted */
  need(wanted) {
    if (!this.take(wanted)) throw new Wrong(`the filter is wrong: ${JSON.stringify(wanted)} is missing${this.next.text ? ` before ${JSON.stringify(this.next.text.slice(0, 20))}` : " at its end"}`);
  }

  /** @returns {Computed} */
  whole() {
    const found = this.or();
    if (this.next.kind !== "end") throw new Wrong(`the filter is wrong: ${JSON.stringify(this.next.text.slice(0, 20))} has no place there`);
    return found;
  }

  /** @returns {Computed} */
  or() {
    let found = this.and();
    while (this.take("or")) {
      const [a, b] = [must(found, "bool", "or"), must(this.and(), "bool", "or")];
      found = { kind: "bool", at: (row) => known(a.at(row), () => b.at(row), true) };
    }
    return found;
  }

  /** @returns {Computed} */
  and() {
    let found = this.not();
    while (this.take("and")) {
      const [a, b] = [must(found, "bool", "and"), must(this.not(), "bool", "and")];
      found = { kind: "bool", at: (row) => known(a.at(row), () => b.at(row), false) };
    }
    return found;
  }

  /** @returns {Computed} */
  not() {
    if (!this.take("not")) return this.comparison();
    return strict("bool", (value) => !value, must(this.not(), "bool", "not"));
  }

  /** @returns {Computed} */
  comparison() {
    let found = this.sum();
    for (;;) {
      const sign = this.take(...Object.keys(COMPARISONS));
      if (sign) {
        const other = this.sum();
        shared(found, other);
        found = strict("bool", COMPARISONS[sign], found, other);
        continue;
      }
      const match = this.take("~", "!~");
      if (match) {
        const fits = match === "~";
        found = strict("bool", (text, pattern) => patternOf(pattern, "").test(text) === fits, must(found, "text", match), must(this.sum(), "text", match));
        continue;
      }
      if (this.take("is")) {
        found = this.is(found);
        continue;
      }
      const before = this.place;
      const no = this.take("not") !== null;
      const word = this.take("in", "between", "like", "ilike");
      if (!word) {
        this.place = before;
        return found;
      }
      const test = word === "in" ? this.in(found) : word === "between" ? this.between(found) : this.like(found, word);
      found = no ? strict("bool", (value) => !value, test) : test;
    }
  }

  /** @param {Computed} value @returns {Computed} */
  is(value) {
    const no = this.take("not") !== null;
    const word = this.take("null", "true", "false");
    if (!word) throw new Wrong("the filter is wrong: after `is` comes null, true or false");
    if (word === "null") return { kind: "bool", at: (row) => (value.at(row) === null) !== no };
    return strict("bool", (found) => (found === (word === "true")) !== no, must(value, "bool", `is ${word}`)); // null stays, as in Polars
  }

  /** @param {Computed} value @returns {Computed} */
  in(value) {
    this.need("(");
    const list = [this.or()];
    while (this.take(",")) list.push(this.or());
    this.need(")");
    shared(value, ...list);
    const plain = list.every((one) => "constant" in one) ? new Set(list.map((one) => one.at(0))) : null;
    return strict("bool", (found) => found, { kind: "bool", at: (row) => {
      const found = value.at(row);
      return found === null ? null : plain ? plain.has(found) : list.some((one) => one.at(row) === found);
    } });
  }

  /** @param {Computed} value @returns {Computed} */
  between(value) {
    const low = this.sum();
    this.need("and");
    const high = this.sum();
    shared(value, low, high);
    return strict("bool", (one, from, to) => compare(one, from) >= 0 && compare(one, to) <= 0, value, low, high);
  }

  /** @param {Computed} value @param {string} word @returns {Computed} */
  like(value, word) {
    return strict("bool", (text, pattern) => like(pattern, word === "ilike").test(text), must(value, "text", word), must(this.sum(), "text", word));
  }

  /** @returns {Computed} */
  sum() {
    let found = this.product();
    for (let sign = this.take("+", "-"); sign; sign = this.take("+", "-")) {
      const plus = sign === "+";
      found = strict("number", (a, b) => (plus ? a + b : a - b), must(found, "number", sign), must(this.product(), "number", sign));
    }
    return found;
  }

  /** @returns {Computed} */
  product() {
    let found = this.signed();
    for (let sign = this.take("*", "/"); sign; sign = this.take("*", "/")) {
      const times = sign === "*";
      found = strict("number", (a, b) => (times ? a * b : a / b), must(found, "number", sign), must(this.signed(), "number", sign));
    }
    return found;
  }

  /** @returns {Computed} */
  signed() {
    if (this.take("-")) return strict("number", (value) => -value, must(this.signed(), "number", "-"));
    return this.take("+") ? must(this.signed(), "number", "+") : this.cast(this.value());
  }

  /** @param {Computed} value @returns {Computed} */
  cast(value) {
    if (!this.take("::")) return value;
    const to = this.take("date", "timestamp", "timestamptz");
    if (!to) throw new Wrong(`an exported file does not know ::${this.next.text}`, ["date", "timestamp", "timestamptz"]);
    return strict("time", moment, must(value, "text", `::${to}`));
  }

  /** @returns {Computed} */
  value() {
    const { kind, text } = this.next;
    this.place++;
    if (kind === "literal") return constant("text", text);
    if (kind === "number") return constant("number", Number(text));
    if (kind === "name") return this.column(text);
    const low = text.toLowerCase();
    if (kind === "mark" && text === "(") {
      const found = this.or();
      this.need(")");
      return found;
    }
    if (kind !== "word" || RESERVED.includes(low)) throw new Wrong(text ? `the filter is wrong: ${JSON.stringify(text)} has no place there` : "the filter is wrong: something is missing at its end");
    if (low === "true" || low === "false") return constant("bool", low === "true");
    if (low === "null") return constant("null", null);
    if (low === "case") return this.cases();
    if (["date", "timestamp", "timestamptz"].includes(low) && this.next.kind === "literal") {
      const when = moment(this.next.text);
      this.place++;
      return constant("time", when);
    }
    return this.next.kind === "mark" && this.next.text === "(" ? this.call(low) : this.column(text);
  }

  /** @param {string} name @returns {Computed} */
  column(name) {
    const found = this.columns.get(name);
    if (!found) throw new Wrong(`there is no column '${name}'; a text stands in single quotes`, [...this.columns.keys()]);
    return found;
  }

  /** @param {string} given @returns {Computed} */
  call(given) {
    const name = /** @type {Record<string, string>} */ (SAME)[given] ?? given;
    const known = Object.hasOwn(FUNCTIONS, name) ? FUNCTIONS[name] : null;
    if (!known && !FUNCTIONS_OF_SEVERAL.includes(name)) throw new Wrong(`an exported file has no function '${given}'`, [...Object.keys(FUNCTIONS), ...FUNCTIONS_OF_SEVERAL].sort());
    this.need("(");
    const values = [this.or()];
    while (this.take(",")) values.push(this.or());
    this.need(")");
    if (!known) return choice(name, values);
    const [kinds, kind, compute] = known;
    if (values.length !== kinds.length) throw new Wrong(`${given} takes ${kinds.length} value${kinds.length === 1 ? "" : "s"}, not ${values.length}`);
    return strict(kind, compute, ...values.map((value, i) => must(value, kinds[i], given)));
  }

  /** @returns {Computed} */
  cases() {
    const subject = this.next.text.toLowerCase() === "when" ? null : this.or();
    /** @type {[Computed, Computed][]} */
    const branches = [];
    while (this.take("when")) {
      const test = this.or();
      if (subject) shared(subject, test);
      this.need("then");
      branches.push([subject ? strict("bool", (a, b) => a === b, subject, test) : must(test, "bool", "when"), this.or()]);
    }
    const other = this.take("else") ? this.or() : constant("null", null);
    this.need("end");
    const kind = shared(other, ...branches.map(([, value]) => value));
    return { kind, at: (row) => (branches.find(([test]) => test.at(row) === true)?.[1] ?? other).at(row) };
  }
}

/**
 * Whether an expression is true of a row, by its number; null is not true.
 * @param {string} text
 * @param {Columns} columns
 * @returns {(row: number) => boolean}
 */
export function matcher(text, columns) {
  if (text.length > LONGEST) throw new Wrong(`the filter has ${text.length} characters; at most ${LONGEST} are allowed`);
  /** @type {Computed} */
  let found;
  try {
    found = new Parser(text, columns).whole();
  } catch (error) {
    if (error instanceof RangeError) throw new Wrong("the filter is nested too deep");
    throw error;
  }
  if (found.kind !== "bool" && found.kind !== "null") throw new Wrong(`the filter gives a ${found.kind}, not true or false; compare it with something`);
  return (row) => found.at(row) === true;
}
