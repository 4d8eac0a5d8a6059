"""Reading rows: by id, by SQL, as training batches; and what is cached on this machine to read them faster."""
