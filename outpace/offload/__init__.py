"""Models larger than the device: where each layer lives, and how it gets to where it runs."""
