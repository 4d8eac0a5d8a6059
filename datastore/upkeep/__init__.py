"""Upkeep of the buffer's table, one at a time: compaction, removal of dead files, checks and repairs, migration."""

from datastore.upkeep.checks import Fault, check
from datastore.upkeep.compaction import compact
from datastore.upkeep.forgetting import Forgotten, forget
from datastore.upkeep.losses import accept_losses, losses
from datastore.upkeep.migration import migrate
from datastore.upkeep.repair import Repaired, repair
from datastore.upkeep.retention import vacuum

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
