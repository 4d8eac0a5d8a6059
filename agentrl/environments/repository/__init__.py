"""``repository``: issues of real repositories, from a task file in SWE-bench's form."""
