"""The Triton back end: GPU kernels, the shapes they are launched with, and their check."""
