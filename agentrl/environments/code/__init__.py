"""``code``: writing a function, and fixing bugs, with tools that read, search, edit and run tests."""
