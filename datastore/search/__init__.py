"""Finding trajectories by what they are about: embeddings, BM25, and both."""
