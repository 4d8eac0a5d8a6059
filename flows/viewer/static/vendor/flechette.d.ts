/** flechette.js defines a global, for lack of a small module in its package. This is what the viewer uses of it. */
export interface Batch { length: number; nullCount: number; values: any; offsets?: any; validity: Uint8Array }
export interface Column { length: number; nullCount: number; data: Batch[]; at(index: number): any; toArray(): any }
export interface Table {
  numRows: number;
  names: string[];
  schema: { metadata: Map<string, string> | null };
  getChild(name: string): Column | undefined;
}
export interface DataType { typeId: number }
declare global {
  var fl: {
    tableFromIPC(data: Uint8Array | ArrayBuffer, options?: Record<string, boolean>): Table;
    tableFromArrays(data: Record<string, unknown[]>, options: { types: Record<string, DataType> }): Table;
    tableToIPC(table: Table, options: { format: "stream" | "file" }): Uint8Array<ArrayBuffer>;
    utf8(): DataType;
    float64(): DataType;
    bool(): DataType;
    timestamp(unit: number, timezone: string): DataType;
  };
}
