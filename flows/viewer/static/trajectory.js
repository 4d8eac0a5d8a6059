// One trajectory: its messages, and under a lens its tokens in place.
import { Annotations } from "./annotations.js";
import { json, useAnswer } from "./api.js";
import { Conversation } from "./conversation.js";
import { Fate } from "./fate.js";
import { literal, oneOf } from "./filter.js";
import { count, decimal, plural, seconds, short } from "./format.js";
import { copy, say, useKeys } from "./keys.js";
import { lacking, LENSES, spoken } from "./lenses.js";
import { address, change, go, lasting, route, rowAddress, version } from "./location.js";
import { useMarks } from "./matches.js";
import { Laid } from "./markdown.js";
import { Minimap } from "./minimap.js";
import { Painter } from "./painter.js";
import { instead } from "./problem.js";
import { select, selected } from "./selection.js";
import { store } from "./served.js";
import { share } from "./share.js";
import { pieces, visible } from "./text.js";
import { theme } from "./theme.js";
import { fetchTokens, shares } from "./tokens.js";
import { html, useEffect, useMemo } from "./ui.js";

/** @typedef {import("./wire.js").RowAnswer} Row */
/** @typedef {import("./tokens.js").Tokens} Tokens */

/** @param {{id: string}} props */
export function TrajectoryPage({ id }) {
  const { at } = route.value.params;
  const { value, problem } = useAnswer(async (stop) => {
    const [row, tokens] = await Promise.all([
      /** @type {Promise<Row>} */ (json(`/api/rows/${encodeURIComponent(id)}`, { at }, stop)),
      fetchTokens(id, at, stop),
    ]);
    tokens.breaches = new Map(row.proof.map((breach) => [breach.token, breach.rule]));
    return { id, row, tokens };
  }, [id, at]);
  if (problem || !value) return instead(problem, "reading the row", visible(id));
  return html`<${Trajectory} key=${value.id} ...${value} />`;
}

