"""What a peer does with its gradients, from a batch to committed weights."""
