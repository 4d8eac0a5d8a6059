/** What the viewer uses of uplot.js, in types. */
export interface Scale { min: number | null; max: number | null }
export default class uPlot {
  constructor(options: Record<string, unknown>, data: ArrayLike<number | null>[], parent: HTMLElement);
  readonly ctx: CanvasRenderingContext2D;
  readonly bbox: { left: number; top: number; width: number; height: number };
  readonly cursor: { idx: number | null };
  readonly over: HTMLElement;
  readonly scales: Record<string, Scale>;
  setData(data: ArrayLike<number | null>[], resetScales?: boolean): void;
  setSize(size: { width: number; height: number }): void;
  redraw(rebuildPaths?: boolean, recalcAxes?: boolean): void;
  valToPos(value: number, scale: string, canvasPixels?: boolean): number;
  destroy(): void;
  static join(tables: ArrayLike<number | null>[][]): ArrayLike<number | null>[];
  static sync(key: string): unknown;
}