/** @param {{id: string, row: Row, tokens: Tokens}} props */
function Trajectory({ id, row, tokens }) {
  const { at, lens: wanted, t, m, template, found: marked } = route.value.params;
  useMarks(".conversation", marked ? marked.split("\n") : []);
  const whole = template ? template === "shown" : tokens.length > FOLDED;
  const usable = LENSES.filter((candidate) => !lacking(candidate, tokens));
  const lens = usable.find((candidate) => candidate.id === wanted) ?? (t !== undefined && !wanted ? usable[0] : null) ?? null;
  const written = wanted === "text";
  const source = lens?.needs.map((name) => tokens.sources[name]).find(Boolean); // the stage that wrote what is shown
  const painter = useMemo(() => new Painter(tokens, lens ?? LENSES[0], !whole), [tokens, whole]);
  const spans = useMemo(() => shares(row.messages, tokens.length), [row, tokens]);
  const token = t === undefined ? -1 : Math.min(Number(t) || 0, tokens.length - 1);
  const current = m === undefined ? -1 : Number(m) || 0;
  useEffect(() => void (version.value = String(row.version)), [row]);
  useEffect(() => {
    if (lens) painter.use(lens);
  }, [lens]);
  useEffect(() => painter.mark(token), [token, painter]);
  useEffect(() => {
    if (token >= 0 && lens) painter.reveal(token);
    else if (current >= 0) show(current);
  }, [painter, lens === null]);

  const jump = (/** @type {number} */ i) => {
    change({ t: i, lens: lens ? wanted : usable[0]?.id });
    painter.mark(i);
    painter.reveal(i);
  };
  const turnTo = (/** @type {number} */ number) => {
    change({ m: number });
    show(number);
  };
  const turn = (/** @type {number} */ by, /** @type {(i: number) => boolean} */ fits = () => true) => {
    let next = current + by;
    while (next >= 0 && next < row.messages.length && !fits(next)) next += by;
    if (next >= 0 && next < row.messages.length) turnTo(next);
  };
  const error = (/** @type {number} */ i) => row.messages[i].error;
  const { attempts } = row.neighbours;
  const here = attempts.indexOf(id);
  const attempt = (/** @type {number} */ by) => attempts[here + by] && go(rowAddress(attempts[here + by], { at, lens: wanted }));
  const ids = ["read", "text", ...usable.map((candidate) => candidate.id)];
  const turnLens = (/** @type {number} */ by) => change({ lens: ids[(ids.indexOf(lens?.id ?? (written ? "text" : "read")) + by + ids.length) % ids.length].replace("read", "") });
  const next = () => nextBreach(tokens, token);
  useKeys({
    j: { does: "next message", run: () => turn(1) },
    k: { does: "previous message", run: () => turn(-1) },
    J: { does: "next tool error", run: () => turn(1, error) },
    K: { does: "previous tool error", run: () => turn(-1, error) },
    n: { does: "next attempt at the task", run: () => attempt(1) },
    p: { does: "previous attempt at the task", run: () => attempt(-1) },
    l: { does: "tokens under the first lens, or back to reading", run: () => change({ lens: lens ? null : usable[0]?.id }) },
    "[": { does: "previous lens", run: () => turnLens(-1) },
    "]": { does: "next lens", run: () => turnLens(1) },
    ArrowRight: { does: "next token", run: () => tokens.length && jump(Math.min(tokens.length - 1, token + 1)) },
    ArrowLeft: { does: "previous token", run: () => tokens.length && jump(Math.max(0, token - 1)) },
    b: { does: "next token that breaks the mask's proof", run: () => tokens.breaches.size && jump(next()) },
    f: { does: "what became of this row", run: () => unfold("fate") },
    a: { does: "what people and judges said of this row", run: () => unfold("annotations") },
    x: { does: "select this row", run: () => select(id) },
  });
  return html`<div class="trajectory">
    <${Title} id=${id} row=${row} at=${at} lens=${wanted} />
    <${Ribbon} lineage=${row.lineage} />
    <${Fate} key=${id} id=${id} at=${at} />
    <${Annotations} key=${`said ${id}`} id=${id} at=${at} messages=${row.messages} />
    <div class="lensbar">
      <${LensBar} tokens=${tokens} chosen=${lens?.id ?? (written ? "text" : "read")} />
      ${lens && html`<button class="quiet" aria-pressed=${whole ? "false" : "true"} onClick=${() => change({ template: whole ? "folded" : "shown" })}>${whole ? "fold template tokens" : "show template tokens"}</button>`}
      ${lens && html`<ul class="legend" aria-label=${`legend of the lens ${lens.name}`}>${lens.legend(tokens).map((entry) => html`<li><span class=${`swatch ${entry.mark}`}></span>${entry.says}</li>`)}
        ${source && html`<li class="soft">by ${pieces(source)}</li>`}</ul>`}
      <${Proof} row=${row} tokens=${tokens} jump=${() => jump(next())} />
    </div>
    ${lens && row.messages.every((message) => message.token_end === null) && html`<p class="soft">No message says where its tokens are, so all of them stand at the last one.</p>`}
    <div class=${`columns-of-row${lens ? "" : row.messages.length > 2 ? " with-outline" : " plain"}${whole ? "" : " folding"}`}>
      ${!lens && row.messages.length > 2 && html`<${Outline} messages=${row.messages} current=${current} open=${turnTo} />`}
      <div onClick=${(/** @type {Event} */ event) => painter.at(event.target) >= 0 && String(getSelection()) === "" && jump(painter.at(event.target))}>
        <${Conversation} id=${id} at=${at} messages=${row.messages} spans=${spans} painter=${lens && painter} current=${current} laid=${!written} />
        <${More} row=${row} />
      </div>
      ${lens && html`<${Minimap} painter=${painter} messages=${row.messages} spans=${spans} lens=${lens.id} theme=${theme.value} jump=${jump} />`}
    </div>
    <div class=${token < 0 ? "inspector empty" : "inspector"} role="status">
      ${token >= 0 && html`<b>${tokens.piece(token) || "(part of the character before)"}</b> <span>${spoken(tokens, token, tokens.piece(token))}</span> <span class="soft">token ${token} of ${tokens.length}, id ${tokens.id[token]}</span>`}
    </div>
  </div>`;
}

