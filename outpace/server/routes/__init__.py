"""The routes, by who knows them. Each file has `router(services)`."""
