/** flechette.js defines a global, for lack of a small module in its package. This is what the viewer uses of it. */
export interface Batch { length: number; nullCount: number; values: any; validity: Uint8Array }
export interface Column { length: number; nullCount: number; data: Batch[]; at(index: number): any; toArray(): any }
export interface Table {
  numRows: number;
  names: string[];
  schema: { metadata: Map<string, string> | null };
  getChild(name: string): Column | undefined;
}
declare global {
  var fl: { tableFromIPC(data: Uint8Array | ArrayBuffer, options?: Record<string, boolean>): Table };
}