const LISTED = 1000;
const LATENCY = "latency_s:";
const FOLDED = 20_000; // tokens up to which those of the template are folded: what has tokens before and after it moves less

/** The turns in a line each. @param {{messages: Row["messages"], current: number, open: (number: number) => void}} props */
function Outline({ messages, current, open }) {
  const line = (/** @type {Row["messages"][number]} */ { role, content, tool_calls: calls, name, error, seconds: took }) => {
    const says = calls.length ? calls.map((call) => `${call.name}(${call.arguments.slice(0, 60)})`).join(", ") : content.slice(0, 90).trim() || "…";
    return html`<span class="role">${error ? "✗ " : ""}${role === "tool" ? (name ?? role) : role}</span> <span class="says">${visible(says)}</span>${(took ?? 0) >= 0.1 && html` <span>${seconds(took)}</span>`}`;
  };
  return html`<nav class="outline" aria-label="outline of turns"><ol>
    ${messages.slice(0, LISTED).map((message, i) => html`<li class=${message.error ? "bad" : ""}><a href=${`#m${i}`} aria-current=${i === current ? "true" : undefined} onClick=${(/** @type {Event} */ event) => {
      event.preventDefault();
      open(i);
    }}>${line(message)}</a></li>`)}
    </ol>${messages.length > LISTED && html`<p class="soft">and ${count(messages.length - LISTED)} more</p>`}</nav>`;
}

/** @param {string} id of what is folded */
function unfold(id) {
  const panel = /** @type {HTMLDetailsElement | null} */ (document.getElementById(id));
  if (!panel) return;
  panel.open = true;
  panel.scrollIntoView({ block: "nearest" });
}

/** Goes to a message; one that is not drawn yet comes in one of the next frames. @param {number} number */
function show(number, frames = 600) {
  const turn = document.getElementById(`m${number}`);
  if (!turn) return void (frames && requestAnimationFrame(() => show(number, frames - 1)));
  turn.scrollIntoView({ block: "start" });
  turn.focus({ preventScroll: true });
}

/** @param {Tokens} tokens @param {number} token */
function nextBreach(tokens, token) {
  const all = [...tokens.breaches.keys()].sort((a, b) => a - b);
  return all.find((position) => position > token) ?? all[0];
}

/** @param {{id: string, row: Row, at: string | undefined, lens: string | undefined}} props */
function Title({ id, row, at, lens }) {
  const { success, reward, termination, env, split, level, task_id: task } = row.row;
  const { attempts, all_attempts: all, previous, next } = row.neighbours;
  const here = attempts.indexOf(id);
  const to = (/** @type {string | null} */ other, /** @type {string} */ text, /** @type {string} */ label) =>
    other ? html`<a href=${rowAddress(other, { at, lens })} aria-label=${label}>${text}</a>` : html`<span class="soft" aria-hidden="true">${text}</span>`;
  return html`<div class="title">
    <h1>${visible(id)}${selected.value.has(id) ? " ●" : ""}</h1>
    <span class=${success === null ? "soft" : success ? "good" : "bad"}>${success === null ? "unscored" : success ? "✓ success" : "✗ failed"}</span>
    <span>reward ${decimal(reward)}</span>
    ${row.reward_components.map((component) => html`<span class="soft">${pieces(component.name)} ${decimal(component.value)}${component.weight === 1 ? "" : ` × ${decimal(component.weight)}`}</span>`)}
    <span>${termination}</span>
    <${Took} row=${row} />
    <${Errors} row=${row} />
    <span class="soft">${pieces(String(env))}, ${pieces(String(split))}, level ${level}</span>
    ${row.tags.filter((tag) => !(tag.startsWith(LATENCY) && timed(row))).map((tag) => html`<span class="tag">${pieces(tag)}</span>`)}
    <span class="end">${to(previous, "‹", "row before, of the same stage run")} ${to(next, "›", "row after, of the same stage run")}</span>
    <span>${to(attempts[here - 1] ?? null, "‹", "previous attempt")} attempt ${here + 1} of ${count(attempts.length)}${all > attempts.length ? ` (${count(all)} in all)` : ""} at <a href=${address("/task", { env, task_id: task, at })}>${pieces(String(task))}</a> ${to(attempts[here + 1] ?? null, "›", "next attempt")}</span>
    <details class="columns"><summary>copy</summary><div class="menu">
      <button onClick=${() => copy(lasting(), "link")}>link</button>
      <button onClick=${async () => copy(await uncut(id, row), "JSON")}>JSON</button>
      ${store && html`<button onClick=${() => share({ filter: oneOf([id]), at }, "row.html").catch((problem) => say(problem.message))}>one file for others</button>`}
    </div></details>
  </div>`;
}

