// The filter is one SQL expression. Bars of the facets add, replace and remove its parts, which `and` joins.

/** The parts of an expression that `and` joins at the top level. Quotes and brackets are respected, and the `and` of BETWEEN stays where it is. @param {string} expression @returns {string[]} */
export function parts(expression) {
  const parts = [];
  let [start, depth, quote, between] = [0, 0, "", false];
  for (let i = 0; i < expression.length; i++) {
    const char = expression[i];
    if (quote) {
      if (char === quote) quote = "";
    } else if (char === "'" || char === '"') quote = char;
    else if (char === "(") depth++;
    else if (char === ")") depth--;
    else if (depth === 0 && /\W/.test(expression[i - 1] ?? " ")) {
      const word = /^(between|and)\b/i.exec(expression.slice(i, i + 8))?.[1].toLowerCase();
      if (word === "between") between = true;
      else if (word === "and" && between) between = false;
      else if (word === "and") {
        parts.push(expression.slice(start, i));
        start = i + 3;
      }
    }
  }
  return [...parts, expression.slice(start)].map((part) => part.trim()).filter(Boolean);
}

/** Whether `or` stands at the top level: such an expression must stay together. @param {string} expression */
function loose(expression) {
  const outer = expression.replace(/'[^']*'|"[^"]*"/g, "_");
  let depth = 0;
  for (let i = 0; i < outer.length; i++) {
    if (outer[i] === "(") depth++;
    else if (outer[i] === ")") depth--;
    else if (depth === 0 && /^\Wor\W/i.test(outer.slice(i, i + 4))) return true;
  }
  return false;
}

/** @param {string} part @param {string} column */
function about(part, column) {
  const bare = part.replace(/^[\s("]+/, "").replace(/^not\s+/i, "").replace(/^[\s("]+/, "");
  return bare.startsWith(column) && !/\w/.test(bare[column.length] ?? " ");
}

/** A part that stays together among others. @param {string} part */
const together = (part) => (loose(part) || parts(part).length > 1 ? `(${part})` : part);

/** The expression with `part` for `column` in place of what it said about that column; without it if it was there. @param {string} expression @param {string} column @param {string} part */
export function toggled(expression, column, part) {
  const whole = loose(expression) ? [`(${expression})`] : parts(expression);
  const added = together(part);
  const others = whole.filter((condition) => condition !== added && !(about(condition, column) && !loose(condition.replace(/^\((.*)\)$/s, "$1"))));
  return [...others, ...(whole.includes(added) ? [] : [added])].join(" and ");
}

/** @param {string} expression @param {string} part */
export function has(expression, part) {
  return !loose(expression) && parts(expression).includes(together(part));
}

/** A text as a literal of SQL. @param {string} text */
export const literal = (text) => `'${text.replaceAll("'", "''")}'`;

/** Rows by their names. @param {Iterable<string>} ids */
export const oneOf = (ids) => `trajectory_id in (${[...ids].map(literal).join(", ")})`;
