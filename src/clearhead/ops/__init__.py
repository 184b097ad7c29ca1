"""Python's side of the operators: arguments lowered to the CPU kernels' operators, and their gradients."""
