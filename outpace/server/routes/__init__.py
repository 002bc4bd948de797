"""The routes. Each file has `router(services)`."""
