// What is there now, as the server says it: one stream of events for the whole tab, closed while nobody looks.
import { events } from "./served.js";
import { effect, signal, useEffect, useRef, useState } from "./ui.js";

/** @typedef {import("./wire.js").Pulse} Pulse */

const AGAIN_MS = 1000;

/** The last word of the server; null until there is one. */
export const pulse = signal(/** @type {Pulse | null} */ (null));
/** Whether the server was lost, and is asked for again each second. */
export const lost = signal(false);

let listeners = 0;
let again = 0;
/** @type {EventSource | null} */
let source = null;

function open() {
  if (source || listeners === 0 || document.hidden) return;
  source = events();
  if (!source) return;
  source.onmessage = (event) => {
    lost.value = false;
    pulse.value = JSON.parse(event.data);
  };
  source.onerror = () => {
    close(); // a server that begins again may refuse at first, and then browsers do not ask again by themselves
    lost.value = true;
    again = setTimeout(open, AGAIN_MS);
  };
}

function close() {
  clearTimeout(again);
  source?.close();
  source = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));

/** Listens while the component is shown. @param {(now: Pulse) => void} heard at once if there is a last word, and after each */
export function usePulse(heard) {
  const latest = useRef(heard);
  latest.current = heard;
  useEffect(() => {
    listeners++;
    open();
    const stop = effect(() => {
      const now = pulse.value;
      if (now) latest.current(now);
    });
    return () => {
      stop();
      if (--listeners === 0) close();
    };
  }, []);
}

/** Calls `again` once, `ms` after each `value` that is not the last one, while somebody looks. @param {unknown} value @param {boolean | undefined} unfinished @param {() => void} again @param {number} [ms] */
export function useUnfinished(value, unfinished, again, ms = AGAIN_MS) {
  useEffect(() => {
    if (!unfinished) return undefined;
    const ask = () => {
      if (document.hidden) return;
      document.removeEventListener("visibilitychange", ask);
      again();
    };
    const timer = setTimeout(() => {
      document.addEventListener("visibilitychange", ask);
      ask();
    }, ms);
    return () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", ask);
    };
  }, [value]);
}

/** A number that grows when what `pick` takes from the server's word is another than before. @param {(now: Pulse) => unknown} pick */
export function useChanges(pick) {
  const [state] = useState(() => ({ before: /** @type {string | null} */ (null) }));
  const [changes, setChanges] = useState(0);
  usePulse((now) => {
    const picked = JSON.stringify(pick(now));
    if (state.before !== null && state.before !== picked) setChanges((number) => number + 1);
    state.before = picked;
  });
  return changes;
}
