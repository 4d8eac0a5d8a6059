"""Where a store lives: objects in a local folder or an S3 bucket, locks among processes, and who works on what."""
