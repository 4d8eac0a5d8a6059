"""The questions that come to the agent, with the facts that its tool finds and the right answers: a line of JSON each.

python cases.py STORE > cases.jsonl
"""

import json
import sys

import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.results.lineage import find_artifact

catalog = Catalog(sys.argv[1])
tasks = find_artifact(catalog, "tasks")
for task in pq.read_table(catalog.local(tasks, tasks.outputs["train"].path)).to_pylist():
    facts, right = json.loads(task["metadata"])["facts"], json.loads(task["ground_truth"])
    print(json.dumps({"id": task["task_id"], "question": task["prompt"], "facts": facts, "answer": right}))
