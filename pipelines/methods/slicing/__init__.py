"""Values of steps by continuation, and the turn at which a row was lost."""
