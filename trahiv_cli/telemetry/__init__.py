"""What the swarm says of itself. Failing here never stops training."""
