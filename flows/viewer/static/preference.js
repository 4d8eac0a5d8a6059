// Which side of a pair people think the better one.
import { json, useAnswer } from "./api.js";
import { say } from "./keys.js";
import { Problem } from "./problem.js";
import { annotate, valueOf } from "./saying.js";
import { store } from "./served.js";
import { html, useState } from "./ui.js";

/** @typedef {import("./wire.js").RowLabels} Labels */
/** @typedef {import("./wire.js").Writing} Writing */

const NAME = "preference";
/** Value -> how it is said. The left side is the chosen one. */
const VALUES = { chosen: "the left", rejected: "the right", tie: "neither" };

/** What the author said of a pair, and how to say it. An exported file has none of it. @param {string | undefined} row the chosen side @param {string} pair */
export function usePreference(row, pair) {
  const [told, setTold] = useState(0); // how often something was said
  const [refused, setRefused] = useState(/** @type {Error | null} */ (null));
  const known = useAnswer(async (stop) => {
    if (!store || !row) return null;
    const [labels, writing] = await Promise.all([/** @type {Promise<Labels>} */ (json("/api/labels/row", { row }, stop)), /** @type {Promise<Writing>} */ (json("/api/writing", {}, stop))]);
    return { labels, allowed: Boolean(writing.key), author: localStorage.getItem("author") || labels.author };
  }, [row, pair, told]);
  const target = { turn: null, token_start: null, token_end: null, pair_id: pair };
  const { labels, allowed = false, author = "" } = known.value ?? {};
  const give = (/** @type {keyof typeof VALUES | null} */ value) => {
    if (!allowed) return void say("this viewer only reads: agentrl view --write");
    if (!row) return;
    setRefused(null);
    annotate({ trajectory_id: row, ...target, author, name: NAME, value }).then(() => {
      say(value ? `${VALUES[value]} is better: saved` : "preference taken back: saved");
      setTold((number) => number + 1);
    }, setRefused);
  };
  return { given: labels && valueOf(labels.annotations, NAME, author, target), allowed, author, problem: refused ?? known.problem, give };
}

/** @param {ReturnType<typeof usePreference>} props */
export function Preference({ given, allowed, author, problem, give }) {
  if (!store) return null;
  return html`<div class="labels" role="group" aria-label="which side is better">
      <p><span class="label">which is better</span> ${/** @type {[keyof typeof VALUES, string][]} */ (Object.entries(VALUES)).map(([value, text]) => html`<button class=${value === given ? "mark on" : "mark"} aria-pressed=${value === given ? "true" : "false"} disabled=${!allowed} onClick=${() => give(value)}>${text}</button> `)}
        <span class="soft">${allowed ? `← → = by keys, as ${author}` : html`to say it, start the viewer by <code>agentrl view --write</code>`}</span></p>
    </div>
    ${problem && html`<${Problem} problem=${problem} />`}`;
}
