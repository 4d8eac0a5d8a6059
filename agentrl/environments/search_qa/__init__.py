"""``search_qa``: questions over a knowledge graph that is only seen through a search engine and passages of text."""
