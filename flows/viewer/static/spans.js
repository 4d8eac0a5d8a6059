// A span of a row's tokens, chosen by the mouse or by keys, so that something can be said of it.
import { useAnswer } from "./api.js";
import { say } from "./keys.js";
import { LENSES } from "./lenses.js";
import { Painter } from "./painter.js";
import { fetchTokens, shares } from "./tokens.js";
import { useEffect, useMemo, useState } from "./ui.js";

/** @typedef {import("./wire.js").ShownMessage} Message */
/** @typedef {[number, number]} Span the first token, and the one after the last */

/** The tokens of a row, once they are asked for, and which of them are chosen. @param {string | undefined} id @param {string | undefined} at @param {Message[] | null} messages */
export function useSpan(id, at, messages) {
  const [shown, setShown] = useState(false);
  const [ends, setEnds] = useState(/** @type {[number, number] | null} */ (null)); // where it began, and the cursor; both are in it
  const { value } = useAnswer(async (stop) => (shown && id ? { id, tokens: await fetchTokens(id, at, stop) } : null), [shown, id, at]);
  const tokens = shown && value && value.id === id ? value.tokens : null; // not those of the row before
  const painter = useMemo(() => (tokens?.length ? new Painter(tokens, LENSES[0]) : null), [tokens]);
  const spans = useMemo(() => (messages ?? []).map(() => /** @type {Span} */ ([0, 0])), [messages]);
  const tokenSpans = useMemo(() => (tokens && messages ? shares(messages, tokens.length) : spans), [tokens, messages]);
  const span = /** @type {Span | null} */ (painter && ends ? [Math.min(...ends), Math.max(...ends) + 1] : null);
  useEffect(() => setEnds(null), [id, shown]);
  useEffect(() => painter?.choose(span ?? [0, 0]), [painter, span?.[0], span?.[1]]);
  const to = (/** @type {number} */ token, /** @type {boolean} */ extend) => {
    if (!painter || !tokens) return;
    const cursor = Math.max(0, Math.min(token, tokens.length - 1));
    setEnds([extend && ends ? ends[0] : cursor, cursor]);
    painter.reveal(cursor);
  };
  return {
    painter,
    spans: painter ? tokenSpans : spans,
    span,
    text: span && tokens ? tokens.slice(...span) : "",
    lacks: tokens !== null && !tokens.length,
    turn: () => setShown(!shown),
    clear: () => setEnds(null),
    /** One token further, or back; the first of a message if none is chosen. @param {number} by @param {boolean} extend @param {number} from */
    step: (by, extend, from) => (painter ? to(ends ? ends[1] + by : from, extend) : say("t shows the tokens of the row first")),
    /** Takes what the mouse selected. */
    take: () => {
      const range = painter?.selected();
      if (!range) return;
      setEnds([range[0], range[1] - 1]);
      getSelection()?.removeAllRanges();
    },
  };
}
