"""DAgger: an expert corrects the turns of the student in the states that the student came to."""
