// Preference pairs: what both sides share, where they part, and what the loss covers.
import { json, useAnswer } from "./api.js";
import { count, decimal, plural } from "./format.js";
import { say, useKeys } from "./keys.js";
import { address, change, go, route, rowAddress } from "./location.js";
import { Empty, instead, Problem } from "./problem.js";
import { annotate, valueOf } from "./saying.js";
import { store } from "./served.js";
import { pieces, visible } from "./text.js";
import { fetchSequence } from "./tokens.js";
import { html, Lines, useState } from "./ui.js";
import { Versus } from "./versus.js";

/** @typedef {import("./wire.js").PairSide} PairSide */

const PAGE = 100;

export function PairPage() {
  const { artifact, pair_id, offset = "0" } = route.value.params;
  return pair_id && artifact ? html`<${One} artifact=${artifact} pair=${pair_id} />` : html`<${All} artifact=${artifact} offset=${Number(offset) || 0} />`;
}

/** @param {{artifact: string | undefined, offset: number}} props */
function All({ artifact, offset }) {
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").PairLines>} */ (json("/api/pairs", { artifact, offset, limit: PAGE }, stop)), [artifact, offset]);
  if (problem || !value) return instead(problem, "reading the pairs", "Pairs");
  if (!value.artifact) return html`<h1>Pairs</h1><${Empty} says="No stage made preference pairs yet." command="agentrl run methods/eto" />`;
  return html`<h1>Pairs</h1>
    <p><select aria-label="artifact" onChange=${(/** @type {Event} */ event) => change({ artifact: /** @type {HTMLSelectElement} */ (event.target).value, offset: null })}>
      ${value.artifacts.map((name) => html`<option value=${name} selected=${name === value.artifact}>${name}</option>`)}
    </select> <span class="soft">${plural(value.total, "pair")}</span></p>
    <${Lines} label="pairs" heads=${["pair", "task", "kind", "#shared tokens", "#chosen", "#rejected"]}>
      ${value.pairs.map((pair) => html`<tr><td><a href=${address("/pair", { artifact: value.artifact, pair_id: pair.pair_id })}>${visible(pair.pair_id)}</a></td><td>${pieces(pair.task_id)}</td><td>${pair.kind}</td><td class="number">${count(pair.shared_prefix)}</td><td class="number">${decimal(pair.chosen_reward)}</td><td class="number">${decimal(pair.rejected_reward)}</td></tr>`)}
    <//>
    <p>${offset > 0 && html`<button onClick=${() => change({ offset: Math.max(0, offset - PAGE) || null })}>before</button>`} ${offset + PAGE < value.total && html`<button onClick=${() => change({ offset: offset + PAGE })}>next</button>`}</p>`;
}

/** @param {{artifact: string, pair: string}} props */
function One({ artifact, pair }) {
  const { value, problem } = useAnswer(async (stop) => {
    const asked = { artifact, pair_id: pair };
    const side = (/** @type {string} */ name) => fetchSequence("/api/pair/tokens", { ...asked, side: name }, stop);
    const [answer, chosen, rejected] = await Promise.all([/** @type {Promise<import("./wire.js").PairAnswer>} */ (json("/api/pair", asked, stop)), side("chosen"), side("rejected")]);
    return { answer, chosen, rejected };
  }, [artifact, pair]);
  const to = (/** @type {string | null | undefined} */ other) => address("/pair", { artifact, pair_id: other });
  const turn = (/** @type {string | null | undefined} */ other) => other && go(to(other));
  const preference = usePreference(value?.answer.chosen.trajectory_id, pair);
  useKeys({
    ArrowLeft: { does: "the left one is better", run: () => preference.give("chosen") },
    ArrowRight: { does: "the right one is better", run: () => preference.give("rejected") },
    "=": { does: "neither is better", run: () => preference.give("tie") },
    x: { does: "take back which is better", run: () => preference.give(null) },
    n: { does: "next pair", run: () => turn(value?.answer.next) },
    p: { does: "previous pair", run: () => turn(value?.answer.previous) },
  });
  if (problem || !value) return instead(problem, "reading the pair", visible(pair));
  const { answer, chosen, rejected } = value;
  const name = (/** @type {PairSide} */ side, /** @type {string} */ word) => html`${word}: <a href=${rowAddress(side.trajectory_id)}>${visible(side.trajectory_id)}</a>`;
  const sides = [
    { name: name(answer.chosen, "✓ chosen"), tokens: chosen, says: told(answer.chosen) },
    { name: name(answer.rejected, "✗ rejected"), tokens: rejected, says: told(answer.rejected) },
  ];
  const link = (/** @type {string | null} */ other, /** @type {string} */ text, /** @type {string} */ says) =>
    other ? html`<a href=${to(other)} aria-label=${says}>${text}</a>` : html`<span class="soft" aria-hidden="true">${text}</span>`;
  return html`<h1>${visible(answer.pair_id)}</h1>
    <p class="soft"><a href=${address("/pair", { artifact })}>${artifact}</a>, ${answer.kind}, ${answer.method}, task ${pieces(answer.task_id)} ${link(answer.previous, "‹", "previous pair")} ${link(answer.next, "›", "next pair")}</p>
    <p>${answer.margin === null ? "No training stage recorded log-probs of the reference." : `Margin of the reference's log-probs: ${decimal(answer.margin)}.`}
      ${answer.trained_by.length ? ` Trained on by ${answer.trained_by.join(", ")}.` : " No stage trained on it."}</p>
    <h2>Chosen and rejected</h2>
    <${Preference} ...${preference} />
    <${Versus} shared=${answer.shared_prefix} sides=${sides} />`;
}

/** What the loss covers of a side. @param {PairSide} side */
function told(side) {
  const inside = side.covered_in_prefix ? `, ${count(side.covered_in_prefix)} of them in what both share` : "";
  const reference = side.ref_logprob === null ? "" : `; log-prob ${decimal(side.ref_logprob, 2)} under the reference`;
  return `reward ${decimal(side.reward)}; the loss covers ${count(side.covered)} of ${plural(side.tokens, "token")}${inside}${reference}`;
}

/** @typedef {import("./wire.js").RowLabels} Labels */
/** @typedef {import("./wire.js").Writing} Writing */

const NAME = "preference";
/** Value -> how it is said. The left side is the chosen one. */
const VALUES = { chosen: "the left", rejected: "the right", tie: "neither" };

/** What the author said of a pair, and how to say it. An exported file has none of it. @param {string | undefined} row the chosen side @param {string} pair */
function usePreference(row, pair) {
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
function Preference({ given, allowed, author, problem, give }) {
  if (!store) return null;
  return html`<div class="labels" role="group" aria-label="which side is better">
      <p><span class="label">which is better</span> ${/** @type {[keyof typeof VALUES, string][]} */ (Object.entries(VALUES)).map(([value, text]) => html`<button class=${value === given ? "mark on" : "mark"} aria-pressed=${value === given ? "true" : "false"} disabled=${!allowed} onClick=${() => give(value)}>${text}</button> `)}
        <span class="soft">${allowed ? `← → = by keys, as ${author}` : html`to say it, start the viewer by <code>agentrl view --write</code>`}</span></p>
    </div>
    ${problem && html`<${Problem} problem=${problem} />`}`;
}
