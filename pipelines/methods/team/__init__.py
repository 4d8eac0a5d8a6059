"""Teams: several agents act in one episode."""
