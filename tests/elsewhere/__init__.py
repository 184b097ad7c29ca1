"""A device that is not the CPU, where no GPU is at hand."""
