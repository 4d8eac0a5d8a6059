"""World model first: a policy learns to predict observations, and then the tasks."""
