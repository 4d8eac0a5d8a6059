"""``shop``: buying from a catalogue what a customer describes."""
