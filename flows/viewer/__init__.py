"""The viewer: a stateless reader of a store, for the browser. It never writes."""
