"""The measurements of `pagoda bench`: a server, the offline engine, kernels, startup."""
