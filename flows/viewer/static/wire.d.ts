// Written by tests/viewer/wire_types.py from flows/viewer/wire.py and wire_compare.py.
export interface Refusal {
  error: string;
  field: string | null;
  allowed: Array<string>;
  next: string | null;
}
export interface StageInput {
  stage: string;
  reason: string | null;
}
export interface StageBox {
  id: string;
  stage: string;
  uses: string;
  artifact: string | null;
  status: "cached" | "run" | "blocked" | "skipped" | "running";
  reason: string;
  fingerprint: string;
  seconds: number | null;
  inputs: Array<StageInput>;
  x: number;
  y: number;
}
export interface RunLine {
  run_id: string;
  pipeline: string;
  when: string;
  seconds: number | null;
  state: string;
  failed_stage: string | null;
  log_tail: string;
}
export interface Measurement {
  policy: string;
  stage: string;
  split: string;
  greedy: boolean;
  success: number;
  low: number;
  high: number;
  n: number;
}
export interface Overview {
  store: string;
  version: number | null;
  rows: number;
  pipeline: string | null;
  problem: string | null;
  planning: boolean;
  stages: Array<StageBox>;
  runs: Array<RunLine>;
  results: Array<Measurement>;
  pipelines: Array<string>;
}
export interface Bin {
  label: string;
  low: number | null;
  high: number | null;
  all: number;
  filtered: number;
  where: string;
}
export interface Facet {
  column: string;
  kind: "number" | "category" | "bool";
  bins: Array<Bin>;
  more: number;
}
export interface Facets {
  version: number;
  total: number;
  filtered: number;
  facets: Array<Facet>;
}
export interface Hit {
  trajectory_id: string;
  score: number;
}
export interface Hits {
  version: number;
  behind: number;
  hits: Array<Hit>;
}
export interface ShownCall {
  id: string;
  name: string;
  arguments: string;
}
export interface ShownMessage {
  number: number;
  role: "system" | "user" | "assistant" | "tool";
  content: string;
  reasoning: string | null;
  tool_calls: Array<ShownCall>;
  tool_call_id: string | null;
  name: string | null;
  reward: number | null;
  token_start: number | null;
  token_end: number | null;
  error: boolean;
  characters: number;
  cut: boolean;
}
export interface Component {
  name: string;
  value: number;
  weight: number;
}
export interface VersionSpan {
  version: number;
  start: number;
  end: number;
}
export interface Maker {
  pipeline: string | null;
  stage: string;
  fingerprint: string;
  run_id: string;
  uses: string;
  inputs: Array<string>;
}
export interface SampledBy {
  name: string;
  version: number;
  stage: string | null;
  fingerprint: string | null;
}
export interface LearnedBy {
  stage: string;
  fingerprint: string;
  steps: Array<number>;
  models: Array<string>;
}
export interface Made {
  made_by: Maker;
  policy: SampledBy;
  learned_by: Array<LearnedBy>;
}
export interface Breach {
  token: number;
  rule: string;
}
export interface Neighbours {
  previous: string | null;
  next: string | null;
  attempts: Array<string>;
}
export interface RowAnswer {
  version: number;
  row: Record<string, any>;
  messages: Array<ShownMessage>;
  tools: string;
  final_state: string;
  reward_components: Array<Component>;
  tags: Array<string>;
  spans: Array<VersionSpan>;
  lineage: Made;
  proof: Array<Breach>;
  breaches: number;
  neighbours: Neighbours;
}
export interface LevelResult {
  env: string;
  level: number;
  greedy: boolean;
  tasks: number;
  n: number;
  success: number;
  low: number;
  high: number;
}
export interface EvaluatedPolicy {
  artifact: string;
  stage: string;
  policy: string;
  split: string;
  when: string;
  results: Array<LevelResult>;
}
export interface Evaluations {
  evaluations: Array<EvaluatedPolicy>;
}
export interface ComparedArm {
  name: string;
  artifacts: Array<string>;
  policies: Array<string>;
  tasks: number;
  unscored: number;
  success: number;
  low: number;
  high: number;
}
export interface ChangedTask {
  env: string;
  task_id: string;
  prompt: string;
  before: number;
  after: number;
}
export interface PairedDifference {
  than: ComparedArm;
  arm: ComparedArm;
  greedy: boolean;
  mean: number;
  low: number;
  high: number;
  p: number | null;
  tasks: number;
  unshared: number;
  tasks_gained: number;
  tasks_lost: number;
  verdict: string;
  gained: Array<ChangedTask>;
  lost: Array<ChangedTask>;
}
export interface AttemptLine {
  trajectory_id: string;
  success: boolean | null;
  reward: number | null;
  sample_index: number;
  n_tokens: number;
  n_tool_errors: number;
  termination: string;
}
export interface Strip {
  stage: string;
  policy: string;
  policy_version: number;
  n: number;
  success: number | null;
  low: number | null;
  high: number | null;
  attempts: Array<AttemptLine>;
}
export interface TaskAttempts {
  version: number;
  env: string;
  task_id: string;
  prompts: Array<string>;
  rows: number;
  strips: Array<Strip>;
}
export interface TreeBranch {
  parent: number | null;
  start: number;
  end: number;
  rows: number;
  n: number;
  success: number | null;
  reward: number | null;
  text: string;
  ends: Array<string>;
  y: number;
}
export interface TaskTree {
  version: number;
  rows: number;
  left_out: number;
  branches: Array<TreeBranch>;
}
export interface Aligned {
  version: number;
  a: string;
  b: string;
  shared: number | null;
  reason: string;
  message_a: number | null;
  message_b: number | null;
  same: boolean;
  flipped: boolean;
}
export interface PairLine {
  pair_id: string;
  task_id: string;
  kind: string;
  chosen_id: string;
  rejected_id: string;
  chosen_reward: number | null;
  rejected_reward: number | null;
  shared_prefix: number;
}
export interface PairLines {
  artifacts: Array<string>;
  artifact: string | null;
  total: number;
  pairs: Array<PairLine>;
}
export interface PairSide {
  trajectory_id: string;
  reward: number | null;
  tokens: number;
  covered: number;
  covered_in_prefix: number;
  ref_logprob: number | null;
}
export interface PairAnswer {
  pair_id: string;
  task_id: string;
  kind: string;
  method: string;
  shared_prefix: number;
  chosen: PairSide;
  rejected: PairSide;
  margin: number | null;
  trained_by: Array<string>;
}
export interface FunnelLevel {
  rule: string;
  before: number;
  after: number;
  successes: number;
  n: number;
  mostly_successes: boolean;
}
export interface Funnel {
  artifact: string;
  stage: string;
  when: string;
  recorded: boolean;
  levels: Array<FunnelLevel>;
}
export interface Funnels {
  funnels: Array<Funnel>;
}
