"""What runs inside of vLLM's workers. A copy of this folder lies beside the weights, where the interpreter of vLLM
finds it under the name ``agentrl_worker``, so nothing here imports what is outside of it."""
