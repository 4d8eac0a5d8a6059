"""What pages ask of a store: rows of the buffer by filter, facets, SQL, and what artifacts say of them."""
