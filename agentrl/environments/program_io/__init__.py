"""``program_io``: a program, an input and an output, one of which is asked for."""
