// What the server answers: JSON for small things, Arrow for rows and tokens.
import "./vendor/flechette.js";
import { address } from "./location.js";
import { ask } from "./served.js";
import { useLayoutEffect, useState } from "./ui.js";

/** @typedef {import("./vendor/flechette.js").Table} Table */
/** @typedef {Record<string, string | number | boolean | null | undefined | string[]>} Params */

/** An answer that says no: what was wrong with which field, what is allowed, and what to do next. */
export class Refused extends Error {
  /** @param {import("./wire.js").Refusal} refusal @param {number} status */
  constructor(refusal, status) {
    super(refusal.error);
    this.refusal = refusal;
    this.status = status;
  }
}

/** @param {string} path @param {Params} params @param {AbortSignal} [signal] */
const get = (path, params, signal) => sent(address(path, params), { signal, headers: { Accept: "*/*" } });

/** @param {string} to @param {RequestInit} how */
async function sent(to, how) {
  const answer = await ask(to, how).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Refused({ error: "the viewer's server does not answer", field: null, allowed: [], next: "agentrl view" }, 0);
  });
  if (answer.ok) return answer;
  const text = await answer.text();
  let refusal = { error: `${answer.status} ${answer.statusText}`, field: null, allowed: [], next: null };
  try {
    refusal = { ...refusal, ...JSON.parse(text) };
  } catch {
    // A proxy in between may answer with something else than our JSON; the status says enough.
  }
  throw new Refused(refusal, answer.status);
}

/** @template T @param {string} path @param {Params} [params] @param {AbortSignal} [signal] @returns {Promise<T>} */
export async function json(path, params = {}, signal) {
  return (await get(path, params, signal)).json();
}

/** @param {string} path @param {Params} [params] @param {AbortSignal} [signal] @returns {Promise<Uint8Array>} */
export async function bytes(path, params = {}, signal) {
  return new Uint8Array(await (await get(path, params, signal)).arrayBuffer());
}

/** An Arrow table and the headers of its answer. @param {string} path @param {Params} [params] @param {AbortSignal} [signal] @returns {Promise<{table: Table, headers: Headers}>} */
export async function arrow(path, params = {}, signal) {
  const answer = await get(path, params, signal);
  return { table: fl.tableFromIPC(new Uint8Array(await answer.arrayBuffer()), { useDate: false }), headers: answer.headers };
}

/** What POST needs; null until it is known. @type {string | null} */
let key = null;

/** Has something done; only with `agentrl view --write`. @param {string} path @param {object} body @returns {Promise<any>} null if there is nothing to say */
export async function post(path, body) {
  key ??= /** @type {import("./wire.js").Writing} */ (await json("/api/writing")).key;
  if (!key) throw new Refused({ error: "this viewer only reads", field: null, allowed: [], next: "agentrl view --write" }, 405);
  const headers = { "Content-Type": "application/json", "X-Agentrl-Key": key };
  try {
    const answer = await sent(path, { method: "POST", headers, body: JSON.stringify(body) });
    return answer.status === 204 ? null : answer.json();
  } catch (problem) {
    key = null; // a server that began again has another
    throw problem;
  }
}

/**
 * What `load` returns for `inputs`. The old value stays until the new one is there, so that content never jumps.
 * @template T
 * @param {(signal: AbortSignal) => Promise<T>} load
 * @param {readonly unknown[]} inputs
 * @returns {{value: T | null, problem: Error | null, busy: boolean}}
 */
export function useAnswer(load, inputs) {
  const [state, setState] = useState(
    /** @type {{value: T | null, problem: Error | null, busy: boolean}} */ ({ value: null, problem: null, busy: true }),
  );
  useLayoutEffect(() => { // other effects wait until the browser has painted
    const stop = new AbortController();
    setState((old) => ({ ...old, busy: true }));
    load(stop.signal).then(
      (value) => stop.signal.aborted || setState({ value, problem: null, busy: false }),
      (problem) => stop.signal.aborted || setState((old) => ({ value: old.value, problem, busy: false })),
    );
    return () => stop.abort();
  }, inputs);
  return state;
}
