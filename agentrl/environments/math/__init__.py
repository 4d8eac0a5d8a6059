"""``math``: word problems of several steps, solved with a calculator."""
