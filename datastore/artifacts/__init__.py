"""What stages leave beside the table: artifacts with manifests, live metrics, tasks and tokenizers."""
