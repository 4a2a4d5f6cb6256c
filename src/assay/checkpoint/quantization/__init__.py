"""The quantisation that a checkpoint declares, against the tensors that it stores."""
