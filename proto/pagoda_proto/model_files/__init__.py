"""The files of a model, for every reader: those of a directory, or those derived from a GGUF file."""
