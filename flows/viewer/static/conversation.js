// The messages of a row in one column. Under a lens each message shows its tokens in place of its text.
import { json } from "./api.js";
import { decimal, plural, seconds, size } from "./format.js";
import { Laid } from "./markdown.js";
import { Problem } from "./problem.js";
import { Text, pieces } from "./text.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./ui.js";

/** @typedef {import("./wire.js").ShownMessage} Turn */
/** @typedef {import("./painter.js").Painter} Painter */

const GROUP = 100; // messages that are drawn at once; the next ones follow in the next frame
const FOLDED = 1500; // characters of reasoning from which on it is folded
const SHORT = 100; // characters of arguments that stay in one line
const PART = 1_000_000; // characters of a content that are fetched at once

/**
 * @param {{
 *   id: string, at: string | undefined, messages: Turn[], spans: [number, number][], painter: Painter | null, current: number, laid: boolean,
 * }} props `painter` is null if text is shown, `laid` out or as it is written; `spans` are the tokens that each message shows
 */
export function Conversation({ id, at, messages, spans, painter, current, laid }) {
  const root = useRef(/** @type {HTMLElement | null} */ (null));
  const [ready, setReady] = useState(1);
  useLayoutEffect(() => (painter && root.current ? painter.listen(root.current) : undefined), [painter]);
  const groups = useMemo(() => {
    const groups = [];
    for (let start = 0; start < messages.length; start += GROUP)
      groups.push(html`<${Group} key=${start} id=${id} at=${at} messages=${messages} spans=${spans} painter=${painter} start=${start} laid=${laid} />`);
    return groups; // the same objects in every drawing, so that Preact leaves them alone
  }, [id, at, messages, spans, painter, laid]);
  useEffect(() => {
    if (ready >= groups.length) return undefined;
    const frame = requestAnimationFrame(() => setReady(ready + 1));
    return () => cancelAnimationFrame(frame);
  }, [ready, groups]);
  useEffect(() => {
    const turn = document.getElementById(`m${current}`);
    turn?.classList.add("current");
    return () => turn?.classList.remove("current");
  }, [current, ready, groups]);
  return html`<div class="conversation" ref=${root}>${groups.slice(0, ready)}</div>`;
}

/** @param {{id: string, at: string | undefined, messages: Turn[], spans: [number, number][], painter: Painter | null, start: number, laid: boolean}} props */
function Group({ id, at, messages, spans, painter, start, laid }) {
  return messages.slice(start, start + GROUP).map((turn, offset) => {
    const i = start + offset;
    const [from, to] = spans[i];
    const lines = 2 + Math.ceil((painter ? 5 * (to - from) : turn.characters) / 100);
    return html`<article key=${i} id=${`m${i}`} class=${`turn ${turn.role}${turn.error ? " failed" : ""}`} tabindex="-1"
        aria-label=${`message ${i + 1} of ${messages.length}, ${turn.role}`} style=${{ "--turn": `${20 * lines}px` }}>
      <${Head} turn=${turn} count=${painter ? to - from : 0} trained=${painter ? painter.tokens.coveredFrom(from, to) : 0} learned=${Boolean(painter?.tokens.trained)} />
      ${painter && to > from ? html`<${TokenText} painter=${painter} from=${from} to=${to} />` : html`<${Body} id=${id} at=${at} turn=${turn} laid=${laid} />`}
    </article>`;
  });
}

/** @param {{turn: Turn, count: number, trained: number, learned: boolean}} props */
function Head({ turn, count, trained, learned }) {
  return html`<header>
    <span class="role">${turn.role}</span>
    ${turn.name && html`<span class="soft">${pieces(turn.name)}</span>`}
    ${turn.error && html`<span class="bad">✗ tool error</span>`}
    ${turn.seconds !== null && html`<span class="soft" title=${turn.role === "tool" ? "of the call" : "from the request of the turn to its answer"}>${seconds(turn.seconds)}</span>`}
    ${turn.reward !== null && html`<span>reward ${decimal(turn.reward)}</span>`}
    <span class="soft end">${count ? `${plural(count, "token")}, ${trained} ${learned ? "trained" : "sampled"}` : ""} #${turn.number}</span>
  </header>`;
}

/** @param {{painter: Painter, from: number, to: number}} props */
function TokenText({ painter, from, to }) {
  const host = useRef(/** @type {HTMLElement | null} */ (null));
  useLayoutEffect(() => painter.fill(/** @type {HTMLElement} */ (host.current), from, to), [painter, from, to]);
  return html`<div class="tokens" ref=${host}></div>`;
}

/** The message as it was parsed: reasoning, content, calls. @param {{id: string, at: string | undefined, turn: Turn, laid: boolean}} props */
function Body({ id, at, turn, laid }) {
  const [whole, setWhole] = useState(/** @type {Turn | null} */ (null));
  const [parts, setParts] = useState(/** @type {string[]} */ ([])); // of a content that is fetched part by part
  const [problem, setProblem] = useState(/** @type {Error | null} */ (null));
  const shown = whole ?? turn;
  const left = turn.characters - parts.length * PART;
  const open = () => json(`/api/rows/${encodeURIComponent(id)}/messages/${turn.number}`, { at, start: parts.length * PART, most: PART }).then((answer) => {
    const next = /** @type {Turn} */ (answer);
    setWhole(whole ?? next);
    setParts([...parts, next.content]);
  }, setProblem);
  return html`
    ${shown.reasoning && html`<details class="reasoning" open=${shown.reasoning.length < FOLDED}><summary class="label">reasoning, ${size(shown.reasoning.length, "")} characters</summary><${laid ? Laid : Text} text=${shown.reasoning} marked /></details>`}
    ${shown.content && html`<div class=${laid ? "" : "content"}>${(parts.length ? parts : [shown.content]).map((part) => html`<${laid ? Laid : Text} text=${part} marked=${turn.role !== "tool"} />`)}</div>`}
    ${shown.tool_calls.map((call) => html`<div class="call"><span class="label">calls</span> <b>${pieces(call.name)}</b> <span class="arguments"><${laid && call.arguments.length > SHORT ? Laid : Text} text=${call.arguments} /></span></div>`)}
    ${turn.cut && !whole && html`<button onClick=${open}>show all (${size(turn.characters, "")} characters)</button>`}
    ${whole && left > 0 && html`<button onClick=${open}>show more (${size(left, "")} characters are left)</button>`}
    ${problem && html`<${Problem} problem=${problem} />`}
  `;
}
