"""``research``: answering a question by literature and simulated experiments, with a report that is checked."""
