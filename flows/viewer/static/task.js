// All attempts at one task, over stages and versions of policies; any two of them side by side.
import { json, useAnswer } from "./api.js";
import { count, decimal, percent, plural } from "./format.js";
import { change, route, rowAddress, version } from "./location.js";
import { Problem, instead } from "./problem.js";
import { pieces, visible } from "./text.js";
import { fetchTokens } from "./tokens.js";
import { Lines, html, useEffect } from "./ui.js";
import { Versus } from "./versus.js";

/** @typedef {import("./wire.js").AttemptLine} Attempt */
/** @typedef {import("./wire.js").TaskAttempts} Attempts */
/** @typedef {import("./wire.js").TreeBranch} Branch */
/** @typedef {import("./tokens.js").Tokens} Tokens */

const AT_ONCE = 64; // attempts up to which the tree is drawn without being asked for
const DEEPEST = 40; // steps to the right

export function TaskPage() {
  const { env, task_id, at, a, b } = route.value.params;
  const { value, problem } = useAnswer((stop) => /** @type {Promise<Attempts>} */ (json("/api/task", { env, task_id, at }, stop)), [env, task_id, at]);
  const sides = useAnswer(async (stop) => {
    if (!a || !b) return null;
    const [left, right] = await Promise.all([fetchTokens(a, at, stop), fetchTokens(b, at, stop)]);
    return { a, b, left, right };
  }, [a, b, at]);
  useEffect(() => void (value && (version.value = String(value.version))), [value]);
  if (problem || !value) return instead(problem, "reading the attempts", visible(task_id ?? "task"));
  return html`<h1>${visible(value.task_id)}</h1>
    <p class="soft">${pieces(value.env)}, ${plural(value.rows, "attempt")}</p>
    ${value.prompts.map((prompt) => html`<p class="prompt">${pieces(prompt)}</p>`)}
    <p class="soft">Press an attempt to choose it; two chosen ones are aligned below.</p>
    <${Lines} kind="strips" label="attempts by stage and policy" heads=${["stage", "policy", "#version", "#success", "#95 % interval", "#n", "attempts"]}>
      ${value.strips.map((strip) => html`<tr>
        <td>${pieces(strip.stage)}</td><td>${pieces(strip.policy)}${strip.greedy ? ", greedy" : strip.temperature === null || strip.temperature === 1 ? "" : `, temperature ${strip.temperature}`}</td><td class="number">${strip.policy_version}</td>
        <td class="number">${strip.success === null ? "–" : percent(strip.success)}</td>
        <td class="number">${strip.low === null || strip.high === null ? "–" : `${percent(strip.low)} to ${percent(strip.high)}`}</td>
        <td class="number">${count(strip.n)}</td>
        <td><div class="strip">${strip.attempts.map((attempt) => html`<${Mark} attempt=${attempt} a=${a} b=${b} />`)}</div>${strip.rows > strip.attempts.length && html`<span class="soft">the first ${count(strip.attempts.length)} of ${count(strip.rows)}</span>`}</td>
      </tr>`)}
    <//>
    <${Prefixes} env=${value.env} task=${value.task_id} at=${at} rows=${value.rows} />
    ${sides.problem && html`<${Problem} problem=${sides.problem} />`}
    ${sides.value && html`<${Sides} ...${sides.value} value=${value} at=${at} />`}`;
}

/** @param {{attempt: Attempt, a: string | undefined, b: string | undefined}} props */
function Mark({ attempt, a, b }) {
  const id = attempt.trajectory_id;
  const chosen = id === a ? "A" : id === b ? "B" : "";
  const outcome = attempt.success === null ? "unscored" : attempt.success ? "success" : "failed";
  const press = () => change(chosen === "A" ? { a: b, b: null } : chosen === "B" ? { b: null } : a ? { b: id } : { a: id });
  const label = `${chosen}${chosen && " "}${attempt.success === null ? "·" : attempt.success ? "✓" : "✗"}`;
  const told = `${id}: ${outcome}, reward ${decimal(attempt.reward)}, ${plural(attempt.n_tokens, "token")}, ${attempt.termination}`;
  return html`<button class=${`mark ${attempt.success === null ? "" : attempt.success ? "good" : "bad"}${chosen ? " on" : ""}`} title=${told} aria-label=${`${label} ${told}`} aria-pressed=${chosen ? "true" : "false"} onClick=${press}>${label}</button>`;
}

/** Where two rows part, by their tokens; why nobody knows, if so. @param {Tokens} left @param {Tokens} right @returns {number | string} */
export function parting(left, right) {
  if (!left.length || !right.length) return "One of them has no tokens, so nobody knows where they part.";
  if (left.tokenizer !== right.tokenizer) return `Their tokenizers ${left.tokenizer} and ${right.tokenizer} differ, so their tokens cannot be compared.`;
  const different = left.id.findIndex((id, i) => id !== right.id[i]);
  return different < 0 ? left.length : different;
}

