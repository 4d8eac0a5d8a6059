"""Python runs this at the start of every process of a storm, also of the workers that a pipeline run starts."""

import mishaps

mishaps.install()
