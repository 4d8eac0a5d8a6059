// All attempts at one task, over stages and versions of policies; any two of them side by side.
import { json, useAnswer } from "./api.js";
import { count, decimal, percent, plural } from "./format.js";
import { change, route, rowAddress, version } from "./location.js";
import { Prefixes } from "./prefixes.js";
import { Problem, instead } from "./problem.js";
import { pieces, visible } from "./text.js";
import { fetchTokens } from "./tokens.js";
import { Wide, html, useEffect } from "./ui.js";
import { Versus } from "./versus.js";

/** @typedef {import("./wire.js").AttemptLine} Attempt */

export function TaskPage() {
  const { env, task_id, at, a, b } = route.value.params;
  const { value, problem } = useAnswer((stop) => /** @type {Promise<import("./wire.js").TaskAttempts>} */ (json("/api/task", { env, task_id, at }, stop)), [env, task_id, at]);
  const sides = useAnswer(async (stop) => {
    if (!a || !b) return null;
    const [aligned, left, right] = await Promise.all([
      /** @type {Promise<import("./wire.js").Aligned>} */ (json("/api/align", { a, b, at }, stop)),
      fetchTokens(a, at, stop),
      fetchTokens(b, at, stop),
    ]);
    return { aligned, left, right };
  }, [a, b, at]);
  useEffect(() => void (value && (version.value = String(value.version))), [value]);
  if (problem || !value) return instead(problem, "reading the attempts", visible(task_id ?? "task"));
  return html`<h1>${visible(value.task_id)}</h1>
    <p class="soft">${pieces(value.env)}, ${plural(value.rows, "attempt")}</p>
    ${value.prompts.map((prompt) => html`<p class="prompt">${pieces(prompt)}</p>`)}
    <p class="soft">Press an attempt to choose it; two chosen ones are aligned below.</p>
    <${Wide} label="attempts by stage and policy"><table class="lines strips"><thead><tr><th>stage</th><th>policy</th><th class="number">version</th><th class="number">success</th><th class="number">95 % interval</th><th class="number">n</th><th>attempts</th></tr></thead><tbody>
      ${value.strips.map((strip) => html`<tr>
        <td>${pieces(strip.stage)}</td><td>${pieces(strip.policy)}${strip.greedy ? ", greedy" : strip.temperature === null || strip.temperature === 1 ? "" : `, temperature ${strip.temperature}`}</td><td class="number">${strip.policy_version}</td>
        <td class="number">${strip.success === null ? "–" : percent(strip.success)}</td>
        <td class="number">${strip.low === null || strip.high === null ? "–" : `${percent(strip.low)} to ${percent(strip.high)}`}</td>
        <td class="number">${count(strip.n)}</td>
        <td><div class="strip">${strip.attempts.map((attempt) => html`<${Mark} attempt=${attempt} a=${a} b=${b} />`)}</div>${strip.rows > strip.attempts.length && html`<span class="soft">the first ${count(strip.attempts.length)} of ${count(strip.rows)}</span>`}</td>
      </tr>`)}
    </tbody></table><//>
    <${Prefixes} env=${value.env} task=${value.task_id} at=${at} rows=${value.rows} />
    ${sides.problem && html`<${Problem} problem=${sides.problem} />`}
    ${sides.value && html`<${Side} ...${sides.value} at=${at} />`}`;
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

/** @param {{aligned: import("./wire.js").Aligned, left: import("./tokens.js").Tokens, right: import("./tokens.js").Tokens, at: string | undefined}} props */
function Side({ aligned, left, right, at }) {
  const link = (/** @type {string} */ id, /** @type {string} */ name) => html`${name}: <a href=${rowAddress(id, { at })}>${visible(id)}</a>`;
  const sides = [
    { name: link(aligned.a, "A"), tokens: left, says: plural(left.length, "token") },
    { name: link(aligned.b, "B"), tokens: right, says: plural(right.length, "token") },
  ];
  return html`<h2>A and B ${aligned.flipped ? html`<span class="bad">flipped: one succeeded, the other failed</span>` : aligned.same ? "are the same" : "have the same outcome"}</h2>
    ${aligned.shared === null ? html`<p class="problem">${aligned.reason}</p>` : html`<${Versus} shared=${aligned.shared} sides=${sides} />`}`;
}
