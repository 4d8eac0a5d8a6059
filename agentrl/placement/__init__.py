"""Where the processes of a stage run, and what memory they need there."""
