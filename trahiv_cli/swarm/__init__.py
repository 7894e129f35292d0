"""Who is there: the node, its identity, what peers publish to each other."""
