"""What several stages are made of: what they sample with, what they read, and what they count."""
