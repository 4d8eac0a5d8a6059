"""The actors' rows are those of the tests of the buffer."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "datastore"))
