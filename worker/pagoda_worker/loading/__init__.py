"""From a checkpoint to a model that can run here: kernels chosen, memory counted, numerics named."""
