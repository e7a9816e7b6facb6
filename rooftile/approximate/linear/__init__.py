"""Linear attention: a feature map in place of the softmax."""
