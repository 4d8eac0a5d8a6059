"""What every column of the buffer's views means, for people who write queries. A test compares it with the views."""

from agentrl.schemas.trajectory import Termination

_SHARED = {
    "trajectory_id": "id of the row: stage, fingerprint, number; the same on every re-run",
    "task_id": "id of the task that was attempted",
    "env": "name of the environment",
    "split": "split of the task: train, dev, heldout",
    "stage": "stage of the pipeline that appended the row",
    "policy_version": "version of the policy's weights, counted by online training",
    "success": "whether the task was solved; null if nobody scored the row",
    "reward": "reward of the episode; null if nobody scored the row",
}

_OF_A_STEP = {**_SHARED, "step": "number of the assistant message, from 0"}

VIEWS: dict[str, dict[str, str]] = {
    "trajectories": {
        **_SHARED,
        "episode_id": "id of the episode; its rows share it",
        "segment": "number of the row within its episode, from 0",
        "agent": "name of the agent that acts in the row",
        "group_id": "rollouts that are compared with each other share it",
        "sample_index": "number of the attempt among those of one task",
        "parent_id": "row that this one was made from or forked from",
        "fork_at": "leading tokens that the row shares with its parent and did not sample itself; 0 for a whole row",
        "source": "how the row came about: model, expert, hinted, rationalized, relabelled, negative, or the format "
        "of an import",
        "env_version": "version that the environment declares",
        "level": "difficulty of the task, as the environment counts it",
        "prompt": "first user message",
        "pipeline": "name of the pipeline whose stage appended the row; null if none did, as with imports by command",
        "fingerprint": "fingerprint of the stage run that appended the row",
        "run_id": "run that appended the row; see `agentrl runs`",
        "policy": "what acted: STAGE/FINGERPRINT of a model, or another name",
        "created_at": "when the row was made, UTC",
        "sampling": "JSON: temperature and other settings of the sampler",
        "termination": f"why the episode ended: {', '.join(Termination)}",
        "reward_components": "list of {name, value, weight}; the reward is made of them",
        "tags": "free words; evaluations tag their rows greedy or sampled, or control at other temperatures",
        "n_steps": "assistant messages",
        "n_tokens": "tokens of the whole row",
        "n_action_tokens": "tokens that the policy sampled",
        "n_tool_calls": "tool calls",
        "n_tool_errors": "tool calls that were answered by an error",
        "source_id": "id of the record in the source of an imported row; null if it has none",
        "source_file": "file that an imported row came from, as the import was given it",
        "source_time": "when the episode began, as the source says, UTC",
        "model": "model that acted, as the source spells it; `policy` may be set by the import, this is not",
        "prompt_tokens": "tokens of the prompts of all calls of the model together, as the source counts them",
        "completion_tokens": "tokens that the model wrote in all calls together, as the source counts them",
        "cost_usd": "what the calls of the model cost, in US dollars, as the source says",
        "messages": "list of {role, content, reasoning, tool_calls, tool_call_id, name, error, reward, token span}",
        "message_seconds": "seconds of each message, null where nobody measured them: of an assistant's the time from "
        "the request of the turn until its answer, of a tool's the time of the call; no digest counts them",
        "tools": "JSON: schemas of the tools that were offered",
        "final_state": "JSON: what a verifier needs to score the row again",
        "tokenizer": "fingerprint of the tokenizer and its chat template",
        "input_ids": "token ids as sampled",
        "action_mask": "per token: whether the policy sampled it",
        "logprobs": "per token: log-probability under the policy that sampled it; NaN if the mask is false",
        "spans": "list of {version, start, end}: which version of the weights sampled the action tokens of this range",
    },
    "steps": {
        **_OF_A_STEP,
        "reward": "reward of the step, if the environment gives one",
        "content": "what the assistant wrote",
        "reasoning": "what it reasoned before, if its format has that",
        "n_tool_calls": "tool calls of the step",
        "tool_calls": "list of {id, name, arguments}",
        "observation": "answers of the tools, joined by lines",
        "n_tokens": "tokens that were sampled in the step",
        "seconds": "time from the request of the turn until its answer; null if it is not known",
    },
    "tool_calls": {
        **{name: text for name, text in _OF_A_STEP.items() if name != "reward"},
        "call": "number of the call within its step, from 0",
        "call_id": "id that the policy gave the call",
        "name": "name of the tool",
        "arguments": "JSON: arguments of the call; args.KEY is the value of one of them, as text",
        "observation": "what the tool answered; null if nothing answers the call's id",
        "observation_length": "characters of what the tool answered",
        "seconds": "time of the call; null if it is not known",
        "error": "whether the answer reports a failure, as its message says; null if that is not known. Of rows whose "
        "messages do not say it, it is known if all answers are errors, or as many as begin with error, traceback, "
        "exception, failed",
    },
    "annotations": {
        "annotation_id": "unique name; one that is there already is not added again",
        "trajectory_id": "the row that it is about",
        "turn": "number of the assistant message in the row, from 0, as step in the view steps; null: the whole row",
        "token_start": "first token that it is about",
        "token_end": "the token after the last one",
        "pair_id": "the preference pair that it is about",
        "name": "what is said: thumbs, stars, correction, comment, or a label of one's own",
        "value": "as text",
        "number": "what the value counts as: up, true and yes are 1; down, false and no are 0; a number is itself",
        "comment": "in words",
        "correction": "JSON: the assistant message that should have been there",
        "author": "who says it",
        "author_kind": "person or judge",
        "source": "what wrote it: python, viewer, recorder, or the name of a file",
        "created_at": "when it was said; of one author, name and target only the newest is here",
        "version": "of the table of annotations, with which it came",
    },
}


def described() -> list[dict[str, str]]:
    """A row per column: view, column, type, meaning. A column without a description has an empty meaning."""
    import polars as pl

    from agentrl.datastore.read.views import views
    from agentrl.schemas.trajectory import TRAJECTORY_SCHEMA

    empty = pl.DataFrame(pl.from_arrow(TRAJECTORY_SCHEMA.empty_table())).lazy()
    return [
        {"view": view, "column": column, "type": str(kind), "meaning": VIEWS[view].get(column, "")}
        for view, frame in views(empty).items()
        for column, kind in frame.collect_schema().items()
    ]
