/** What the viewer uses of preact.js, in types. */
export type Child = VNode | string | number | boolean | null | undefined | Child[];
export interface VNode { type: unknown; props: Record<string, unknown> }
export function h(type: unknown, props: Record<string, unknown> | null, ...children: Child[]): VNode;
export function render(vnode: Child, parent: Element): void;
export function Fragment(props: { children?: Child }): Child;
