"""WebRL: new tasks from failed ones, of a difficulty that the policy can learn from."""
