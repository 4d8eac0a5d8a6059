"""On-policy distillation: a teacher scores each token that the student sampled."""
