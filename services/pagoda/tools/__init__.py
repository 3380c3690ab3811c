"""What several commands use: finding a checkpoint, making keys, asking a server, naming versions."""
