"""`outpace models`: what is in the cache folder."""

from rich.console import Console
from rich.table import Table


def command() -> None:
    """List the models in the cache folder."""
    from outpace.loading.cache import cache_dir, cached_models

    console, found = Console(), cached_models()
    if not found:
        console.print(f"No models in {cache_dir()} yet: [bold]outpace generate hello[/] fetches the default one.")
        return
    table = Table(title=f"Models in {cache_dir()}", title_justify="left")
    for column in ("name", "size", "dtype", "source"):
        table.add_column(column)
    for model in found:
        table.add_row(model.name, f"{model.size / 2**20:.0f} MiB", model.dtype, model.source)
    console.print(table)