/** @param {{value: Attempts, a: string, b: string, left: Tokens, right: Tokens, at: string | undefined}} props */
function Sides({ value, a, b, left, right, at }) {
  const link = (/** @type {string} */ id, /** @type {string} */ name) => html`${name}: <a href=${rowAddress(id, { at })}>${visible(id)}</a>`;
  const sides = [
    { name: link(a, "A"), tokens: left, says: plural(left.length, "token") },
    { name: link(b, "B"), tokens: right, says: plural(right.length, "token") },
  ];
  const attempts = value.strips.flatMap((strip) => strip.attempts);
  const [first, other] = [a, b].map((id) => attempts.find((attempt) => attempt.trajectory_id === id)?.success ?? null);
  const shared = parting(left, right);
  const same = shared === left.length && shared === right.length;
  return html`<h2>A and B ${first !== null && other !== null && first !== other ? html`<span class="bad">flipped: one succeeded, the other failed</span>` : same ? "are the same" : "have the same outcome"}</h2>
    ${typeof shared === "string" ? html`<p class="problem">${shared}</p>` : html`<${Versus} shared=${shared} sides=${sides} />`}`;
}

/** The attempts as a tree of the tokens that they share. @param {{env: string, task: string, at: string | undefined, rows: number}} props */
function Prefixes({ env, task, at, rows }) {
  const { tree } = route.value.params;
  const open = tree ? tree === "open" : rows <= AT_ONCE;
  const turned = (/** @type {Event} */ event) => {
    const now = /** @type {HTMLDetailsElement} */ (event.currentTarget).open;
    if (now !== open) change({ tree: now ? "open" : "closed" });
  };
  return html`<details open=${open} onToggle=${turned}>
    <summary>the attempts as a tree of shared tokens</summary>
    ${open && html`<${Tree} env=${env} task=${task} at=${at} />`}
  </details>`;
}

/** A line for each branch, further to the right than the one from which it goes on. @param {{env: string, task: string, at: string | undefined}} props */
function Tree({ env, task, at }) {
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").TaskTree>} */ (json("/api/task/tree", { env, task_id: task, at }, stop)), [env, task, at]);
  if (problem || !value) return instead(problem, "reading the tokens");
  const left = value.left_out ? html`<p class="soft">${plural(value.left_out, "attempt")} without tokens, of another tokenizer than most, or beyond the newest 1,024 ${value.left_out === 1 ? "is" : "are"} left out.</p>` : "";
  if (!value.branches.length) return html`${left}<p class="soft">No attempt has tokens to share.</p>`;
  const depths = /** @type {number[]} */ ([]);
  for (const { parent } of value.branches) depths.push(parent === null ? 0 : depths[parent] + 1);
  return html`${left}<${Lines} kind="tree" label=${`tree of ${plural(value.rows, "attempt")}`} heads=${["what they share, after what stands further left", "#tokens", "#attempts", "#mean reward, 95 % interval, n", "#succeeded", "ends here"]}>
    ${value.branches.map((branch, i) => html`<tr>
      <td class="cut" style=${{ paddingLeft: `${12 * Math.min(DEEPEST, depths[i])}px` }} title=${visible(branch.text)}><span class=${`swatch ${heat(branch.reward)}`}></span> <code>${pieces(branch.text.replace(/\s+/g, " ").trim() || "(no text)")}</code></td>
      <td class="number">${count(branch.start)} to ${count(branch.end)}</td><td class="number">${count(branch.rows)}</td><td class="number">${reward(branch)}</td>
      <td class="number">${branch.success === null ? "–" : `${count(Math.round(branch.success * branch.n))} of ${count(branch.n)}`}</td>
      <td class="wraps">${branch.ends.map((id) => html`<a href=${rowAddress(id, { at, lens: "mask", t: branch.start })}>${visible(id)}</a> `)}</td>
    </tr>`)}
  <//>`;
}

/** @param {Branch} branch */
function reward({ reward, low, high, rewarded }) {
  if (reward === null) return "no reward";
  const around = low === null || high === null ? "" : ` (${decimal(low, 2)} to ${decimal(high, 2)})`;
  return `${decimal(reward, 2)}${around}, n ${count(rewarded)}`;
}

/** The colour of a reward from 0 to 1; another one has none. @param {number | null} reward */
const heat = (reward) => (reward === null || reward < 0 || reward > 1 ? "blank" : `heat-${Math.min(5, Math.floor(reward * 5) + 1)}`);
