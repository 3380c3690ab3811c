"""The files of a model, whoever reads them: those of a directory, or those that a GGUF file stands for."""
