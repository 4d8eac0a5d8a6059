/** What the viewer uses of htm.js, in types. */
import type { VNode } from "./preact.js";
type Tag = (strings: TemplateStringsArray, ...values: unknown[]) => VNode;
declare const htm: { bind(h: Function): Tag };
export default htm;
