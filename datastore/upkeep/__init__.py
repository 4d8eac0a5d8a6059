"""Upkeep of the buffer's table, one at a time: compaction, removal of dead files, checks and repairs, migration."""

from agentrl.datastore.upkeep.checks import Fault, check
from agentrl.datastore.upkeep.compaction import compact
from agentrl.datastore.upkeep.forgetting import Forgotten, forget
from agentrl.datastore.upkeep.lost_rows import accept_losses, losses
from agentrl.datastore.upkeep.migration import migrate
from agentrl.datastore.upkeep.repair import Repaired, repair
from agentrl.datastore.upkeep.retention import vacuum

__all__ = [
    "Fault",
    "Forgotten",
    "Repaired",
    "accept_losses",
    "check",
    "compact",
    "forget",
    "losses",
    "migrate",
    "repair",
    "vacuum",
]
