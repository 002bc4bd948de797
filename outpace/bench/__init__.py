"""`outpace bench`: measures how fast a model runs on this machine, compared with the limit of the machine."""
