// Where the viewer is: in one file that has no server. Addresses of the viewer stand in the fragment, and questions are
// answered from what the file holds. The loader of the file puts this module in the place of `served.js`.
import { answered } from "./answers.js";

export const here = () => location.hash.slice(1) || "/";

/** @param {string} to */
export const href = (to) => `#${to}`;

const THERE = /^\/(buffer|task|row\/[^?]+)?(\?|$)/;
const CHOOSES = /[?&](among|rule)=/; // parts of the buffer that only a store knows

/** @param {string} to */
export const has = (to) => THERE.test(to) && !CHOOSES.test(to);

/** @param {string} to */
export const whole = (to) => location.href.split("#")[0] + href(to);

/** @param {HTMLAnchorElement} link */
export function target(link) {
  const to = link.getAttribute("href") ?? "";
  return to.startsWith("#/") ? to.slice(1) : null;
}

/** @param {string} address */
export const ask = (address) => answered(address);

Object.assign(globalThis, { agentrl: ask }); // for readers who want the rows themselves, in the browser's console

export const store = null;

export const beside = null;

/** Nothing changes in a file. */
export const events = () => null;

export async function enter() {}
