"""Steps of the swarm: progress reports, rounds of averaging, catching up, and the optimizer."""