/** All that the page was told of a row, as JSON with the whole messages. @param {string} id @param {Row} row */
async function uncut(id, row) {
  const whole = (/** @type {Row["messages"][number]} */ message) => (message.cut ? json(`/api/rows/${encodeURIComponent(id)}/messages/${message.number}`, { at: row.version }) : message);
  return JSON.stringify({ ...row, messages: await Promise.all(row.messages.map(whole)) }, null, 2);
}

/** Whether a row says how long messages took. @param {Row} row */
const timed = (row) => row.messages.some((message) => message.seconds !== null);

/** Seconds of all turns and of all calls, or of all turns at an endpoint, which a tag of other rows holds. @param {{row: Row}} props */
function Took({ row }) {
  const took = ["assistant", "tool"].map((role) => row.messages.reduce((sum, message) => sum + (message.role === role ? (message.seconds ?? 0) : 0), 0));
  const sums = ["turns", "calls"].map((name, i) => took[i] > 0 && `${name} took ${seconds(took[i])}`).filter(Boolean);
  if (timed(row)) return html`<span class="soft" title="together, where it is known">${sums.join(", ")}</span>`;
  const total = row.tags.find((tag) => tag.startsWith(LATENCY))?.slice(LATENCY.length);
  const turns = row.messages.filter((message) => message.role === "assistant").length;
  return total && html`<span class="soft" title="this row does not hold how long each message took">${seconds(Number(total))} at the endpoint${turns > 1 ? `, ${seconds(Number(total) / turns)} a turn` : ""}</span>`;
}

/** How many calls of tools failed, and how many of their answers are found: rows do not say which. @param {{row: Row}} props */
function Errors({ row }) {
  const recorded = Number(row.row.n_tool_errors);
  const known = row.messages.filter((message) => message.error).length;
  if (!recorded) return null;
  return html`<span class="bad">✗ ${plural(recorded, "tool error")}${known === recorded ? "" : html` <span class="soft">(${known === 0 ? "rows do not say at which" : `${count(known)} found by ${known === 1 ? "its" : "their"} words`})</span>`}</span>`;
}

/** @param {{tokens: Tokens, chosen: string}} props */
function LensBar({ tokens, chosen }) {
  const choose = (/** @type {string} */ id) => change({ lens: id });
  return html`<fieldset><legend class="unseen">lens</legend>
    <label title="laid out to be read"><input type="radio" name="lens" checked=${chosen === "read"} onChange=${() => choose("")} /><span>read</span></label>
    <label title="as it is written"><input type="radio" name="lens" checked=${chosen === "text"} onChange=${() => choose("text")} /><span>text</span></label>
    ${LENSES.map((lens) => {
      const why = lacking(lens, tokens);
      return html`<label title=${why ?? ""} class=${why ? "off" : ""}><input type="radio" name="lens" disabled=${why !== null} checked=${chosen === lens.id} onChange=${() => choose(lens.id)} /><span>${lens.name}</span>${why && html`<span class="unseen">: ${why}</span>`}</label>`;
    })}
  </fieldset>`;
}

/** @param {{row: Row, tokens: Tokens, jump: () => void}} props */
function Proof({ row, tokens, jump }) {
  if (!tokens.length) return html`<p class="soft">${lacking(LENSES[0], tokens)}.</p>`;
  const covered = tokens.coveredFrom(0, tokens.length);
  if (!row.breaches) return html`<p class="proof good">✓ ${plural(covered, tokens.trained ? "trained token" : "action token")}, each sampled by a policy</p>`;
  return html`<p class="proof bad">✗ ${plural(row.breaches, "token")} ${row.breaches === 1 ? "breaks" : "break"} the mask's proof${row.breaches > row.proof.length ? `, of which ${count(row.proof.length)} are marked` : ""} <button onClick=${jump}>next (b)</button></p>`;
}

