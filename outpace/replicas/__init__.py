"""Several servers of one model on one machine, behind one port."""
