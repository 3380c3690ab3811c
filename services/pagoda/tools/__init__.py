"""Tools that several commands share: finding checkpoints, making keys, querying a server, listing versions."""
