"""`outpace models`: lists the models in the cache folder."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def command() -> None:
    """List the models in the cache folder."""
    from outpace.loading.cache import cache_dir, cached_models

    console, found, where = Console(), cached_models(), escape(str(cache_dir()))
    if not found:
        console.print(f"No models in {where} yet: [bold]outpace generate hello[/] fetches the default one.")
        return
    table = Table(title=f"Models in {where}", title_justify="left")
    for column in ("name", "size", "dtype", "source"):
        table.add_column(column)
    for model in found:
        size = f"{model.size / 2**20:.0f} MiB"
        table.add_row(*map(escape, (model.name, size, model.dtype, model.source)))
    console.print(table)
