// The tokens of a row as columns, and the blocks in which they are drawn.
import { arrow } from "./api.js";
import { visible } from "./text.js";

/** @typedef {import("./vendor/flechette.js").Table} Table */

const BLOCK = 512;
const DECODER = new TextDecoder("utf-8", { fatal: false, ignoreBOM: true });

/** @param {Uint8Array} bits @param {number} i */
const isSet = (bits, i) => (bits[i >> 3] & (1 << (i & 7))) !== 0;

/** @param {Table} table @param {string} name @returns {Float32Array | null} NaN for null; null without the column */
function floats(table, name) {
  const column = table.getChild(name);
  if (!column) return null;
  const numbers = new Float32Array(column.length);
  let end = 0;
  for (const { length, nullCount, values, validity } of column.data) {
    numbers.set(values.subarray(0, length), end);
    if (nullCount) for (let i = 0; i < length; i++) if (!isSet(validity, i)) numbers[end + i] = NaN;
    end += length;
  }
  return numbers;
}

/** @param {Table} table @param {string} name @returns {Uint8Array | null} 1 for true; null without the column */
function flags(table, name) {
  const column = table.getChild(name);
  if (!column) return null;
  const flags = new Uint8Array(column.length);
  let end = 0;
  for (const { length, nullCount, values, validity } of column.data) {
    for (let i = 0; i < length; i++) flags[end + i] = isSet(values, i) && (!nullCount || isSet(validity, i)) ? 1 : 0;
    end += length;
  }
  return flags;
}

/** One row's tokens. Every column has `length` values; numbers that are not known are NaN. */
export class Tokens {
  /** @param {Table} table */
  constructor(table) {
    const meta = table.schema.metadata ?? new Map();
    this.length = table.numRows;
    const batch = table.getChild("text")?.data[0]; // none without tokens
    this.text = /** @type {Uint8Array} */ (batch?.values ?? new Uint8Array());
    /** Where each token begins in the text, and the end. @type {Int32Array} */
    this.bounds = batch?.offsets ?? new Int32Array(1);
    this.known = meta.get("text") === "yes";
    this.reason = meta.get("reason") ?? "";
    this.tokenizer = meta.get("tokenizer") ?? "";
    /** @type {Record<string, string>} */
    this.absent = JSON.parse(meta.get("absent") ?? "{}");
    /** @type {Record<string, string>} */
    this.sources = JSON.parse(meta.get("sources") ?? "{}");
    this.id = /** @type {Int32Array} */ (table.getChild("id")?.toArray() ?? []);
    this.mask = flags(table, "mask") ?? new Uint8Array();
    this.joined = flags(table, "joined") ?? new Uint8Array();
    this.trained = flags(table, "trained");
    /** @type {Record<string, Float32Array | null>} */
    this.columns = {};
    for (const name of ["logprob", "version", "weight", "step", "ref_logprob", "train_logprob", "entropy"]) this.columns[name] = floats(table, name);
    /** @type {Uint8Array | null} 1 for tokens of the template; null until it is asked for */
    this.template = null;
    /** @type {Map<number, string>} rule by token, where the mask's proof breaks */
    this.breaches = new Map();
  }

  /** @param {string} name @param {number} i */
  value(name, i) {
    return this.columns[name]?.[i] ?? NaN;
  }

  /** Whether the loss covers a token: by the training row if one is known, else by the mask of the row. @param {number} i */
  covered(i) {
    return Boolean(this.trained ? this.trained[i] : this.mask[i]);
  }

  /** How many tokens from `a` to `b` it covers. @param {number} a @param {number} b */
  coveredFrom(a, b) {
    return (this.trained ?? this.mask).subarray(a, b).reduce((sum, flag) => sum + flag, 0);
  }

  /** The text of the tokens from `a` to `b`, and their ids if the tokenizer is not known. @param {number} a @param {number} b */
  slice(a, b) {
    if (!this.known) return Array.from(this.id.slice(a, b), (id) => `‹${id}›`).join("");
    return a < b ? DECODER.decode(this.text.subarray(this.bounds[a], this.bounds[b])) : "";
  }

  /** One token as it is drawn: a character that several tokens make up is drawn whole with the first. @param {number} i */
  piece(i) {
    if (!this.known) return `‹${this.id[i]}›`;
    if (this.joined[i]) return "";
    let end = i + 1;
    while (end < this.length && this.joined[end]) end++;
    return visible(this.slice(i, end));
  }

  /**
   * What the chat template put around a message is folded: its special tokens, and a header such as `<|im_start|>tool`.
   * The first of several tokens stands for them all. Token by token, as far as the text of the row says it.
   * @param {number} i
   */
  folds(i) {
    if (!this.known) return "";
    this.template ??= templates(this);
    const kind = this.template[i];
    return kind ? (this.template[i - 1] && this.covered(i - 1) === this.covered(i) ? " template" : " template first") : "";
  }

  /** @param {number} i */
  endsLine(i) {
    return this.known && this.text[this.bounds[i + 1] - 1] === 0x0a;
  }

  /** Where to cut the tokens from `a` to `b`: after a line break, if there is one in the second half of a block; never inside a character. @param {number} a @param {number} b @returns {[number, number][]} */
  blocks(a, b) {
    /** @type {[number, number][]} */
    const spans = [];
    while (b - a > BLOCK) {
      let cut = a + BLOCK;
      while (cut > a + BLOCK / 2 && !this.endsLine(cut - 1)) cut--;
      if (!this.endsLine(cut - 1)) cut = a + BLOCK;
      while (cut > a + 1 && this.joined[cut]) cut--;
      spans.push([a, cut]);
      a = cut;
    }
    if (a < b) spans.push([a, b]);
    return spans;
  }
}

/** What a chat template puts around messages. */
export const SPECIAL = /<\|(?:im_start|start_header_id)\|>\w*(?:<\|end_header_id\|>)?\n?|<\|\w{1,40}\|>\n?|<\/?(?:start_of_turn|end_of_turn|bos|eos|s)>/g;

/** Which tokens are of the chat template, by their text. Bytes are letters here, so that places in the text are bytes. @param {Tokens} tokens */
function templates({ text, bounds, length }) {
  const letters = new TextDecoder("latin1").decode(text);
  const covered = new Uint8Array(length);
  let i = 0;
  for (const match of letters.matchAll(SPECIAL)) {
    const end = match.index + match[0].length;
    while (i < length && bounds[i] < match.index) i++;
    for (; i < length && bounds[i + 1] <= end; i++) covered[i] = 1;
  }
  return covered;
}

/** @param {string} path @param {import("./api.js").Params} params @param {AbortSignal} [stop] */
export const fetchSequence = async (path, params, stop) => new Tokens((await arrow(path, params, stop)).table);

/** @param {string} id @param {string | undefined} at @param {AbortSignal} [stop] */
export const fetchTokens = (id, at, stop) => fetchSequence(`/api/tokens/${encodeURIComponent(id)}`, { at }, stop);

/**
 * The tokens that each message shows: its own span, and what stands between it and the message before (role headers,
 * line breaks). So every token is shown once. Messages without a span show none; if none has one, the last shows all.
 * @param {import("./wire.js").ShownMessage[]} messages
 * @param {number} length
 * @returns {[number, number][]}
 */
export function shares(messages, length) {
  const spanned = messages.findLastIndex((message) => message.token_end !== null);
  const last = spanned < 0 ? messages.length - 1 : spanned;
  let end = 0;
  return messages.map((message, i) => {
    const from = end;
    end = i === last ? length : Math.max(end, message.token_end ?? end);
    return [from, end];
  });
}
