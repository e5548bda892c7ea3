"""One decoder per family; what a checkpoint changes is data (`ModelConfig`)."""