/** Tools, the final state and all scalar columns. @param {{row: Row}} props */
function More({ row }) {
  const scalars = Object.entries(row.row);
  return html`<div class="more">
    <details><summary>all columns (${scalars.length})</summary><table class="lines"><tbody>
      ${scalars.map(([name, value]) => html`<tr><th scope="row">${name}</th><td>${pieces(typeof value === "string" ? value : JSON.stringify(value))}</td></tr>`)}
    </tbody></table></details>
    <details><summary>tools</summary><${Whole} text=${row.tools} characters=${row.tools_characters} /></details>
    <details><summary>final state</summary><${Whole} text=${row.final_state} characters=${row.final_state_characters} /></details>
  </div>`;
}

/** JSON, and what is not there of it. @param {{text: string, characters: number}} props */
function Whole({ text, characters }) {
  const all = characters <= text.length;
  return html`${!all && html`<p class="soft">the first ${count(text.length)} of ${count(characters)} characters; <code>agentrl view export</code> has all</p>`}
    <${Laid} text=${text} marked=${false} />`;
}

/** @param {{lineage: import("./wire.js").Made}} props */
function Ribbon({ lineage }) {
  const { made_by: maker, policy, learned_by: learners } = lineage;
  const rows = `stage = ${literal(maker.stage)} and fingerprint = ${literal(maker.fingerprint)}`;
  return html`<nav class="ribbon" aria-label="lineage">
    ${maker.inputs.length > 0 && html`<span class="soft">${maker.inputs.map(shortened).join(", ")} →</span>`}
    <span class="soft">${policy.stage ? "model" : "by"}</span>
    <a href=${address("/buffer", { filter: `policy = ${literal(policy.name)}` })}>${pieces(policy.name || "unnamed")}</a>
    <span class="soft">version ${policy.version}${policy.learned_from.length > 0 && html` (learned from ${policy.learned_from.map((source, i) => html`${i ? ", " : ""}<a href=${source.kind === "rows" ? address("/buffer", { among: source.artifact }) : address("/pair", { artifact: source.artifact })}>${source.kind} of ${shortened(source.artifact)}</a>`)})`} →</span>
    <a href=${address("/buffer", { filter: rows })} title=${maker.uses}>${pieces(maker.stage || "outside")}${maker.fingerprint && `/${short(maker.fingerprint)}`}</a>
    <span class="soft">→</span> <b>this row</b> <span class="soft">→</span>
    ${learners.length
      ? learners.map((learner) => html`<span>${learner.stage}/${short(learner.fingerprint)} <span class="soft">${steps(learner)}${models(learner)}</span></span>`)
      : html`<span class="soft">no stage learned from it</span>`}
  </nav>`;
}

/** @param {string} artifact STAGE/FINGERPRINT */
function shortened(artifact) {
  const [stage, fingerprint = ""] = artifact.split("/");
  return `${stage}/${short(fingerprint)}`;
}

/** Models that were trained on it, if another stage than the learner holds them. @param {import("./wire.js").LearnedBy} learner */
function models({ stage, fingerprint, models: names }) {
  const others = names.filter((name) => name !== `${stage}/${short(fingerprint)}`);
  return others.length ? ` → ${others.map(shortened).join(", ")}` : "";
}

/** The steps that learned from the row, each a link. @param {import("./wire.js").LearnedBy} learner */
function steps({ stage, fingerprint, steps: numbers }) {
  if (!numbers.length) return "(steps not recorded)";
  const link = (/** @type {number} */ step) => html`<a href=${address("/training", { artifact: `${stage}/${short(fingerprint)}`, step })}>${step}</a>`;
  if (numbers.length > 6) return html`${plural(numbers.length, "step")}, ${link(numbers[0])} to ${link(numbers[numbers.length - 1])}`;
  return html`step ${numbers.map((step, i) => html`${i ? ", " : ""}${link(step)}`)}`;
}
