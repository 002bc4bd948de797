"""`outpace bench`: how fast a model runs on this machine, beside what the machine could do at most."""
