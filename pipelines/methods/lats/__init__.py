"""Tree search over the turns of a task, as in LATS, Agent Q and ReST-MCTS*."""
