"""Episodes: attempts of policies and of scripted experts at tasks, and what is made of them."""
