"""One pure function for each loss. They return losses of tokens, sequences or pairs, never means: what to divide by is
decided over a whole optimiser step (:mod:`agentrl.algorithms.objectives`), so that accumulation changes nothing."""
