"""One pure function for each loss. They return losses of tokens, sequences or pairs, never means: the
training step (:mod:`agentrl.training.step`) divides by a count over the whole optimiser step, so that accumulation over
micro batches changes nothing."""
