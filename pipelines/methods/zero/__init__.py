"""R-Zero and Absolute Zero: one policy proposes tasks and solves them."""
