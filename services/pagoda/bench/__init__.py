"""What `pagoda bench` measures: a server, a library call, kernels, a start."""
